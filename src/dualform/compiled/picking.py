"""The best of what was found, in order."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]
LARGEST, SMALLEST = 0, 1  # orders; any other is by magnitude


@numba.njit(cache=True, nogil=True)
@no_type_check
def pick(
    at_query: Array, events: Array, scores: Array, order: int, columns: tuple[Array, ...], result: Array, numbers: Array
) -> int:
    """Fill in the best of every query: by score, then event, each event once; how many scores are NaN.

    `columns` have the numbers of every event.
    """
    queries, k = result.shape
    ranked = np.empty((queries, k), np.float32)
    pairs = np.empty((queries, k), np.int64)
    counts = np.zeros(queries, np.int64)
    nan = 0
    for pair in range(len(at_query)):
        score, query, event = scores[pair], at_query[pair], events[pair]
        if np.isnan(score):
            nan += 1
            continue
        score = score if order == LARGEST else -score if order == SMALLEST else abs(score)
        count = counts[query]
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            other = ranked[query, middle]
            if other > score or (other == score and events[pairs[query, middle]] < event):
                low = middle + 1
            else:
                high = middle
        if low == k or (low < count and ranked[query, low] == score and events[pairs[query, low]] == event):
            continue
        for at in range(min(count, k - 1), low, -1):
            ranked[query, at], pairs[query, at] = ranked[query, at - 1], pairs[query, at - 1]
        ranked[query, low], pairs[query, low] = score, pair
        counts[query] = min(count + 1, k)
    for query in range(queries):
        for at in range(counts[query]):
            pair = pairs[query, at]
            result[query, at] = scores[pair]
            for column in range(len(columns)):
                numbers[query, at, column] = columns[column][events[pair]]
    return nan
