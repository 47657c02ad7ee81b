"""Products with the keys that are at hand, and the scores that k rows surely have by them."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.compiled.lanes import (
    SEVERAL,
    WIDE,
    bounds_into,
    lowest_bit,
    narrow_product,
    not_below,
    several_bounds_into,
)
from dualform.compiled.pairs import wide_product
from dualform.fast import LANES

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
MOST = 3.4028e38  # below what fp32 rounds to infinity
# Where the products of norms lie between these, fp32 overflows nowhere, and loses nothing that counts to underflow.
LEAST_NARROW, MOST_NARROW = 1e-20, 1e38


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def put(heaps: Array, row: int, value: float) -> None:
    """Put a value in the place of a row's smallest, which comes first."""
    size, at, child = heaps.shape[1], 0, 1
    while child < size:
        if child + 1 < size and heaps[row, child + 1] < heaps[row, child]:
            child += 1
        if heaps[row, child] >= value:
            break
        heaps[row, at] = heaps[row, child]
        at, child = child, 2 * child + 1
    heaps[row, at] = value


@numba.njit(cache=True, nogil=True)
@no_type_check
def is_narrow(factor: float) -> bool:
    """Whether products may be formed in fp32, by a factor that is one over the largest that they can be."""
    return 1 / MOST_NARROW < abs(factor) < 1 / LEAST_NARROW


