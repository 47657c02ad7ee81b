"""Cross-task attention as a number: how much of it goes to the training examples of the other task."""

from __future__ import annotations

from dataclasses import dataclass

from dualform.experiments.paper.run import Run

IMAGES = 1000  # of every task, the first ones
BEST = 10


@dataclass(frozen=True)
class Crossing:
    """In per cent, for test images of one task in one layer: what goes to the other task, of all attention (Σ|α|)
    and of the ten best events, as means over the images.
    """

    task: str
    layer: str
    attention: float
    best: float


@dataclass(frozen=True)
class Crossings:
    """The numbers of every task and layer, for so many images of each task."""

    images: int
    rows: tuple[Crossing, ...]


def crossings(run: Run) -> Crossings:
    """Measure cross-task attention."""
    rows = []
    names = [task.name for task in run.recipe.tasks]
    for number, name in enumerate(names):
        spotlight = run.attend(run.data.test.of(number)[:IMAGES])
        for layer in run.experiment.layers:
            attention = spotlight[layer]
            totals = attention.totals(by="task", absolute=True)
            own = list(totals.groups).index(name)
            share = 1 - totals.values[:, own] / totals.values.sum(dim=1)
            best = attention.top(BEST)
            other = run.data.train.tasks[best.examples] != number
            rows.append(
                Crossing(name, layer, 100 * float(share.mean()), 100 * float(other.double().mean(dim=1).mean()))
            )
    return Crossings(min(IMAGES, len(run.data.test) // len(names)), tuple(rows))
