"""The pairs of a flat scan that may be among the best."""

from typing import Any, no_type_check

import numba
import numpy as np

from dualform.compiled.lanes import GROUP, group_reaching, lowest_bit
from dualform.compiled.nearby import put

Array = np.ndarray[Any, Any]
LARGEST = 3.0e38


@numba.njit(cache=True, nogil=True)
@no_type_check
def cut_of(threshold: float, most: float, unit: float) -> float:
    """What a product before its unit has to reach where it may be further off than it is by at most `most`."""
    cut = (threshold - most) / unit
    cut -= 1e-6 * abs(cut)
    return np.float32(min(max(cut, -LARGEST), LARGEST))


@numba.njit(cache=True, nogil=True)
@no_type_check
def few_reaching(values: Array, row: int, scale: float, cuts: Array, at: int, absolute: bool) -> int:
    """The same as group_reaching for a row of fewer columns."""
    bits = np.uint32(0)
    for column in range(values.shape[1]):
        scaled = np.float32(values[row, column]) * scale
        if (abs(scaled) if absolute else scaled) >= cuts[at + column]:
            bits |= np.uint32(1) << np.uint32(column)
    return bits


@numba.njit(cache=True, nogil=True)
@no_type_check
def sift(
    values: Array, scales: Array, units: Array, errors: Array, norms: Array, sizes: Array, lost: Array, tiny: Array,
    groups: Array, absolute: bool, heaps: Array, begin: int, at_row: Array, at_heap: Array, bounds: Array,
) -> tuple[int, int]:  # fmt: skip
    """Fill in the rows and heaps of scores that may reach what k rows surely have, and the most that each can be.

    A score is the value times the scale of its row and the unit of its column, but for errors · sizes + (norms +
    errors) · lost + tiny. Every column has a heap for every group of rows, one after the other: the k largest of what
    scores surely are. A row of no group, −1, does not count. Returns the row up to which there was room, and how many
    pairs were found.
    """
    rows, columns = values.shape
    many = len(heaps) // columns
    largest, longest = 0.0, 0.0
    for row in range(rows):
        if groups[row] >= 0:
            largest, longest = max(largest, errors[row]), max(longest, np.float64(norms[row]) + errors[row])
    most = largest * sizes + longest * lost + tiny
    cuts = np.empty(many * columns, np.float32)  # group by group, so that those of a row lie side by side
    for group in range(many):
        for column in range(columns):
            cuts[group * columns + column] = cut_of(heaps[column * many + group, 0], most[column], units[column])
    count = 0
    for row in range(begin, rows):
        if count + columns > len(at_row):
            return row, count
        if groups[row] < 0:
            continue
        scale, at, seen = scales[row], groups[row] * columns, 0
        while seen < columns:
            # The last columns overlap those before, of which nothing counts twice.
            first = min(seen, max(columns - GROUP, 0))
            if columns >= GROUP:
                bits = group_reaching(values, row, first, scale, cuts, at + first, absolute) >> np.uint32(seen - first)
            else:
                bits = few_reaching(values, row, scale, cuts, at, absolute)
            while bits:
                column = seen + lowest_bit(bits)
                bits &= bits - np.uint32(1)
                heap = column * many + groups[row]
                scaled = np.float32(values[row, column]) * scale
                score = np.float64(abs(scaled) if absolute else scaled) * units[column]
                length = np.float64(norms[row]) + errors[row]
                off = errors[row] * sizes[column] + length * lost[column] + tiny[column]
                if score + off >= heaps[heap, 0]:
                    at_row[count], at_heap[count], bounds[count] = row, heap, score + off
                    count += 1
                    if score - off > heaps[heap, 0]:
                        put(heaps, heap, score - off)
                        cuts[at + column] = cut_of(heaps[heap, 0], most[column], units[column])
            seen = first + GROUP
    return rows, count
