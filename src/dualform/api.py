"""The public memory: everything a user asks of a recorded run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dualform.dual import Certificate, Compact, certify, compact, dual_model, rebuilt_weights
from dualform.errors import BadCall
from dualform.memory import StoredMemory
from dualform.memory.stored import RESIDENT
from dualform.queries import Spotlight, attend, check_model, given_queries
from dualform.queries.attend import is_memorys
from dualform.queries.folds import Folds
from dualform.queries.kernels import Kernel
from dualform.queries.together import Together

Where = Mapping[str, Any] | None


class Memory(StoredMemory):
    """An opened memory: all events of a training run, and the questions to ask it.

    `resident` is how many bytes of the machine's memory its questions may take.
    """

    def __init__(self, path: str | os.PathLike[str], resident: int = RESIDENT) -> None:
        super().__init__(os.path.abspath(path), resident)
        self.folds = Folds(self)
        self._certificate: Certificate | None = None

    def certificate(self) -> Certificate:
        """The measured distance between every weight and its dual form; reads the whole memory once."""
        self.require_events()
        if self._certificate is None:
            self._certificate = certify(self, self.folds)
        return self._certificate

    def weights(self, until: int | None = None, where: Where = None) -> dict[str, Tensor]:
        """The weights and biases as they were after step `until`, rebuilt from the events.

        With `where` only some events are put in: exact as a sum, an ablation and not a retraining.
        """
        return rebuilt_weights(self, self.folds, self.end(until), where, "weights()")

    def dual(
        self,
        model: nn.Module,
        where: Where = None,
        until: int | None = None,
        fold: bool = True,
        kernel: Kernel | None = None,
    ) -> nn.Module:
        """A copy of the model in dual form, for inference.

        Folded by default: the events are summed into weights once. `fold=False` really attends over the memory
        in every forward pass; `kernel` is then "softmax" or a function of blocks of scores (Remark 3.2).
        """
        return dual_model(self, self.folds, model, where, self.end(until), fold and kernel is None, kernel)

    def attend(
        self,
        model: nn.Module | None,
        inputs: Any,
        *,
        until: int | None = None,
        batch_size: int | None = 256,
        check: bool = True,
    ) -> Spotlight:
        """One forward pass of the model: the attention of its layers over the memory.

        `inputs` is a tensor, a tuple of arguments or a dict of keyword arguments; with model None, a dict from
        layer names to queries. `until` asks the model of that step. The model itself is never changed.
        """
        self.require_events()
        end = self.end(until)
        if model is None:
            return given_queries(self, inputs, end)
        if not isinstance(model, nn.Module):
            raise BadCall(f"attend takes a torch.nn.Module and its inputs, not {type(model).__name__}.")
        if until is not None and not (end == self.steps and is_memorys(self, model)):
            model = self.dual(model, until=end)
        elif check:
            check_model(self, model)
        return attend(self, model, inputs, end, batch_size)

    def together(self) -> Together:
        """Ask several questions at once: each is answered when the block is left, all of a weight in one pass.

        with memory.together():
            best, totals = attention.top(10), attention.totals(by="label")
        """
        return Together(self)

    def compact(self, layer: str, rank: int | None = None) -> Compact:
        """A smaller equivalent attention system for a layer, with its error (Remark 3.4)."""
        self.require_events()
        return compact(self, self.folds, layer, rank)

    def __repr__(self) -> str:
        manifest = self.manifest
        optimizers = ", ".join(one.name for one in manifest.optimizers)
        state = "closed" if manifest.final else f"stopped: {manifest.failure}" if manifest.failure else "not closed"
        lines = [
            f"Memory({str(self.path)!r}): {self.steps:,} steps of {optimizers}, {self.bytes / 1e6:,.1f} MB, "
            f"keep={manifest.keep!r}, {state}"
        ]
        width = max(len(record.name) for record in manifest.weights)
        for at, record in enumerate(manifest.weights):
            shape = f"{record.dim_out} × {record.dim_in}"
            lines.append(f"  {record.name.ljust(width)}  {shape:>12}  {manifest.events(at):>12,} events")
        lines.append(f"  columns: {', '.join(self.columns) or 'none'}")
        lines.append(f"  certificate: {self._at_a_glance()}")
        if manifest.nonfinite:
            lines.append(f"  {manifest.nonfinite:,} events hold NaN or infinity")
        lines += [f"  {note}" for note in manifest.told]
        return "\n".join(lines)

    def _at_a_glance(self) -> str:
        if self._certificate is not None:
            if self._certificate.exact:
                return "exact, residual at most " + f"{max(row.residual or 0.0 for row in self._certificate):.1e}"
            return "; ".join(str(row) for row in self._certificate if not row.exact)
        if self.manifest.findings:
            first = self.manifest.findings[0]
            return f"not exact: {first.parameter}: {first.reason}"
        if not self.steps:
            return "no step was committed yet"
        return "every step's probe passed; memory.certificate() measures the residual"


def open_memory(path: str | os.PathLike[str], *, resident: int = RESIDENT) -> Memory:
    """Open a memory for questions; it sees the last commit, also while recording goes on.

    memory = dualform.open("runs/mnist")

    However large the memory is, its questions take about `resident` bytes of the machine's memory, 1 GB by default.
    """
    return Memory(path, resident)
