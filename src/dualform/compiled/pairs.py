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
def products(rows: Array, queries: Array, at_row: Array, at_query: Array, result: Array, part: int, parts: int) -> None:
    """The product of every pair of one part, summed in fp64."""
    width = rows.shape[1]
    pairs = len(at_row)
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        row = rows[at_row[pair]]
        query = queries[at_query[pair]]
        total = 0.0
        for at in range(width):
            total += np.float64(row[at]) * np.float64(query[at])
        result[pair] = total


@numba.njit(cache=True, nogil=True)
@no_type_check
def rounded(
    near: Array, row_norms: Array, query_norms: Array, at_row: Array, at_query: Array, error: float, tiny: float,
    result: Array, unsure: Array,
) -> int:  # fmt: skip
    """Products rounded to fp32, and which of them an error of that size could round otherwise; how many."""
    count = 0
    for pair in range(len(near)):
        value = near[pair] + 0.0
        wide = error * query_norms[at_query[pair]] * row_norms[at_row[pair]] + tiny
        result[pair] = value
        other = np.float32(value - wide) != np.float32(value + wide) or not np.isfinite(value)
        unsure[pair] = other
        count += other
    return count
