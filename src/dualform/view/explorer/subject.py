"""What is explored: a memory, and, where they are known, its model and the images it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor, nn

from dualform.api import Memory
from dualform.queries.values import why_no_values


@runtime_checkable
class Task(Protocol):
    """A data set with the names of its classes, as a recipe has it."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...


@runtime_checkable
class Images(Protocol):
    """Images with their labels and the numbers of their tasks, as a split of a data set has them."""

    @property
    def images(self) -> UInt8[Tensor, "images height width"]: ...

    @property
    def labels(self) -> Int64[Tensor, " images"]: ...

    @property
    def tasks(self) -> Int64[Tensor, " images"]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ImageSubject:
    """A model of images: what it was trained on, by example ids, and what it can be asked about."""

    model: nn.Module
    tasks: tuple[Task, ...]
    train: Images
    test: Images
    preprocess: Callable[[Tensor, int], Float32[Tensor, "images ..."]]
    showcase: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.test.images.shape[1], self.test.images.shape[2]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the memory by which events are put into classes."""
        return ("label",) if len(self.tasks) == 1 else ("task", "label")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Every class of every task, as (task, label)."""
        return tuple((task, label) for task, one in enumerate(self.tasks) for label in range(len(one.class_names)))

    def of_groups(self, groups: set[tuple[int, int]]) -> Bool[Tensor, " examples"]:
        """Which training examples are of some classes."""
        chosen = torch.zeros(len(self.train), dtype=torch.bool)
        for task, label in groups:
            chosen |= (self.train.tasks == task) & (self.train.labels == label)
        return chosen

    def test_place(self, task: int, index: int) -> int:
        """The place among all test images of the one with this index in its task."""
        return int((self.test.tasks == task).nonzero()[index, 0])


@dataclass(frozen=True, eq=False)
class Subject:
    """A memory to explore; `images` is None where no recipe says what its model is."""

    memory: Memory
    title: str
    images: ImageSubject | None = None

    @property
    def has_values(self) -> bool:
        """Whether every event has an exact value, so that the model of a step, a mask or a contribution can be had."""
        return all(why_no_values(self.memory, at) is None for at in range(len(self.memory.manifest.weights)))
