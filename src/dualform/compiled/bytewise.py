"""Loops over keys in bytes."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]


@numba.njit(cache=True, nogil=True)
@no_type_check
def widen(rows: Array, scales: Array, result: Array) -> None:
    """The rows times their scales, in fp32."""
    for row in range(len(rows)):
        scale = scales[row]
        for column in range(rows.shape[1]):
            result[row, column] = np.float32(rows[row, column]) * scale


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def byte_products(rows: Array, scales: Array, query: Array, result: Array, part: int, parts: int) -> None:
    """The product of every row of one part with a query, in fp32."""
    for row in range(len(rows) * part // parts, len(rows) * (part + 1) // parts):
        total = np.float32(0.0)
        for column in range(rows.shape[1]):
            total += np.float32(rows[row, column]) * query[column]
        result[row] = total * scales[row]
