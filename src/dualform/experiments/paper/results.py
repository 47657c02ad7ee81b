"""The results of a job: for every experiment its runs, and means and standard deviations over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from dualform.experiments.paper.checks import Checks
from dualform.experiments.paper.crossing import Crossings
from dualform.experiments.paper.masks import Masks
from dualform.experiments.paper.pushes import Pushes
from dualform.experiments.paper.settings import Experiment
from dualform.experiments.paper.spotlights import Spotlights
from dualform.experiments.paper.votes import Votes


@dataclass(frozen=True)
class RunResults:
    """What one run gave; None where a part is not of this experiment, or only of its first run."""

    seed: int
    seconds: dict[str, float]
    checks: Checks
    votes: Votes | None = None
    crossings: Crossings | None = None
    masks: Masks | None = None
    spotlights: Spotlights | None = None
    pushes: Pushes | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over runs."""

    mean: float
    deviation: float
    runs: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of some numbers; NaN, a share of nothing, is left out.

        >>> str(Spread.of([1.0, 3.0]))
        '2.0 ± 1.0'
        """
        known = [value for value in values if not math.isnan(value)]
        return cls(fmean(known), pstdev(known), len(known)) if known else cls(math.nan, math.nan, 0)

    def __str__(self) -> str:
        if self.runs == 0:
            return "–"
        return f"{self.mean:.1f}" if self.runs == 1 else f"{self.mean:.1f} ± {self.deviation:.1f}"


@dataclass(frozen=True)
class Results:
    """The runs of one experiment."""

    experiment: Experiment
    runs: tuple[RunResults, ...]

    def accuracy(self, task: str) -> Spread:
        """The test accuracy on a task."""
        return Spread.of([run.checks.accuracy[task] for run in self.runs])

    def vote(self, layer: str, field: str) -> Spread:
        """A cell of Table 1."""
        return Spread.of([getattr(run.votes.layers[layer], field) for run in self.runs if run.votes])

    def signed_vote(self, vote: str, field: str) -> Spread:
        """A cell of Table 1 with signed contributions."""
        return Spread.of([getattr(getattr(run.votes, vote), field) for run in self.runs if run.votes])

    def crossing(self, row: int, field: str) -> Spread:
        """A number of cross-task attention."""
        return Spread.of([getattr(run.crossings.rows[row], field) for run in self.runs if run.crossings])

    def masked(self, row: int, task: str) -> Spread:
        """The accuracy of a masked model on a task."""
        return Spread.of([run.masks.rows[row].accuracy[task] for run in self.runs if run.masks])

    @property
    def summary(self) -> dict[str, Any]:
        """Every mean and deviation over the runs, by name."""
        tasks = [task.name for task in self.experiment.recipe.tasks]
        found: dict[str, Any] = {"accuracy": {task: self.accuracy(task) for task in tasks}}
        fields = ("target", "output", "right")
        if self.first.votes is not None:
            layers = self.experiment.layers
            found["table 1"] = {layer: {field: self.vote(layer, field) for field in fields} for layer in layers}
            found["signed votes"] = {
                vote: {field: self.signed_vote(vote, field) for field in fields} for vote in ("rebuilt", "classes")
            }
        if self.first.crossings is not None:
            found["cross-task attention"] = [
                {"task": row.task, "layer": row.layer}
                | {field: self.crossing(at, field) for field in ("attention", "best")}
                for at, row in enumerate(self.first.crossings.rows)
            ]
        if self.first.masks is not None:
            found["masks"] = [
                {"without": row.without, "layer": row.layer, "until": row.until}
                | {"accuracy": {task: self.masked(at, task) for task in tasks}}
                for at, row in enumerate(self.first.masks.rows)
            ]
        return found

    @property
    def first(self) -> RunResults:
        """The run whose figures are shown."""
        return self.runs[0]
