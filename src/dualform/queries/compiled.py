"""The loops over pairs that numba compiles: each score is read once."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]


@numba.njit(parallel=True, cache=True, nogil=True)
@no_type_check
def above(bounds: Array, thresholds: Array) -> tuple[Array, Array]:
    """The rows and columns where a bound is not below its column's threshold."""
    rows, columns = bounds.shape
    starts = np.zeros(rows + 1, np.int64)
    for row in numba.prange(rows):
        count = 0
        for column in range(columns):
            count += bounds[row, column] >= thresholds[column]
        starts[row + 1] = count
    for row in range(rows):
        starts[row + 1] += starts[row]
    at_row = np.empty(starts[rows], np.int64)
    at_column = np.empty(starts[rows], np.int64)
    for row in numba.prange(rows):
        at = starts[row]
        if starts[row + 1] > at:
            for column in range(columns):
                if bounds[row, column] >= thresholds[column]:
                    at_row[at] = row
                    at_column[at] = column
                    at += 1
    return at_row, at_column


@numba.njit(parallel=True, cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def products(rows: Array, queries: Array, at_row: Array, at_query: Array) -> Array:
    """The product of every pair, summed in fp64."""
    result = np.empty(len(at_row), np.float64)
    width = rows.shape[1]
    for pair in numba.prange(len(at_row)):
        row = rows[at_row[pair]]
        query = queries[at_query[pair]]
        total = 0.0
        for at in range(width):
            total += np.float64(row[at]) * np.float64(query[at])
        result[pair] = total
    return result
