"""The loop of the cascade: bounds that grow finer, and products where the key is at hand."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.compiled.lanes import bounds_into, lowest_bit, reaching
from dualform.fast import CUTS, LANES, SPANS

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
WIDTH0, WIDTH1, WIDTH2 = (stop - start for start, stop in SPANS)
CHUNK, TILE = 8, 128  # blocks and queries that stay near while they meet
FIRST = 8192  # rows after which queries are ordered anew, and after four times as many
MOST = 3.4028e38  # below what fp32 rounds to infinity
COST = 10  # fine bounds that a product costs
NONE, ONE = np.float32(0.0), np.float32(1.0)
WHOLE = np.uint32(0xFFFFFFFF)  # all lanes of a block


@numba.njit(cache=True, nogil=True)
@no_type_check
def ask(
    head: Array, sizes: Array, scales: Array, extended: bool, slack: float, levels: Arrays, fine: Array, part: int,
    parts: int,
) -> None:  # fmt: skip
    """What queries meet the rows with: heads times scales, which have these sizes; the scales may be a column too."""
    level0, level1, level2 = levels
    queries, width = len(head), fine.shape[1] - 2
    first = 1 if extended else 0
    wide = np.zeros(max(width + first, CUTS[-1]))
    for query in range(queries * part // parts, queries * (part + 1) // parts):
        square = 0.0
        for column in range(width):
            value = head[query, column] * scales[query]
            wide[first + column] = value
            fine[query, column] = value
            square += value * value
        if first:
            wide[0] = scales[query]
        size = sizes[query]
        # As _tail and _levels have it.
        tail = (np.sqrt(max(size * size - square, 0.0)) + 1e-7 * size) * (1 + 1e-6) + 1e-30
        fine[query, width] = tail
        fine[query, width + 1] = slack
        square = tail * tail
        for column in range(len(wide) - 1, -1, -1):
            if column == CUTS[2] - 1:
                level2[query, WIDTH2] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            elif column == CUTS[1] - 1:
                level1[query, WIDTH1] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            elif column == CUTS[0] - 1:
                level0[query, WIDTH0] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            value = wide[column]
            square += value * value
            if column < CUTS[0]:
                level0[query, column] = value
            elif column < CUTS[1]:
                level1[query, column - CUTS[0]] = value
            elif column < CUTS[2]:
                level2[query, column - CUTS[1]] = value


@numba.njit(cache=True, nogil=True)
@no_type_check
def grown(values: Array, room: int) -> Array:
    """The same values with more room."""
    larger = np.empty(room, values.dtype)
    larger[: len(values)] = values
    return larger


@numba.njit(cache=True, nogil=True)
@no_type_check
def put(heap: Array, value: float) -> None:
    """Put a value in the place of the smallest, which comes first."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def product(row: Array, query: Array) -> float:
    """In fp64."""
    total = 0.0
    for at in range(len(row)):
        total += np.float64(row[at]) * np.float64(query[at])
    return total


