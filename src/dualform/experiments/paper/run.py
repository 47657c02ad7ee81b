"""One run of an experiment: the trained network, its memory, and what every part of the analysis looks at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

import dualform
from dualform.experiments.datasets import Dataset, Split
from dualform.experiments.paper.settings import Experiment, Showcase
from dualform.experiments.recipes import Recipe
from dualform.queries import Spotlight


@dataclass(frozen=True, eq=False)
class Run:
    """A finished training of an experiment."""

    experiment: Experiment
    memory: dualform.Memory
    model: nn.Module
    data: Dataset

    @property
    def recipe(self) -> Recipe:
        """Model, preprocessing and data."""
        return self.experiment.recipe

    @cached_property
    def logits(self) -> Float[Tensor, "images classes"]:
        """The model's outputs for every test image."""
        with torch.no_grad():
            outputs: Tensor = self.model(self.recipe.inputs(self.data.test))
        return outputs

    @property
    def answers(self) -> Int64[Tensor, " images"]:
        """The model's answers to the test images."""
        return self.logits.argmax(1)

    @property
    def right(self) -> Tensor:
        """Which test images the model gets right."""
        return self.answers == self.data.test.labels

    def attend(self, split: Split) -> Spotlight:
        """The spotlights of some images."""
        return self.memory.attend(self.model, self.recipe.inputs(split))

    def number(self, task: int, index: int) -> int:
        """The place of a task's test image among those of all tasks."""
        return int((self.data.test.tasks == task).nonzero()[index, 0])

    def find(self, showcase: Showcase) -> tuple[int, str]:
        """The test image of a showcase, by its index in its task, and a note where there is none such."""
        if showcase.index is not None:
            return showcase.index, ""
        of_task = self.data.test.tasks == showcase.task
        labels, right = self.data.test.labels[of_task], self.right[of_task]
        of_class = labels == showcase.label
        wanted = (of_class & (right == showcase.right)).nonzero()[:, 0]
        if len(wanted):
            return int(wanted[0]), ""
        verdict = "right" if showcase.right else "wrong"
        return int(of_class.nonzero()[0, 0]), f"the model gets no image of this class {verdict}: the first one is shown"
