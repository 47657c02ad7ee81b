"""The loop of the cascade: bounds that grow finer, and products where the key is at hand."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.compiled.lanes import (
    SEVERAL,
    further_reaching,
    lowest_bit,
    narrow_product,
    partly_reaching,
    reaching,
    several_further_reaching,
    several_partly_reaching,
    several_reaching,
)
from dualform.compiled.nearby import bounded_first, decided, error_of, marked, multiplied, others, scaling_of
from dualform.fast import LANES, SPANS

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
WIDTH0, WIDTH1, WIDTH2 = (stop - start for start, stop in SPANS)
CHUNK, TILE = 8, 128  # blocks and queries that stay near while they meet
SEEDED = 64  # queries that meet the first rows together
FIRST = 8192  # rows after which queries are ordered anew, and after four times as many
COST = 10  # fine bounds that a product costs
WHOLE = np.uint32(0xFFFFFFFF)  # all lanes of a block

# Every loop below is a function of its own, whose arrays stay what they are: for one that may change, numba counts who
# uses it at every access, which takes longer than what is done with it.


@numba.njit(cache=True, nogil=True)
@no_type_check
def grown(values: Array, room: int) -> Array:
    """The same values with more room."""
    larger = np.empty(room, values.dtype)
    larger[: len(values)] = values
    return larger


@numba.njit(cache=True, nogil=True)
@no_type_check
def passing(
    levels: Arrays, asked: Arrays, thresholds: Array, sizes: Array, slack: float, first: int, last: int, tile: int,
    some: int, bits: Array, to: Array, froms: Array, sums: Array, places: Array, askers: Array,
) -> int:  # fmt: skip
    """Find the rows of some blocks and the queries, some from `tile` on, that pass every level; how many pairs."""
    coarse, coarsely = (levels[0],), (asked[0],)
    middle, moderately = (levels[0], levels[1]), (asked[0], asked[1])
    last_one, finest = (levels[2],), (asked[2],)
    together = some - some % SEVERAL
    pairs = 0
    for block in range(first, last):
        start = block * LANES
        extra = np.float32(slack * sizes[start])
        # No branches here: which queries pass is hard to guess.
        for at in range(0, together, SEVERAL):
            several_reaching(coarse, coarsely, block, tile + at, thresholds, extra, bits, at)
        for at in range(together, some):
            bits[at] = reaching(coarse, coarsely, block, tile + at, thresholds[tile + at] - extra)
        many = 0
        for at in range(some):
            to[many] = tile + at
            many += bits[at] != 0
        for at in range(0, many - many % SEVERAL, SEVERAL):
            several_partly_reaching(middle, moderately, block, to, at, thresholds, extra, sums, froms, bits)
        for at in range(many - many % SEVERAL, many):
            partly_reaching(middle, moderately, block, to, at, thresholds, extra, sums, froms, bits)
        left = 0
        for at in range(many):
            to[left], froms[left] = to[at], at
            left += bits[at] != 0
        for at in range(0, left - left % SEVERAL, SEVERAL):
            several_further_reaching(last_one, finest, block, to, at, thresholds, extra, sums, froms, bits)
        for at in range(left - left % SEVERAL, left):
            further_reaching(last_one, finest, block, to, at, thresholds, extra, sums, froms, bits)
        lanes = WHOLE if start + LANES <= len(sizes) else np.uint32((1 << (len(sizes) - start)) - 1)
        for at in range(left):
            rows = bits[at] & lanes
            while rows:
                places[pairs], askers[pairs] = start + lowest_bit(rows), to[at]
                rows &= rows - np.uint32(1)
                pairs += 1
    return pairs


@numba.njit(cache=True, nogil=True)
@no_type_check
def reaching_finely(
    fine: Array, rows: Array, sizes: Array, weights: Array, offsets: Array, finely: Array, added: Array,
    thresholds: Array, which: Array, slack: float, places: Array, askers: Array, bounds: Array, pairs: int,
) -> int:  # fmt: skip
    """Keep the pairs whose bounds by all columns, in the units of the view, reach the threshold; how many.

    What is not weighted is one product.
    """
    kept, width = 0, fine.shape[1] - 2
    for pair in range(pairs):
        place, query = places[pair], askers[pair]
        row = rows[place] if len(rows) else place
        if len(weights):
            weight = weights[place]
            bound = weight * narrow_product(fine, row, finely, query, width)
            bound += abs(weight) * fine[row, width] * finely[query, width] + np.float32(slack) * sizes[place]
        else:
            bound = narrow_product(fine, row, finely, query, width + 2)
        if len(offsets):
            bound += offsets[place] * added[which[query]]
        places[kept], askers[kept], bounds[kept] = place, query, bound
        kept += bound >= thresholds[query]
    return kept


@numba.njit(cache=True, nogil=True)
@no_type_check
def cascade(
    levels: Arrays, view: Arrays, every_asked: Arrays, every_finely: Array, added: Array, near: Arrays,
    units: tuple[float, ...], every: Array, k: int, seeds: int, begin: int, end: int, slack: float, spare: int,
    most: int, part: int, parts: int,
) -> tuple[bool, int, int, Array, Array, Array]:  # fmt: skip
    """The pairs of one part of the queries whose every bound reaches the threshold, each with its last bound.

    Also how many were bounded and how many products were formed. False where that does not pay: where finer bounds
    are asked for too often, or more than `most` pairs are left. Rows stand in blocks of lanes. Where a key is at hand
    the last bound is the product, and thresholds rise to what k rows surely reach.
    """
    # Loops that were compiled for other blocks would read past them.
    assert levels[0].shape[1:] == (WIDTH0 + 1, LANES) and every_asked[0].shape[1] == WIDTH0 + 1
    assert levels[1].shape[1:] == (WIDTH1 + 1, LANES) and every_asked[1].shape[1] == WIDTH1 + 1
    assert levels[2].shape[1:] == (WIDTH2 + 1, LANES) and every_asked[2].shape[1] == WIDTH2 + 1
    fine, numbers, rows, sizes, ascending, weights, offsets = view
    keys, slots, queries, norms = near
    scaling, wide = scaling_of(queries.shape[1], norms, units), slack + error_of(queries.shape[1])
    which = np.arange(part, len(every), parts)
    thresholds, finely = every[which], every_finely[which]
    asked = (every_asked[0][which], every_asked[1][which], every_asked[2][which])
    reached = np.full((len(which), k if len(keys) else 0), -np.inf, np.float32)  # the k best of every query
    found, bounded, scored, tried, active = 0, 0, 0, 0, 0
    room = 4096
    at_row, at_query, at_bound = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.float32)
    bits, passed = np.empty(TILE, np.uint32), np.empty(TILE + 1, np.int64)
    froms, sums = np.empty(TILE + 1, np.int64), np.empty((TILE, LANES), np.float32)
    first_ones = seeds * min(SEEDED, len(which))
    at_once = max(CHUNK * LANES * min(TILE, len(which)), first_ones) + 1
    places, askers, where = np.empty(at_once, np.int32), np.empty(at_once, np.int32), np.full(at_once, -1, np.int32)
    bounds, scores = np.empty(at_once, np.float32), np.empty(at_once)
    best, coarsely = np.empty((1, k + max(k // 4, 2) if seeds else 0), np.float32), np.empty(first_ones, np.float32)
    marks = np.empty(first_ones // LANES, np.uint32)
    for tile in range(0, len(which) if seeds else 0, SEEDED):
        # Of the first rows those with the best bounds give thresholds that spare most of the others.
        some = min(SEEDED, len(which) - tile)
        bounded += some * seeds
        for turn in range(2):
            if turn == 0:
                bounded_first(levels, asked, tile, some, seeds, coarsely, best, marks)
            else:
                others(coarsely, sizes, thresholds, tile, some, seeds, slack, marks)
            pairs = marked(coarsely, sizes, tile, some, seeds, slack, marks, places, askers, bounds)
            if turn == 1:
                tried += pairs
                pairs = reaching_finely(
                    fine, rows, sizes, weights, offsets, finely, added, thresholds, which, slack, places, askers,
                    bounds, pairs,
                )  # fmt: skip
            more = multiplied(numbers, rows, keys, slots, queries, scaling, which, places, askers, pairs, where, scores)
            scored += more
            tried += COST * more
            if found + pairs >= room:
                room = 4 * (found + pairs)
                at_row, at_query, at_bound = grown(at_row, room), grown(at_query, room), grown(at_bound, room)
            found = decided(
                sizes, weights, offsets, added, scaling, thresholds, which, reached, wide, places, askers, bounds,
                pairs, where, scores, at_row, at_query, at_bound, found,
            )  # fmt: skip
    begin = max(begin, seeds)
    reach, reorder = which, begin  # in rows, from the first reordering on
    for chunk in range(begin, end, CHUNK * LANES):
        if chunk >= reorder:
            # Queries that reach far come first, so that those that are done are left out together.
            reorder = max(4 * chunk, FIRST)
            reach = np.minimum(np.searchsorted(ascending, -thresholds, side="right"), end)
            order = np.argsort(-reach)
            reach, thresholds, which, reached = reach[order], thresholds[order], which[order], reached[order]
            asked = (asked[0][order], asked[1][order], asked[2][order])
            finely, active = finely[order], len(which)
        while active > 0 and reach[active - 1] <= chunk:
            active -= 1
        if active == 0:
            break
        first = chunk // LANES
        for tile in range(0, active, TILE):
            some, last = min(TILE, active - tile), min(first + CHUNK, (reach[tile] + LANES - 1) // LANES)
            bounded += some * (last - first) * LANES
            pairs = passing(
                levels, asked, thresholds, sizes, slack, first, last, tile, some, bits, passed, froms, sums, places,
                askers,
            )  # fmt: skip
            tried += pairs
            if tried > spare // parts + bounded // 8:
                return False, bounded, scored, at_row[:0], at_query[:0], at_bound[:0]
            pairs = reaching_finely(
                fine, rows, sizes, weights, offsets, finely, added, thresholds, which, slack, places, askers, bounds,
                pairs,
            )  # fmt: skip
            if len(keys):
                more = multiplied(
                    numbers, rows, keys, slots, queries, scaling, which, places, askers, pairs, where, scores
                )
                scored += more
                tried += COST * more
            if found + pairs >= room:
                room = 4 * (found + pairs)
                at_row, at_query, at_bound = grown(at_row, room), grown(at_query, room), grown(at_bound, room)
            found = decided(
                sizes, weights, offsets, added, scaling, thresholds, which, reached, wide, places, askers, bounds,
                pairs, where, scores, at_row, at_query, at_bound, found,
            )  # fmt: skip
            if found > 2 * most // parts:
                return False, bounded, scored, at_row[:0], at_query[:0], at_bound[:0]
    lowest = np.empty(len(every), np.float32)
    lowest[which] = thresholds
    kept = 0
    for pair in range(found):
        if at_bound[pair] >= lowest[at_query[pair]]:
            at_row[kept], at_query[kept], at_bound[kept] = at_row[pair], at_query[pair], at_bound[pair]
            kept += 1
    return True, bounded, scored, at_row[:kept].copy(), at_query[:kept].copy(), at_bound[:kept].copy()
