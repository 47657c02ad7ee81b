"""The recorder's copies and small products by compiled loops, once a run is long enough for them to pay."""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.fast import load
from dualform.recording.jobs import Jobs, Scratch, fits

PAYS = 1 << 26  # numbers that a run has sketched by torch, after which loading the loops pays


class Swift:
    """The loops, from the step on at which they pay.

    That depends on the number of the step alone: two recordings of one training sketch its gradients the same way at
    every step, and hash them to the same journal.
    """

    def __init__(self) -> None:
        self.numbers = 0
        self._loops: ModuleType | None = None
        self._scratch = Scratch()
        self._tried = False

    def reached(self, step: int) -> None:
        """So many steps were made."""
        if not self._tried and step * self.numbers > PAYS:
            self._tried = True
            self._loops = load("dualform.recording.loops")

    def jobs(self) -> Jobs | None:
        """An empty table of jobs; None where torch has to do them."""
        return None if self._loops is None else Jobs(self._loops, self._scratch)

    def project(self, rows: Tensor, columns: Float[Tensor, "four dim_in"]) -> Float[Tensor, "rows four"] | None:
        """rows @ columnsᵀ in the dtype of the columns; None where torch has to do it."""
        jobs = self.jobs()
        if jobs is None or not fits(rows) or not len(rows):
            return None
        jobs.project(rows, columns, events=0)
        result, _ = jobs.run()
        return torch.from_numpy(result).view(columns.dtype).reshape(len(rows), len(columns))
