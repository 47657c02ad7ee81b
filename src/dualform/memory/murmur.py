"""128-bit hashes of rows by a compiled loop, which needs no interpreter: the training has it (MurmurHash3, x64)."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]
FIRST, SECOND = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
FIVE = np.uint64(5)


@numba.njit(nogil=True, inline="always")
@no_type_check
def _turned(value: int, by: int) -> int:
    return (value << np.uint64(by)) | (value >> np.uint64(64 - by))


@numba.njit(nogil=True)
@no_type_check
def _mixed(value: int) -> int:
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@numba.njit("void(u8[:, ::1], u8[:, ::1])", cache=True, nogil=True)
@no_type_check
def hash_rows(rows: Array, result: Array) -> None:
    """The hash of every row; their width is an even number of 8-byte words."""
    for row in range(len(rows)):
        a = b = np.uint64(0)
        for at in range(0, rows.shape[1], 2):
            k, m = rows[row, at], rows[row, at + 1]
            a ^= _turned(k * FIRST, 31) * SECOND
            a = (_turned(a, 27) + b) * FIVE + np.uint64(0x52DCE729)
            b ^= _turned(m * SECOND, 33) * FIRST
            b = (_turned(b, 31) + a) * FIVE + np.uint64(0x38495AB5)
        a ^= np.uint64(8 * rows.shape[1])
        b ^= np.uint64(8 * rows.shape[1])
        a += b
        b += a
        a, b = _mixed(a), _mixed(b)
        a += b
        result[row, 0], result[row, 1] = a, b + a
