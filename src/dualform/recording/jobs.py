"""Jobs for the recorder's compiled loops: a table of whole numbers that says what is to be copied and multiplied.

A job is a row of the table: its kind, rows, width, outputs and parts; the addresses of the matrix or the keys, of the
gradients, of the probe's columns, and where keys and gradients are copied to; where its result, its room to work in,
the table of BlockSums for what is copied, and its sums are; where the hashes of its keys go, and how many of its parts
are done.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from dualform.fast import Threads, threads_of_torch

# Before the first job: how many jobs there are, and how many numbers change from time to time; whether a sketch was not
# finite; how many shares every job has; the version of the loops; where torch's threads are (see Threads); and the next
# part to take of every share, each on a line of the caches of its own. Behind the last job: which numbers change.
JOBS, CHANGING, SPOILED, SHARES, VERSION, THREADS = range(6)
SHARED, SHARE_LINE = 8, 16
HEAD, FIELDS = SHARE_LINE * (1 + SHARED), 16
MATRIX, GRADIENTS, KEYS_TO, GRADIENTS_TO, RESULT, ROOM, CHECKED, SUMS, HASHES_TO = 5, 6, 8, 9, 10, 11, 12, 13, 14
TAKE, PROJECT, PROJECT_WIDE, COPY, COMPARE = range(5)
ROWS = 8192  # beyond so many, fp32 sums one after the other lose too much
TAKEN, MULTIPLIED = 1 << 15, 1 << 16  # numbers of one part
PARTS = 16


def taking(rows: int, width: int, outputs: int, columns: Tensor) -> list[int]:
    """Copy keys and gradients where they are wanted, and sketch them: five rows (see Use.sketch).

    The sums are Σ ‖g_t‖² ‖x_t‖² and Σ ‖g_t‖².
    """
    parts = _parts(rows * (width + outputs), TAKEN, rows)
    return [TAKE, rows, width, outputs, parts, 0, 0, columns.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0]


def _parts(numbers: int, each: int, rows: int) -> int:
    """In how many parts some rows are worked on: mostly a multiple of four, so that two or four threads do as much."""
    return min(4 * (numbers // (4 * each) + 1), PARTS, rows) if numbers > each else 1


def room_of(job: list[int]) -> int:
    """How many fp64 numbers the loops need to work on such a job, in ROOM."""
    _, rows, _, outputs, parts, *_ = job
    return (5 * outputs * parts + 4 * rows + 1) // 2 + 2 * parts


def projecting(matrix: Tensor, columns: Tensor) -> list[int]:
    """A matrix times the probe's columns, in the dtype of the columns."""
    rows, width = matrix.shape
    parts = _parts(matrix.numel(), MULTIPLIED, rows)
    kind = PROJECT if columns.dtype == torch.float32 else PROJECT_WIDE
    return [kind, rows, width, 0, parts, matrix.data_ptr(), 0, columns.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0]


def copying(vector: Tensor) -> list[int]:
    """A bias is its own sketch."""
    return [COPY, vector.numel(), 1, 0, 1, vector.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def comparing(
    steps: int, outputs: int, of_bias: bool, sketches: tuple[int, int], events: tuple[int, int], sums: tuple[int, int]
) -> list[int]:
    """‖G‖², G·S and ‖S‖² of the sketches of gradients and of the events behind each, for some steps.

    Of each the address is given, and how many bytes further it is at the next step.
    """
    columns, first = (1, 4) if of_bias else (4, 0)
    places = events[0], events[1], sketches[1], first, 0, sketches[0], 0, 0, sums[0], sums[1], 0
    return [COMPARE, outputs, columns, 0, steps, *places]


class Table:
    """Jobs to be done, perhaps again and again: a job begins at HEAD and every FIELDS numbers later.

    `changing` are the numbers that are others every time.
    """

    def __init__(self, jobs: list[int], changing: Sequence[int], loops: ModuleType) -> None:
        self._threads = threads_of_torch()
        head = [0] * HEAD
        head[JOBS], head[CHANGING] = len(jobs) // FIELDS, len(changing)
        head[THREADS : THREADS + len(Threads._fields)] = self._threads or Threads(0, 0)
        self._numbers = array("q", [*head, *jobs, *changing])
        self._run, (self._address, _) = loops.run, self._numbers.buffer_info()
        self._count = len(changing)

    def run(self, values: Sequence[int] = ()) -> bool:
        """Do all jobs, by torch's own threads, with these numbers; whether every sketch came out finite.

        All at once, without the interpreter's doing anything else: another thread may come to the same table.
        """
        if len(values) != self._count:
            raise ValueError(f"{self._count} numbers change, and {len(values)} are given")
        changed = array("q", values)
        address, _ = changed.buffer_info()
        finite: bool = self._run(self._address, address, torch.get_num_threads() if self._threads else 1)
        return finite


def readable(matrices: Iterable[Tensor]) -> bool:
    """Whether the loops can read matrices or vectors: fp32 numbers on the CPU, one row after the other."""
    for matrix in matrices:
        plain = matrix.dtype is torch.float32 and matrix.layout is torch.strided and matrix.is_cpu
        if not plain or not matrix.is_contiguous() or matrix.is_neg():
            return False
    return True
