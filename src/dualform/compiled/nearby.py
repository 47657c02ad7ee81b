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
def seeded(
    levels: Arrays, numbers: Array, sizes: Array, asked: Arrays, keys: Array, slots: Array, queries: Array,
    scaling: Array, thresholds: Array, which: Array, k: int, seeds: int, slack: float,
) -> int:  # fmt: skip
    """Raise the thresholds to what k of the first rows surely reach, those with the best bounds; how many products."""
    best = np.empty(k + max(k // 4, 2), np.float32)
    lowest = np.empty(k, np.float32)
    bounds, places = np.empty(seeds, np.float32), np.empty(seeds, np.int64)
    wide = slack + error_of(keys.shape[1])
    scored = 0
    for query in range(len(which)):
        for at in range(0, seeds, LANES):
            bounds_into(levels, asked, at // LANES, query, bounds, at)
        best[:] = -np.inf
        some = 0
        for at in range(0, seeds, LANES):
            left = not_below(bounds, at, best[0])
            while left:
                place = at + lowest_bit(left)
                left &= left - np.uint32(1)
                if bounds[place] > best[0]:
                    put(best, bounds[place])
                    places[some] = place
                    some += 1
        lowest[:] = -np.inf
        asking = which[query]
        for at in range(some):
            place = places[at]
            slot = slots[numbers[place]]
            if bounds[place] >= best[0] and 0 <= slot < len(keys):
                scored += 1
                score = product(keys, slot, queries, asking, scaling[asking, 0])
                low = np.float32(min(score - wide * sizes[place] - scaling[asking, 1], scaling[asking, 2]))
                if low > lowest[0]:
                    put(lowest, low)
        thresholds[query] = max(thresholds[query], lowest[0])
    return scored
