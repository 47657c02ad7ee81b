"""The settings of the paper's image experiments, and the inputs of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtyping import Int64
from torch import Tensor

from dualform.errors import BadCall
from dualform.experiments.datasets import Split
from dualform.experiments.recipes import Recipe, recipe
from dualform.experiments.training import batches

MNIST, FASHION = 0, 1  # tasks of the recipe mnist-and-fashion
BEST = 500  # events of a class in the figures of scores
MATCHES = 3


@dataclass(frozen=True)
class Phase:
    """A stretch of training on some tasks, shuffled together."""

    tasks: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Showcase:
    """A test image of the paper's figures, and the numbers of the figures about it.

    Where the paper gives no index, it is the first test image of the class that the model gets right, or wrong.
    """

    figure: str
    task: int
    label: int
    scores: int
    totals: int
    matches: int
    index: int | None = None
    right: bool = True


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments."""

    name: str
    title: str
    section: str
    recipe_name: str
    phases: tuple[Phase, ...]
    showcases: tuple[Showcase, ...]

    @property
    def recipe(self) -> Recipe:
        """Model, preprocessing and data."""
        return recipe(self.recipe_name)

    @property
    def steps(self) -> int:
        """The steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of the network, from the input on."""
        return ("fc0", "fc1", "fc2")

    @property
    def groups(self) -> str | tuple[str, ...]:
        """The columns by which events are put into classes."""
        return "label" if len(self.recipe.tasks) == 1 else ("task", "label")

    def shortened(self, steps: int | None) -> Experiment:
        """The same with so many steps in every phase."""
        if steps is None:
            return self
        if steps < 1:
            raise BadCall(f"steps must be at least 1, not {steps}.")
        return replace(self, phases=tuple(replace(phase, steps=steps) for phase in self.phases))

    def batches(self, train: Split, seed: int) -> Iterator[Int64[Tensor, " batch"]]:
        """The batches of example ids of all phases; tasks stand one after the other in the training split."""
        sizes = train.tasks.bincount().tolist()
        for number, phase in enumerate(self.phases):
            first = sum(sizes[: phase.tasks[0]])
            examples = sum(sizes[task] for task in phase.tasks)
            yield from batches(examples, phase.steps, 1000 * number + seed, first)


SINGLE = Experiment(
    "single",
    "Single task: MNIST",
    "5.2",
    "mnist",
    (Phase((MNIST,), 3000),),
    (
        Showcase("3a", MNIST, 6, scores=4, totals=5, matches=10, index=5938),
        Showcase("12a", MNIST, 3, scores=14, totals=15, matches=13),
    ),
)
JOINT = Experiment(
    "joint",
    "Joint training: MNIST and Fashion-MNIST",
    "5.3",
    "mnist-and-fashion",
    (Phase((MNIST, FASHION), 5000),),
    (
        Showcase("3b", FASHION, 9, scores=6, totals=7, matches=11, index=981),
        Showcase("12b", FASHION, 3, scores=17, totals=18, matches=16),
        Showcase("12c", FASHION, 5, scores=20, totals=21, matches=19),
    ),
)
CONTINUAL = Experiment(
    "continual",
    "Continual learning: MNIST, then Fashion-MNIST",
    "5.4",
    "mnist-and-fashion",
    (Phase((MNIST,), 3000), Phase((FASHION,), 3000)),
    (
        Showcase("12d", MNIST, 1, scores=8, totals=9, matches=22, right=False),
        Showcase("12e", FASHION, 3, scores=24, totals=25, matches=23),
        Showcase("12f", MNIST, 7, scores=27, totals=28, matches=26),
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in (SINGLE, JOINT, CONTINUAL)}
IMAGES = "images"  # all of them


def chosen(name: str) -> tuple[Experiment, ...]:
    """The experiments that a name of the command line stands for."""
    if name == IMAGES:
        return tuple(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise BadCall(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)} and {IMAGES}.")
    return (EXPERIMENTS[name],)


# What the paper reports, in per cent: mean and standard deviation over 5 runs.
PAPER_TABLE = {
    "fc0": {"target": (17.2, 2.7), "output": (49.5, 1.5), "right": (75.1, 0.0)},
    "fc1": {"target": (18.0, 2.9), "output": (52.9, 2.9), "right": (78.8, 0.8)},
    "fc2": {"target": (20.6, 2.6), "output": (60.1, 4.5), "right": (84.7, 1.1)},
}
PAPER_ACCURACY = {
    "single": {"mnist": 97.0},
    "joint": {"mnist": 97.0, "fashion-mnist": 87.0},
    "continual": {"mnist": 45.0, "fashion-mnist": 85.0},
}
