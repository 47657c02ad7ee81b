"""Recipes: a model, its preprocessing and its data set under one name.

A memory holds no code, only its recipe's name, so a model can be rebuilt for it from this registry and from
nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from dualform.errors import BadCall
from dualform.experiments import datasets
from dualform.experiments.datasets import Dataset


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
class Recipe:
    """How to build a model and its inputs; `load().train` is what it is trained on, and ids index that.

    `mean` and `std` are of pixels 0 to 255; `steps` and `showcase`, a test image, are the demo's.
    """

    name: str
    model: Callable[[], nn.Module]
    load: Callable[[], Dataset]
    class_names: tuple[str, ...]
    mean: float
    std: float
    steps: int
    showcase: int

    def preprocess(self, images: UInt8[Tensor, "images height width"]) -> Float32[Tensor, "images height width"]:
        """Return the model's inputs, (pixel − mean) / std."""
        return (images.float() - self.mean) / self.std


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


def paper_mnist() -> Dataset:
    """Return MNIST with the paper's 40,053 training images, in the paper's order."""
    data = datasets.mnist()
    return replace(data, train=data.train[trained_on()])


DIGITS = tuple("0123456789")

RECIPES = {
    "mnist": Recipe(
        name="mnist",
        model=PaperNetwork,
        load=paper_mnist,
        class_names=DIGITS,
        # Measured on the 50,000 images that are not held out; a test measures them again.
        mean=33.27479247448979,
        std=78.5178642521784,
        steps=2000,
        showcase=5938,
    ),
    "digits": Recipe(
        name="digits",
        model=partial(PaperNetwork, pixels=64),
        load=datasets.digits,
        class_names=DIGITS,
        mean=78.03964422407795,
        std=95.93039494063086,
        steps=600,
        showcase=0,
    ),
}
