"""Why not the other: the training examples that pushed a wrong logit up and the right one down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from dualform.experiments.paper.run import Run
from dualform.experiments.paper.spotlights import class_groups

EXAMPLES = 6
ALONE = 3  # images of a single task


@dataclass(frozen=True)
class Pusher:
    """A training example and what all its events add to (wrong logit − right logit)."""

    example: int
    task: int
    label: int
    added: float
    events: int


@dataclass(frozen=True)
class Push:
    """A misclassified image: who pushed towards the wrong answer, who against it, and what every class adds.

    `initial` is the part that no event made; with all classes it adds up to `difference`, that of the two logits,
    up to `apart`.
    """

    task: int
    index: int
    label: int
    answer: int
    difference: float
    initial: float
    totals: tuple[float, ...]
    apart: float
    towards: tuple[Pusher, ...]
    against: tuple[Pusher, ...]


@dataclass(frozen=True)
class Pushes:
    """Some images that the model gets wrong."""

    images: tuple[Push, ...]


def pushes(run: Run) -> Pushes:
    """Ask the last layer about misclassified images, along (wrong − right)."""
    return Pushes(tuple(_push(run, task, index) for task, index in _chosen(run)))


def _chosen(run: Run) -> list[tuple[int, int]]:
    """Task and index of the misclassified images that are shown: those of figures, and the first ones."""
    tasks = len(run.recipe.tasks)
    shown = [(case.task, run.find(case)[0]) for case in run.experiment.showcases if not case.right]
    for task in range(tasks):
        wrong = (~run.right[run.data.test.tasks == task]).nonzero()[:, 0].tolist()
        shown += [(task, index) for index in wrong[: ALONE if tasks == 1 else 1]]
    wrong_ones = [(task, index) for task, index in shown if not bool(run.right[run.number(task, index)])]
    return list(dict.fromkeys(wrong_ones))


def _push(run: Run, task: int, index: int) -> Push:
    place = run.number(task, index)
    label, answer = int(run.data.test.labels[place]), int(run.answers[place])
    logits = run.logits[place].double()
    direction = (one_hot(torch.tensor(answer), len(logits)) - one_hot(torch.tensor(label), len(logits))).double()
    attention = run.attend(run.data.test[place : place + 1])[run.experiment.layers[-1]]
    asked = attention.contributions(direction=direction)
    totals = asked.totals(by=run.experiment.groups)
    sums = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    initial, difference = float(attention.initial()[0] @ direction), float(logits[answer] - logits[label])

    def pushers(order: str) -> tuple[Pusher, ...]:
        top = asked.top(EXAMPLES, by="example", order=order)
        rows = zip(top.groups[0], top.scores[0].tolist(), top.counts[0].tolist(), strict=True)
        train = run.data.train
        return tuple(
            Pusher(int(example), int(train.tasks[example]), int(train.labels[example]), added, events)
            for example, added, events in rows
            if example is not None
        )

    return Push(
        task=task,
        index=index,
        label=label,
        answer=answer,
        difference=difference,
        initial=initial,
        totals=tuple(sums.get(group, 0.0) for group in class_groups(run)),
        apart=abs(initial + sum(sums.values()) - difference),
        towards=pushers("largest"),
        against=pushers("smallest"),
    )
