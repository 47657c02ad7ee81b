"""Jobs for the recorder's compiled loops: a table of whole numbers that says what is to be copied and multiplied."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from dualform.fast import by_torch

# Every job is a row of the table: its kind, rows, width, outputs and parts; the addresses of the matrix or the keys, of
# the gradients, of the probe's columns, and where keys and gradients are copied to; where its result, its room to work
# in, what the events say and its sums are; a number to spare, and how many of its parts are done.
HEAD, FIELDS = 2, 16  # the numbers before the first job: the next part to take, and how many jobs there are
RESULT, SCRATCH, SUMS = 10, 11, 13
TAKE, PROJECT, COPY, PROJECT_WIDE = range(4)
ROWS = 8192  # beyond so many, fp32 sums one after the other lose too much
TAKEN, MULTIPLIED = 1 << 15, 1 << 16  # numbers of one part
PARTS = 16


class Slot(NamedTuple):
    """Where the result of a job begins, in numbers, and where its sums do."""

    result: int
    sums: int


class Jobs:
    """What is asked of the loops at one moment of a training: one call does all of it."""

    def __init__(self, loops: ModuleType, scratch: Scratch) -> None:
        self._loops, self._scratch = loops, scratch
        self._table: list[int] = []
        self._result = self._room = self._sums = 0

    def take(self, keys: Tensor, gradients: Tensor, columns: Tensor, keys_to: int, gradients_to: int) -> Slot:
        """Copy keys and gradients to these addresses, if not 0, and sketch them: five rows (see Use.sketch).

        The sums are Σ ‖g_t‖² ‖x_t‖², Σ ‖g_t‖², and 1 where the sketch is finite.
        """
        rows, width = keys.shape
        outputs = gradients.shape[1]
        parts = min(rows * (width + outputs) // TAKEN + 1, PARTS, rows)
        places = keys.data_ptr(), gradients.data_ptr(), columns.data_ptr(), keys_to, gradients_to
        slot = self._add(TAKE, rows, width, outputs, parts, places, 5 * outputs, 0, 3 + 2 * parts)
        self._room += parts * 5 * outputs + 4 * rows
        return slot

    def project(self, matrix: Tensor, columns: Tensor, events: int) -> Slot:
        """A matrix times the probe's columns; with `events`, the address of the events' sketch, compared with it.

        The sums are ‖G‖², G·S and ‖S‖² of the two sketches.
        """
        rows, width = matrix.shape
        parts = min(matrix.numel() // MULTIPLIED + 1, PARTS, rows)
        kind = PROJECT if columns.dtype == torch.float32 else PROJECT_WIDE
        places = matrix.data_ptr(), 0, columns.data_ptr(), 0, 0
        numbers = 4 * rows if kind == PROJECT else 8 * rows
        return self._add(kind, rows, width, 0, parts, places, numbers, events, 3 + 3 * parts)

    def copy(self, vector: Tensor, events: int) -> Slot:
        """The same for a bias, which is its own sketch."""
        return self._add(COPY, len(vector), 1, 0, 1, (vector.data_ptr(), 0, 0, 0, 0), len(vector), events, 3)

    def _add(
        self, kind: int, rows: int, width: int, outputs: int, parts: int, places: tuple[int, ...], numbers: int,
        events: int, sums: int,
    ) -> Slot:  # fmt: skip
        slot = Slot(self._result, self._sums)
        # Addresses of what is not made yet are told from its beginning, in bytes.
        here = 4 * self._result, 4 * self._room, events, 8 * self._sums
        self._table += (kind, rows, width, outputs, parts, *places, *here, 0, 0)
        self._result += numbers
        self._sums += sums
        return slot

    def run(self) -> tuple[Float32[np.ndarray, " results"], Float64[np.ndarray, " sums"]]:
        """Do all of it, by torch's own threads; the results and sums of all jobs."""
        result, sums = torch.empty(self._result, dtype=torch.float32), torch.empty(self._sums, dtype=torch.float64)
        if self._table:
            count = len(self._table) // FIELDS
            table = np.array((0, count, *self._table), dtype=np.int64)
            jobs = table[HEAD:].reshape(count, FIELDS)
            jobs[:, RESULT] += result.data_ptr()
            jobs[:, SCRATCH] += self._scratch.of(self._room)
            jobs[:, SUMS] += sums.data_ptr()
            if not by_torch(self._loops.team.address, table):
                self._loops.work(table)
        return result.numpy(), sums.numpy()


class Scratch:
    """Memory that the loops need while they work, kept from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def of(self, numbers: int) -> int:
        """The address of room for so many fp32 numbers."""
        if len(self._memory) < numbers:
            self._memory = torch.empty(numbers, dtype=torch.float32)
        return self._memory.data_ptr()


def fits(matrix: Tensor) -> bool:
    """Whether the loops can read a matrix or vector: fp32 numbers on the CPU, one row after the other."""
    return matrix.dtype == torch.float32 and matrix.is_cpu and matrix.is_contiguous()
