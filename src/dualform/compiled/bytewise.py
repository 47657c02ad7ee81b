"""Loops over keys in bytes."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def byte_products(rows: Array, query: Array, result: Array) -> None:
    """The product of every row with a query, in fp32."""
    for row in range(len(rows)):
        total = np.float32(0.0)
        for column in range(rows.shape[1]):
            total += np.float32(rows[row, column]) * query[column]
        result[row] = total