@numba.njit(cache=True, nogil=True)
@no_type_check
def surely(score: float, size: float, scale: float, norm: float, key_scale: float, slack: float) -> float:
    """So far below a score that rows whose bounds stay below have a smaller one, also when both are rounded to fp32.

    There too small numbers are all zero, and too large ones all infinite.
    """
    least = 3e-45 * (1 / scale + 1 / key_scale) / norm
    return np.float32(min(score - slack * size - least, MOST / scale / norm, MOST))


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def seeded(
    levels: Arrays, numbers: Array, sizes: Array, asked: Arrays, near: Arrays, units: tuple[float, ...],
    thresholds: Array, which: Array, k: int, seeds: int, slack: float,
) -> int:  # fmt: skip
    """Raise the thresholds to what k of the first rows surely reach, those with the best bounds; how many products."""
    keys, slots, queries, norms = near
    sign, scale, key_scale = units
    some = k + max(k // 4, 2)
    best = np.empty(some, np.float32)
    lowest = np.empty(k, np.float32)
    bounds = np.empty(seeds, np.float32)
    scored = 0
    for query in range(len(which)):
        best[:] = -np.inf
        for block in range(seeds // LANES):
            bounds_into(levels, asked, block, query, bounds, block * LANES)
        for row in range(seeds):
            if bounds[row] > best[0]:
                put(best, bounds[row])
        lowest[:] = -np.inf
        asking = which[query]
        for row in range(seeds):
            if bounds[row] >= best[0]:
                slot = slots[numbers[row]]
                if 0 <= slot < len(keys):
                    scored += 1
                    score = product(keys[slot], queries[asking]) * sign / key_scale / norms[asking]
                    low = surely(score, sizes[row], scale, norms[asking], key_scale, slack)
                    if low > lowest[0]:
                        put(lowest, low)
        thresholds[query] = max(thresholds[query], lowest[0])
    return scored


@numba.njit(cache=True, nogil=True)
@no_type_check
def passing(
    block: int, levels: Arrays, asked: Arrays, thresholds: Array, extra: float, tile: int, some: int, bits: Array,
    to: Array,
) -> int:  # fmt: skip
    """Which of some queries, from `tile` on, a row of a block may pass for by the first two levels; how many."""
    coarse, coarsely = (levels[0],), (asked[0],)
    # No branches here: which queries pass is hard to guess.
    for at in range(some):
        bits[at] = reaching(coarse, coarsely, block, tile + at, thresholds[tile + at] - extra)
    many = 0
    for at in range(some):
        to[many] = tile + at
        many += bits[at] != 0
    middle, moderately = (levels[0], levels[1]), (asked[0], asked[1])
    left = 0
    for at in range(many):
        query = to[at]
        to[left] = query
        left += reaching(middle, moderately, block, query, thresholds[query] - extra) != 0
    return left


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def finer(fine: Array, asked: Array, weighted: bool, weight: float, size: float, slack: float) -> float:
    """The bound of a row by all columns, in the units of a view; what is not weighted is one product."""
    value = NONE
    if not weighted:
        for column in range(len(fine)):
            value += fine[column] * asked[column]
        return value
    width = len(fine) - 2
    for column in range(width):
        value += fine[column] * asked[column]
    return weight * value + abs(weight) * fine[width] * asked[width] + np.float32(slack) * size


@numba.njit(cache=True, nogil=True)
@no_type_check
def cascade(
    levels: Arrays, fine: Array, numbers: Array, rows: Array, sizes: Array, ascending: Array, weights: Array,
    offsets: Array, every_asked: Arrays, every_finely: Array, added: Array, near: Arrays, units: tuple[float, ...],
    every: Array, k: int, seeds: int, begin: int, end: int, slack: float, spare: int, most: int, part: int, parts: int,
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
    keys, slots, queries, norms = near
    sign, scale, key_scale = units
    weighted = len(weights) > 0
    which = np.arange(part, len(every), parts)
    thresholds, finely = every[which], every_finely[which]
    asked = (every_asked[0][which], every_asked[1][which], every_asked[2][which])
    reached = np.full((len(which), k if len(keys) else 0), -np.inf, np.float32)  # the k best of every query
    scored = seeded(levels, numbers, sizes, asked, near, units, thresholds, which, k, seeds, slack) if seeds else 0
    found, bounded, tried, active, reorder = 0, 0, 0, 0, begin
    reach = which  # in rows, from the first reordering on
    room = 4096
    at_row, at_query, bounds = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.float32)
    bits, passed = np.empty(TILE, np.uint32), np.empty(TILE + 1, np.int64)
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
        for tile in range(0, active, TILE):
            some = min(TILE, active - tile)
            for block in range(chunk // LANES, min(chunk // LANES + CHUNK, (reach[tile] + LANES - 1) // LANES)):
                start = block * LANES
                extra = np.float32(slack * sizes[start])
                bounded += some * LANES
                if tried > spare // parts + bounded // 8:
                    return False, bounded, scored, at_row[:0], at_query[:0], bounds[:0]
                lanes = WHOLE if start + LANES <= len(sizes) else np.uint32((1 << (len(sizes) - start)) - 1)
                for at in range(passing(block, levels, asked, thresholds, extra, tile, some, bits, passed)):
                    query = passed[at]
                    asking = which[query]
                    left = reaching(levels, asked, block, query, thresholds[query] - extra) & lanes
                    while left:
                        place = start + lowest_bit(left)
                        left &= left - np.uint32(1)
                        row = rows[place] if len(rows) else place
                        weight = weights[place] if weighted else ONE
                        offset = offsets[place] * added[asking] if len(offsets) else NONE
                        bound = finer(fine[row], finely[query], weighted, weight, sizes[place], slack) + offset
                        tried += 1
                        if bound < thresholds[query]:
                            continue
                        slot = slots[numbers[row]] if len(keys) else -1
                        if 0 <= slot < len(keys):
                            tried += COST
                            scored += 1
                            score = product(keys[slot], queries[asking]) * sign / key_scale / norms[asking]
                            score = score * weight + offset
                            low = surely(score, sizes[place], scale, norms[asking], key_scale, slack)
                            if low > reached[query, 0]:
                                put(reached[query], low)
                                thresholds[query] = max(thresholds[query], reached[query, 0])
                            bound = np.float32(score + slack * sizes[place])
                            if bound < thresholds[query]:
                                continue
                        if found == 1 + 2 * most // parts:
                            return False, bounded, scored, at_row[:0], at_query[:0], bounds[:0]
                        if found == room:
                            room *= 4
                            at_row, at_query, bounds = grown(at_row, room), grown(at_query, room), grown(bounds, room)
                        at_row[found], at_query[found], bounds[found] = place, asking, bound
                        found += 1
    last = np.empty(len(every), np.float32)
    last[which] = thresholds
    kept = 0
    for pair in range(found):
        if bounds[pair] >= last[at_query[pair]]:
            at_row[kept], at_query[kept], bounds[kept] = at_row[pair], at_query[pair], bounds[pair]
            kept += 1
    return True, bounded, scored, at_row[:kept].copy(), at_query[:kept].copy(), bounds[:kept].copy()
