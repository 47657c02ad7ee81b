"""What the test images of the paper's figures attend to: scores, totals and best matches, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.experiments.matches import best_examples
from dualform.experiments.paper.run import Run
from dualform.experiments.paper.settings import BEST, MATCHES, Showcase
from dualform.queries import Attention
from dualform.queries.results import TopEvents, TopGroups, Totals
from dualform.queries.spotlight import Contributions

BINS = 30


@dataclass(frozen=True)
class Match:
    """A training example among the best matches."""

    example: int
    task: int
    label: int
    score: float
    step: int


@dataclass(frozen=True)
class Layer:
    """One layer: the best scores of every class in descending order, every class's total, and the best matches.

    `steps` counts the best events of all classes by stretches of training.
    """

    name: str
    scores: tuple[tuple[float, ...], ...]
    totals: tuple[float, ...]
    matches: tuple[Match, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Spotlit:
    """A test image, what it is and what the model takes it for; `weighted` are scores times the norm of the error."""

    figure: str
    task: int
    index: int
    label: int
    answer: int
    probability: float
    note: str
    layers: tuple[Layer, ...]
    weighted: tuple[Layer, ...]


@dataclass(frozen=True)
class Spotlights:
    """The inputs of an experiment's figures; classes are in the order of tasks and labels."""

    showcases: tuple[Spotlit, ...]


def spotlights(run: Run) -> Spotlights:
    """Ask every layer about the test images of the figures."""
    shown = []
    for number, showcase in enumerate(run.experiment.showcases):
        # The paper weighs scores by the norm of the error in the single task's first example.
        weigh = number == 0 and len(run.recipe.tasks) == 1
        shown.append(_spotlit(run, showcase, weigh))
    return Spotlights(tuple(shown))


def _spotlit(run: Run, showcase: Showcase, weigh: bool) -> Spotlit:
    index, note = run.find(showcase)
    place = run.number(showcase.task, index)
    spotlight = run.attend(run.data.test[place : place + 1])
    layers = run.experiment.layers
    return Spotlit(
        figure=showcase.figure,
        task=showcase.task,
        index=index,
        label=int(run.data.test.labels[place]),
        answer=int(run.answers[place]),
        probability=float(run.logits[place].double().softmax(0).max()),
        note=note,
        layers=tuple(_layer(run, name, spotlight[name]) for name in layers),
        weighted=tuple(_layer(run, name, spotlight[name].contributions()) for name in layers) if weigh else (),
    )


def _layer(run: Run, name: str, asked: Attention | Contributions) -> Layer:
    by = run.experiment.groups
    within = asked.top(BEST, within=by)
    totals: Totals | TopGroups
    if isinstance(asked, Attention):
        totals = asked.totals(by=by, absolute=True)
        sums = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    else:
        # Contributions as a whole have a size, |α_t| ‖e_t‖, and groups are ranked by the sum of sizes.
        totals = asked.top(len(within.groups or ()), by=by)
        sums = dict(zip(totals.groups[0], totals.scores[0].tolist(), strict=True))
    train = run.data.train
    matches = tuple(
        Match(best.example, int(train.tasks[best.example]), int(train.labels[best.example]), best.score, best.step)
        for best in best_examples(asked, MATCHES)
    )
    return Layer(
        name=name,
        scores=tuple(tuple(_best(run, within, group)) for group in class_groups(run)),
        totals=tuple(sums.get(group, 0.0) for group in class_groups(run)),
        matches=matches,
        steps=tuple(int(count) for count in _over_time(asked.top(BEST), run.memory.steps)),
    )


def class_groups(run: Run) -> list[object]:
    """The groups of a memory that are classes, in the order of tasks and labels."""
    tasks = run.recipe.tasks
    if len(tasks) == 1:
        return list(range(len(tasks[0].class_names)))
    return [(task.name, label) for task in tasks for label in range(len(task.class_names))]


def _best(run: Run, within: TopEvents, group: object) -> list[float]:
    if within.groups is None or group not in within.groups:
        return []
    scores = within.scores[0, list(within.groups).index(group)]
    found: list[float] = scores[~scores.isnan()].tolist()
    return found


def _over_time(top: TopEvents, steps: int) -> Float[Tensor, " bins"]:
    """How many of the best events are in each of equally long stretches of training."""
    found = top.steps[0][top.events[0] >= 0].double()
    return torch.histc(found, bins=min(BINS, steps), min=0.5, max=steps + 0.5)
