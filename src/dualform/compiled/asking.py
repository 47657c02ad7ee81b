"""What queries meet the rows of a shadow with."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.fast import CUTS, SPANS

Array = np.ndarray[Any, Any]
WIDTH0, WIDTH1, WIDTH2 = (stop - start for start, stop in SPANS)


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
@no_type_check
def project(queries: Array, basis: Array, heads: Array) -> None:
    """Add the products of queries with the columns of a basis, in fp64."""
    for query in range(len(queries)):
        head = heads[query]
        for row in range(len(basis)):
            value = np.float64(queries[query, row])
            for column in range(len(head)):
                head[column] += value * basis[row, column]


@numba.njit(cache=True, nogil=True)
@no_type_check
def ask(
    head: Array, sizes: Array, scales: Array, extended: bool, slack: float, levels: tuple[Array, ...], fine: Array,
    part: int, parts: int,
) -> None:  # fmt: skip
    """What queries meet the rows with: heads times scales, which have these sizes; the scales may be a column too."""
    level0, level1, level2 = levels
    queries, width = len(head), fine.shape[1] - 2
    first = 1 if extended else 0
    wide = np.zeros(max(width + first, CUTS[-1]))
    for query in range(queries * part // parts, queries * (part + 1) // parts):
        square = 0.0
        for column in range(width):
            value = head[query, column] * scales[query]
            wide[first + column] = value
            fine[query, column] = value
            square += value * value
        if first:
            wide[0] = scales[query]
        size = sizes[query]
        # As _tail and _levels have it.
        tail = (np.sqrt(max(size * size - square, 0.0)) + 1e-7 * size) * (1 + 1e-6) + 1e-30
        fine[query, width] = tail
        fine[query, width + 1] = slack
        square = tail * tail
        for column in range(len(wide) - 1, -1, -1):
            if column == CUTS[2] - 1:
                level2[query, WIDTH2] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            elif column == CUTS[1] - 1:
                level1[query, WIDTH1] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            elif column == CUTS[0] - 1:
                level0[query, WIDTH0] = np.sqrt(square) * (1 + 1e-6) + 1e-30
            value = wide[column]
            square += value * value
            if column < CUTS[0]:
                level0[query, column] = value
            elif column < CUTS[1]:
                level1[query, column - CUTS[0]] = value
            elif column < CUTS[2]:
                level2[query, column - CUTS[1]] = value


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def norms(rows: Array, result: Array, part: int, parts: int) -> None:
    """The norm of every row of one part, in fp64."""
    for row in range(len(rows) * part // parts, len(rows) * (part + 1) // parts):
        square = 0.0
        for column in range(rows.shape[1]):
            square += np.float64(rows[row, column]) * np.float64(rows[row, column])
        result[row] = np.sqrt(square)
