"""Table 1: how often the class that is attended to most is the true one, or the model's answer; and signed votes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.experiments.paper.checks import percent
from dualform.experiments.paper.run import Run
from dualform.queries.results import Totals


@dataclass(frozen=True)
class Vote:
    """In per cent: of the images the model gets wrong, the vote is the true label (target) or the model's answer
    (output); of those it gets right, it is the label.
    """

    target: float
    output: float
    right: float

    @classmethod
    def of(cls, vote: Int64[Tensor, " images"], run: Run) -> Vote:
        """Compare a vote with labels and answers."""
        labels, wrong = run.data.test.labels, ~run.right
        return cls(
            percent((vote == labels)[wrong]), percent((vote == run.answers)[wrong]), percent((vote == labels)[~wrong])
        )


@dataclass(frozen=True)
class Votes:
    """Table 1, layer by layer, and what signed contributions to the logits vote for.

    `rebuilt` is the vote of initial() + Σ contributions, which is the model's own output: `agreeing` of `images`
    answers are the model's, and `apart` is the largest difference of a logit, relative to the largest logit.
    `classes` is the vote for the class whose events add most to the logit of that class.
    """

    layers: dict[str, Vote]
    rebuilt: Vote
    classes: Vote
    images: int
    wrong: int
    agreeing: int
    undecided: int
    apart: float


def votes(run: Run) -> Votes:
    """Let every test image vote in every layer."""
    spotlight = run.attend(run.data.test)
    layers = {}
    for layer in run.experiment.layers:
        layers[layer] = Vote.of(_most(spotlight[layer].totals(by="label", absolute=True)), run)

    attention = spotlight[run.experiment.layers[-1]]
    added = attention.contributions().totals(by="label")
    classes = torch.as_tensor(added.groups)
    rebuilt = attention.initial() + added.values.sum(dim=1)
    own = added.values[:, torch.arange(len(classes)), classes]
    largest = float(run.logits.abs().max())
    apart = float((rebuilt - run.logits).abs().max()) / largest
    return Votes(
        layers,
        Vote.of(rebuilt.argmax(1), run),
        Vote.of(classes[own.argmax(1)], run),
        images=len(run.data.test),
        wrong=int((~run.right).sum()),
        agreeing=int((rebuilt.argmax(1) == run.answers).sum()),
        undecided=int(_undecided(run, apart * largest).sum()),
        apart=apart,
    )


def _most(totals: Totals) -> Int64[Tensor, " images"]:
    """The class with the largest total."""
    return torch.as_tensor(totals.groups)[totals.values.argmax(1)]


def _undecided(run: Run, apart: float) -> Bool[Tensor, " images"]:
    """Images whose two largest logits differ by no more than the rebuilt ones are off."""
    best = run.logits.topk(2, dim=1).values.double()
    return best[:, 0] - best[:, 1] <= 2 * apart
