"""Products with the keys that are at hand, and the scores that k rows surely have by them."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.compiled.lanes import WIDE, bounds_into, lowest_bit, narrow_product, not_below
from dualform.fast import LANES

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
MOST = 3.4028e38  # below what fp32 rounds to infinity
# Where the products of norms lie between these, fp32 overflows nowhere, and loses nothing that counts to underflow.
LEAST_NARROW, MOST_NARROW = 1e-20, 1e38


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
def wide_product(rows: Array, row: int, queries: Array, query: int) -> float:
    """In fp64."""
    total = 0.0
    for at in range(rows.shape[1]):
        total += np.float64(rows[row, at]) * np.float64(queries[query, at])
    return total


@numba.njit(cache=True, nogil=True)
@no_type_check
def product(keys: Array, slot: int, queries: Array, query: int, factor: float) -> float:
    """The product of a key with a query, times a factor that is one over the largest that it can be."""
    if 1 / MOST_NARROW < abs(factor) < 1 / LEAST_NARROW:
        return np.float64(narrow_product(keys, slot, queries, query)) * factor
    return wide_product(keys, slot, queries, query) * factor


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
def best_first(
    levels: Arrays, asked: Arrays, sizes: Array, query: int, seeds: int, slack: float, best: Array, coarsely: Array,
    places: Array, bounds: Array,
) -> int:  # fmt: skip
    """Bound the first rows, and take those with the best bounds, as many as `best` has room for; how many.

    `coarsely` are the bounds of the others then, and −∞ for those that were taken.
    """
    for at in range(0, seeds, LANES):
        bounds_into(levels, asked, at // LANES, query, coarsely, at)
    best[:] = -np.inf
    some = 0
    for at in range(0, seeds, LANES):
        left = not_below(coarsely, at, best[0])
        while left:
            place = at + lowest_bit(left)
            left &= left - np.uint32(1)
            if coarsely[place] > best[0]:
                put(best, coarsely[place])
                places[some] = place
                some += 1
    taken = 0
    for at in range(some):
        place = places[at]
        if coarsely[place] >= best[0]:
            places[taken], bounds[taken] = place, coarsely[place] + np.float32(slack) * sizes[place]
            coarsely[place] = -np.inf
            taken += 1
    return taken


@numba.njit(cache=True, nogil=True)
@no_type_check
def others(coarsely: Array, sizes: Array, threshold: float, seeds: int, slack: float, places: Array) -> int:
    """The first rows whose bounds reach a threshold; how many."""
    pairs = 0
    for at in range(0, seeds, LANES):
        left = not_below(coarsely, at, threshold - np.float32(slack * sizes[at]))
        while left:
            places[pairs] = at + lowest_bit(left)
            left &= left - np.uint32(1)
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
    scored = 0
    for pair in range(pairs):
        if where[pair] >= 0:
            asking = which[askers[pair]]
            scores[pair] = product(keys, where[pair], queries, asking, scaling[asking, 0])
            scored += 1
    return scored


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
                put(reached[query], low)
                thresholds[query] = max(thresholds[query], reached[query, 0])
            bound = np.float32(score + margin)
        at_row[found], at_query[found], at_bound[found] = place, asking, bound
        found += bound >= thresholds[query]
    return found