@numba.njit(cache=True, nogil=True)
@no_type_check
def error_of(width: int) -> float:
    """How far a product in fp32 may be from the true one, in units of the norms: a part of every sum, and its end."""
    return (width // WIDE + 3 * WIDE) * 2.0**-24


@numba.njit(cache=True, nogil=True)
@no_type_check
def scaling_of(width: int, norms: Array, units: tuple[float, float, float]) -> Array:
    """For every query: a factor that makes a score of a product, what underflow can lose, and what is surely finite.

    In fp32 too small numbers are all zero, and too large ones all infinite.
    """
    sign, scale, key_scale = units
    scaling = np.empty((len(norms), 3))
    for query in range(len(norms)):
        norm = norms[query]
        lost = 1e-37 * width / max(key_scale * norm, LEAST_NARROW)
        scaling[query, 0] = sign / key_scale / norm
        scaling[query, 1] = 3e-45 * (1 / scale + 1 / key_scale) / norm + lost
        scaling[query, 2] = min(MOST / scale / norm, MOST)
    return scaling


@numba.njit(cache=True, nogil=True)
@no_type_check
def bounded_first(
    levels: Arrays, asked: Arrays, tile: int, some: int, seeds: int, coarsely: Array, best: Array, bits: Array
) -> None:  # fmt: skip
    """Bound the first rows for some queries, and mark those with the best bounds, about as many as `best` has room for.

    A bit stands for a row, blocks come before queries.
    """
    together = some - some % SEVERAL
    for at in range(0, seeds, LANES):
        block = at // LANES
        for query in range(0, together, SEVERAL):
            several_bounds_into(levels, asked, block, tile + query, coarsely, query * seeds + at, seeds)
        for query in range(together, some):
            bounds_into(levels, asked, block, tile + query, coarsely, query * seeds + at, seeds)
    for query in range(some):
        best[0, :] = -np.inf
        for at in range(query * seeds, (query + 1) * seeds, LANES):
            left = not_below(coarsely, at, best[0, 0])
            while left:
                bound = coarsely[at + lowest_bit(left)]
                left &= left - np.uint32(1)
                if bound > best[0, 0]:
                    put(best, 0, bound)
        for block in range(seeds // LANES):
            bits[block * some + query] = not_below(coarsely, query * seeds + block * LANES, best[0, 0])


@numba.njit(cache=True, nogil=True)
@no_type_check
def others(
    coarsely: Array, sizes: Array, thresholds: Array, tile: int, some: int, seeds: int, slack: float, bits: Array
) -> None:  # fmt: skip
    """Mark the first rows whose bounds reach the threshold of a query, without those that are marked already."""
    for block in range(seeds // LANES):
        extra = np.float32(slack * sizes[block * LANES])
        for query in range(some):
            at = block * some + query
            reach = not_below(coarsely, query * seeds + block * LANES, thresholds[tile + query] - extra)
            bits[at] = reach & ~bits[at]


@numba.njit(cache=True, nogil=True)
@no_type_check
def marked(
    coarsely: Array, sizes: Array, tile: int, some: int, seeds: int, slack: float, bits: Array, places: Array,
    askers: Array, bounds: Array,
) -> int:  # fmt: skip
    """The pairs that are marked, with their bounds; how many.

    Those of a block come together, so that its keys are still near when the next query meets them.
    """
    pairs = 0
    for block in range(seeds // LANES):
        for query in range(some):
            left = bits[block * some + query]
            while left:
                place = block * LANES + lowest_bit(left)
                left &= left - np.uint32(1)
                places[pairs], askers[pairs] = place, tile + query
                bounds[pairs] = coarsely[query * seeds + place] + np.float32(slack) * sizes[place]
                pairs += 1
    return pairs


@numba.njit(cache=True, nogil=True)
@no_type_check
def multiplied(
    numbers: Array, rows: Array, keys: Array, slots: Array, queries: Array, scaling: Array, which: Array,
    places: Array, askers: Array, pairs: int, where: Array, scores: Array,
) -> int:  # fmt: skip
    """Find where the keys of pairs are, −1 where they are not at hand, and multiply those that are; how many."""
    # One loop after the other: in one of both, every product would wait for its key.
    for pair in range(pairs):
        place = places[pair]
        slot = slots[numbers[rows[place] if len(rows) else place]]
        where[pair] = slot if slot < len(keys) else -1
    scored = wide = 0
    for pair in range(pairs):
        if where[pair] >= 0:
            asking = which[askers[pair]]
            factor = scaling[asking, 0]
            scored += 1
            if is_narrow(factor):
                scores[pair] = np.float64(narrow_product(keys, where[pair], queries, asking, queries.shape[1])) * factor
            else:
                wide += 1
    if wide:
        multiplied_widely(keys, queries, scaling, which, askers, pairs, where, scores)
    return scored


@numba.njit(cache=True, nogil=True)
@no_type_check
def multiplied_widely(
    keys: Array, queries: Array, scaling: Array, which: Array, askers: Array, pairs: int, where: Array, scores: Array
) -> None:
    """Multiply the keys that are at hand with queries for which that has to be done in fp64.

    By itself, since calling a function with arrays takes half as long as a product in fp32.
    """
    for pair in range(pairs):
        asking = which[askers[pair]]
        if where[pair] >= 0 and not is_narrow(scaling[asking, 0]):
            scores[pair] = wide_product(keys, where[pair], queries, asking) * scaling[asking, 0]


@numba.njit(cache=True, nogil=True)
@no_type_check
def decided(
    sizes: Array, weights: Array, offsets: Array, added: Array, scaling: Array, thresholds: Array, which: Array,
    reached: Array, wide: float, places: Array, askers: Array, bounds: Array, pairs: int, where: Array, scores: Array,
    at_row: Array, at_query: Array, at_bound: Array, found: int,
) -> int:  # fmt: skip
    """Add the pairs that still reach the threshold to what was found, by their products; how many are found then.

    Thresholds rise to what k rows surely reach.
    """
    for pair in range(pairs):
        place, query, bound = places[pair], askers[pair], bounds[pair]
        asking = which[query]
        if where[pair] >= 0:
            score = scores[pair]
            if len(weights):
                score *= weights[place]
            if len(offsets):
                score += offsets[place] * added[asking]
            margin = wide * sizes[place] + scaling[asking, 1]
            low = np.float32(min(score - margin, scaling[asking, 2]))
            if low > reached[query, 0]:
                put(reached, query, low)
                thresholds[query] = max(thresholds[query], reached[query, 0])
            bound = np.float32(score + margin)
        at_row[found], at_query[found], at_bound[found] = place, asking, bound
        found += bound >= thresholds[query]
    return found
