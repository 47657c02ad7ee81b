"""The loops of the recorder that numba compiles: when they are loaded, so that nothing fails in the midst of a step."""

from typing import Any, no_type_check

import numba
import numpy as np

Array = np.ndarray[Any, Any]
KINDS = [f"void(f4[:, ::1], {kind}[:, ::1], {kind}[:, ::1])" for kind in ("f4", "f8")]


@numba.njit(KINDS, cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def project(matrix: Array, columns: Array, result: Array) -> None:
    """A matrix times four columns, in their dtype; a product of matrices takes twice as long for so few."""
    for row in range(len(matrix)):
        a = b = c = d = columns.dtype.type(0)
        for at in range(matrix.shape[1]):
            value = columns.dtype.type(matrix[row, at])
            a += value * columns[0, at]
            b += value * columns[1, at]
            c += value * columns[2, at]
            d += value * columns[3, at]
        result[row, 0], result[row, 1], result[row, 2], result[row, 3] = a, b, c, d
