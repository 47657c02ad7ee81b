"""The recorder's copies and small products by compiled loops, once a run is long enough for them to pay."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.fast import load
from dualform.recording.jobs import RESULT, Table, projecting, readable

PAYS = 1 << 26  # numbers that a run has sketched by torch, after which loading the loops pays


class Swift:
    """The loops, from the step on at which they pay.

    That depends on the number of the step alone: two recordings of one training sketch its gradients the same way at
    every step, and hash them to the same journal.
    """

    def __init__(self) -> None:
        self.numbers = 0
        self.loops: ModuleType | None = None
        self._tried = False

    def reached(self, step: int) -> None:
        """So many steps were made."""
        if not self._tried and step * self.numbers > PAYS:
            self._tried = True
            self.loops = load("dualform.recording.loops")

    def table(self, jobs: list[int], changing: Sequence[int] = ()) -> Table:
        """These jobs for the loops, and which of their numbers change."""
        assert self.loops is not None
        return Table(jobs, changing, self.loops)

    def project(self, rows: Tensor, columns: Float[Tensor, "four dim_in"]) -> Float[Tensor, "rows four"] | None:
        """rows @ columnsᵀ in the dtype of the columns; None where torch has to do it."""
        if self.loops is None or not readable([rows]) or not len(rows):
            return None
        result = torch.empty(len(rows), len(columns), dtype=columns.dtype)
        job = projecting(rows, columns)
        job[RESULT] = result.data_ptr()
        self.table(job).run()
        return result
