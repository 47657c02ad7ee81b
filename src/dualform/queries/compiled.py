"""The loops over pairs that numba compiles: each number is read once."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]
LANES = 16
PARTS = 16  # that threads take turns at


@numba.njit(parallel=True, cache=True, nogil=True)
@no_type_check
def above(bounds: Array, thresholds: Array) -> tuple[Array, Array]:
    """The rows and columns where a bound is not below its column's threshold."""
    rows, columns = bounds.shape
    parts = min(PARTS, rows)
    # Room for every pair, of which only what is written to is ever backed by memory.
    at_row = np.empty(rows * columns, np.int32)
    at_column = np.empty(rows * columns, np.int32)
    counts = np.zeros(parts + 1, np.int64)
    for part in numba.prange(parts):
        begin, end = rows * part // parts, rows * (part + 1) // parts
        at = begin * columns
        for row in range(begin, end):
            for first in range(0, columns, LANES):
                last = min(first + LANES, columns)
                some = 0
                for column in range(first, last):
                    some += bounds[row, column] >= thresholds[column]
                if some:
                    for column in range(first, last):
                        if bounds[row, column] >= thresholds[column]:
                            at_row[at] = row
                            at_column[at] = column
                            at += 1
        counts[part + 1] = at - begin * columns
    total = 0
    for part in range(parts):
        total += counts[part + 1]
    found_rows = np.empty(total, np.int64)
    found_columns = np.empty(total, np.int64)
    to = 0
    for part in range(parts):
        begin = rows * part // parts * columns
        for at in range(begin, begin + counts[part + 1]):
            found_rows[to] = at_row[at]
            found_columns[to] = at_column[at]
            to += 1
    return found_rows, found_columns


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
