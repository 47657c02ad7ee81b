"""What every run is checked for: the accuracy on every task, and the certificate of every weight."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from dualform.experiments.paper.run import Run


@dataclass(frozen=True)
class Certified:
    """A row of the certificate."""

    weight: str
    residual: float | None
    rounding: float | None
    exact: bool
    reason: str


@dataclass(frozen=True)
class Checks:
    """Accuracies in per cent, by task, and the certificate."""

    accuracy: dict[str, float]
    certificate: tuple[Certified, ...]
    steps: int
    events: int
    bytes: int

    @property
    def exact(self) -> bool:
        """Whether every weight is rebuilt up to rounding."""
        return all(row.exact for row in self.certificate)


def checks(run: Run) -> Checks:
    """Measure accuracies and certificate."""
    accuracy = {}
    for number, task in enumerate(run.recipe.tasks):
        accuracy[task.name] = percent(run.right[run.data.test.tasks == number])
    rows = tuple(
        Certified(row.weight, row.residual, row.rounding, row.exact, row.reason or "")
        for row in run.memory.certificate()
    )
    return Checks(accuracy, rows, run.memory.steps, run.memory.manifest.events(0), run.memory.bytes)


def percent(found: Bool[Tensor, " images"]) -> float:
    """The share of what is true, in per cent; NaN of nothing."""
    return 100.0 * float(found.double().mean())
