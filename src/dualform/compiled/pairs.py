"""Loops over pairs of rows and queries."""

from typing import Any, no_type_check

import numba
import numpy as np
from numba import types

Array = np.ndarray[Any, Any]


# ssize_t pread(int descriptor, void *to, size_t bytes, off_t from)
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.intp, types.uintp, types.int64))


@numba.njit(cache=True, nogil=True)
@no_type_check
def read_rows(descriptor: int, places: Array, rows: Array, part: int, parts: int) -> bool:
    """Fill every row of one part with the bytes of a file from its place on; False where not all could be read."""
    width = rows.shape[1]
    for row in range(len(places) * part // parts, len(places) * (part + 1) // parts):
        if _pread(descriptor, rows[row].ctypes.data, width, places[row]) != width:
            break
    else:
        return True
    return False


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def wide_product(rows: Array, row: int, queries: Array, query: int) -> float:
    """The product of a row and a query, summed in fp64 in whatever order is fastest."""
    total = 0.0
    for at in range(rows.shape[1]):
        total += np.float64(rows[row, at]) * np.float64(queries[query, at])
    return total


@numba.njit(cache=True, nogil=True)
@no_type_check
def products(rows: Array, queries: Array, at_row: Array, at_query: Array, result: Array, part: int, parts: int) -> None:
    """The product of every pair of one part, summed in fp64."""
    pairs = len(at_row)
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        result[pair] = wide_product(rows, at_row[pair], queries, at_query[pair])


@numba.njit(cache=True, nogil=True)
@no_type_check
def rounded(
    rows: Array, queries: Array, at_row: Array, at_query: Array, row_norms: Array, query_norms: Array, error: float,
    tiny: float, result: Array, unsure: Array, part: int, parts: int,
) -> int:  # fmt: skip
    """The same rounded to fp32, and which of them an error of that size could round otherwise; how many."""
    count, pairs = 0, len(at_row)
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        row, query = at_row[pair], at_query[pair]
        value = wide_product(rows, row, queries, query) + 0.0  # a sum of zeros is +0
        wide = error * query_norms[query] * row_norms[row] + tiny
        result[pair] = value
        other = np.float32(value - wide) != np.float32(value + wide) or not np.isfinite(value)
        unsure[pair] = other
        count += other
    return count
