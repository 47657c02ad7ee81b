"""The parts of an analysis: each is one function of a finished run, and its result one file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dualform.experiments.paper.checks import Checks, checks
from dualform.experiments.paper.crossing import Crossings, crossings
from dualform.experiments.paper.masks import Masks, masks
from dualform.experiments.paper.pushes import Pushes, pushes
from dualform.experiments.paper.run import Run
from dualform.experiments.paper.settings import Experiment
from dualform.experiments.paper.spotlights import Spotlights, spotlights
from dualform.experiments.paper.votes import Votes, votes


@dataclass(frozen=True)
class Part:
    """A part of the analysis of some experiments; of their first run only where it is about single images."""

    name: str
    title: str
    kind: type[Any]
    compute: Callable[[Run], Any]
    experiments: tuple[str, ...]
    first_only: bool = False


PARTS = (
    Part("checks", "certificate", Checks, checks, ("single", "joint", "continual")),
    Part("votes", "Table 1", Votes, votes, ("single",)),
    Part("crossings", "cross-task attention", Crossings, crossings, ("joint", "continual")),
    Part("masks", "masks", Masks, masks, ("continual",)),
    Part("spotlights", "spotlights", Spotlights, spotlights, ("single", "joint", "continual"), first_only=True),
    Part("pushes", "wrong answers", Pushes, pushes, ("single", "joint", "continual"), first_only=True),
)


def parts_of(experiment: Experiment, first: bool) -> tuple[Part, ...]:
    """The parts that a run of an experiment has."""
    return tuple(part for part in PARTS if experiment.name in part.experiments and (first or not part.first_only))
