"""Recipes: a model, its preprocessing and its data sets under one name.

A memory holds no code, only its recipe's name, so a model can be rebuilt for it from this registry and from
nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from dualform.errors import BadCall
from dualform.experiments import datasets
from dualform.experiments.datasets import Dataset, Split, joined


class PaperNetwork(nn.Module):
    """The network of the paper's image experiments: three linear layers, relu between them.

    >>> PaperNetwork()(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, pixels: int = 784, hidden: int = 800, classes: int = 10) -> None:
        super().__init__()
        self.fc0 = nn.Linear(pixels, hidden)
        self.fc1 = nn.Linear(hidden, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, images: Float32[Tensor, "images ..."]) -> Float32[Tensor, "images classes"]:
        hidden = torch.relu(self.fc0(images.flatten(1)))
        hidden = torch.relu(self.fc1(hidden))
        logits: Tensor = self.fc2(hidden)
        return logits


@dataclass(frozen=True)
class Task:
    """A data set with the names of its classes; `mean` and `std` are of its pixels, 0 to 255."""

    name: str
    title: str
    load: Callable[[], Dataset]
    class_names: tuple[str, ...]
    mean: float
    std: float


@dataclass(frozen=True)
class Recipe:
    """How to build a model and its inputs; `load().train` is what it is trained on, and ids index that.

    Several tasks share the model's outputs. `steps` and `showcase`, a test image of the first task, are the demo's.
    """

    name: str
    model: Callable[[], nn.Module]
    tasks: tuple[Task, ...]
    steps: int
    showcase: int

    def load(self) -> Dataset:
        """The examples of all tasks, one task after the other."""
        return joined([task.load() for task in self.tasks])

    def preprocess(
        self, images: UInt8[Tensor, "images height width"], tasks: Int64[Tensor, " images"] | int = 0
    ) -> Float32[Tensor, "images height width"]:
        """Return the model's inputs, (pixel − mean) / std, normalised as the images' tasks are."""
        if isinstance(tasks, int):
            return (images.float() - self.tasks[tasks].mean) / self.tasks[tasks].std
        mean = torch.tensor([task.mean for task in self.tasks])[tasks, None, None]
        std = torch.tensor([task.std for task in self.tasks])[tasks, None, None]
        return (images.float() - mean) / std

    def inputs(self, split: Split) -> Float32[Tensor, "images height width"]:
        """The model's inputs for the examples of a split."""
        return self.preprocess(split.images, split.tasks)

    def columns(self, train: Split) -> dict[str, Any]:
        """What a memory keeps of its training examples: image, label and, where there are several, task."""
        found: dict[str, Any] = {"label": train.labels, "image": train.images}
        if len(self.tasks) > 1:
            found["task"] = [self.tasks[task].name for task in train.tasks.tolist()]
        return found

    def task(self, name: str | None) -> int:
        """The number of the task of this name; without a name the first one's."""
        names = [task.name for task in self.tasks]
        if name is not None and name not in names:
            raise BadCall(f"The recipe {self.name} has no task {name!r}; it has {' and '.join(names)}.")
        return 0 if name is None else names.index(name)

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the model's outputs stand for, in all tasks.

        >>> recipe("mnist").class_names[6], recipe("mnist-and-fashion").class_names[9]
        ('6', '9 / ankle boot')
        """
        return tuple(" / ".join(names) for names in zip(*(task.class_names for task in self.tasks), strict=True))


def recipe(name: str) -> Recipe:
    """Return the recipe of this name.

    >>> recipe("mnist").class_names[6]
    '6'
    """
    if name not in RECIPES:
        raise BadCall(f"There is no recipe {name!r}; the recipes are {', '.join(sorted(RECIPES))}.")
    return RECIPES[name]


def not_held_out() -> Int64[Tensor, "50000"]:
    """Return the ids, of 60,000, that the paper's experiments do not hold out for validation."""
    order = np.random.RandomState(0x1234).permutation(60_000)
    return torch.from_numpy(order[:-10_000])


def trained_on() -> Int64[Tensor, "40053"]:
    """Return the ids, of 60,000, that the paper's experiments train on: about 80 % of those not held out."""
    kept = np.random.RandomState(0xC1CAFA52).rand(50_000) > 0.2
    return not_held_out()[torch.from_numpy(kept)]


def paper_subset(load: Callable[[], Dataset]) -> Dataset:
    """Return a data set with the paper's 40,053 training images, in the paper's order."""
    data = load()
    return replace(data, train=data.train[trained_on()])


DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

# Means and standard deviations are of the 50,000 images that are not held out; a test measures them again.
MNIST = Task(
    "mnist", "MNIST", partial(paper_subset, datasets.mnist), DIGITS, mean=33.27479247448979, std=78.5178642521784
)
FASHION = Task(
    "fashion-mnist",
    "Fashion-MNIST",
    partial(paper_subset, datasets.fashion_mnist),
    CLOTHES,
    mean=72.97814158163266,
    std=90.07591864737617,
)
SMALL = Task("digits", "Digits", datasets.digits, DIGITS, mean=78.03964422407795, std=95.93039494063086)

RECIPES = {
    found.name: found
    for found in (
        Recipe("mnist", PaperNetwork, (MNIST,), steps=2000, showcase=5938),
        Recipe("fashion-mnist", PaperNetwork, (FASHION,), steps=2000, showcase=981),
        Recipe("mnist-and-fashion", PaperNetwork, (MNIST, FASHION), steps=5000, showcase=5938),
        Recipe("digits", partial(PaperNetwork, pixels=64), (SMALL,), steps=600, showcase=0),
    )
}
