"""The paper's image experiments in small, on digits and their turned negatives, and a plain training of the same.

`registered()` puts them in the place of the paper's. `twin(name, seed)` trains without a recorder and keeps every
event in lists, from which any number of an analysis can be computed in the plainest way, in fp64.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from dualform.experiments import datasets
from dualform.experiments.datasets import Dataset, Split
from dualform.experiments.paper import crossing, drawing, pushes, settings, spotlights
from dualform.experiments.paper.settings import Experiment, Phase, Showcase
from dualform.experiments.recipes import RECIPES, PaperNetwork, Recipe, Task

STEPS = 90
# Events of a class in the figures, test images for cross-task attention, and wrong ones of a single task.
BEST, IMAGES, ALONE = 60, 25, 2
TITLES = {"single": "Single task: digits", "joint": "Joint training: both", "continual": "Continual learning: both"}
NAMES = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LR, MOMENTUM, NORM = 3e-3, 0.9, 1.0


@cache
def upright() -> Dataset:
    """Digits, from five on dark on light: scores of the input layer are then of either sign."""
    data = datasets.digits()

    def ink(split: Split) -> Split:
        dark = (split.labels >= 5)[:, None, None]
        return replace(split, images=torch.where(dark, 255 - split.images, split.images))

    return Dataset(ink(data.train), ink(data.test), data.source)


@cache
def turned() -> Dataset:
    """Digits lying on their side, dark on light."""
    data = datasets.digits()

    def turn(split: Split) -> Split:
        return replace(split, images=255 - split.images.rot90(1, (1, 2)).contiguous())

    return Dataset(turn(data.train), turn(data.test), "Digits that were turned and inverted.")


def _task(name: str, title: str, load: Callable[[], Dataset], names: tuple[str, ...]) -> Task:
    pixels = load().train.images.double()
    return Task(name, title, load, names, pixels.mean().item(), pixels.std(correction=0).item())


UPRIGHT = _task("upright", "Upright", upright, tuple("0123456789"))
TURNED = _task("turned", "Turned", turned, NAMES)
NETWORK = partial(PaperNetwork, pixels=64, hidden=64)
ONE = Recipe("tiny", NETWORK, (UPRIGHT,), steps=STEPS, showcase=0)
TWO = Recipe("tiny-two", NETWORK, (UPRIGHT, TURNED), steps=STEPS, showcase=3)

EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "single",
            TITLES["single"],
            "5.2",
            "tiny",
            (Phase((0,), STEPS),),
            (
                Showcase("3a", 0, 6, scores=4, totals=5, matches=10, index=3),
                Showcase("12a", 0, 3, scores=14, totals=15, matches=13),
            ),
        ),
        Experiment(
            "joint",
            TITLES["joint"],
            "5.3",
            "tiny-two",
            (Phase((0, 1), STEPS),),
            (Showcase("3b", 1, 9, scores=6, totals=7, matches=11, index=10),),
        ),
        Experiment(
            "continual",
            TITLES["continual"],
            "5.4",
            "tiny-two",
            (Phase((0,), STEPS), Phase((1,), STEPS)),
            (
                Showcase("12d", 0, 1, scores=8, totals=9, matches=22, right=False),
                Showcase("12f", 0, 8, scores=27, totals=28, matches=26),
            ),
        ),
    )
}
ACCURACY = {"single": {"upright": 97.0}} | {name: {"upright": 97.0, "turned": 87.0} for name in ("joint", "continual")}


@contextmanager
def registered() -> Iterator[None]:
    """The small experiments in the place of the paper's."""
    with pytest.MonkeyPatch.context() as patch:
        for recipe in (ONE, TWO):
            patch.setitem(RECIPES, recipe.name, recipe)
        for name, experiment in EXPERIMENTS.items():
            patch.setitem(settings.EXPERIMENTS, name, experiment)
            patch.setitem(settings.PAPER_ACCURACY, name, ACCURACY[name])
        for module in (spotlights, drawing):
            patch.setattr(module, "BEST", BEST)
        patch.setattr(crossing, "IMAGES", IMAGES)
        patch.setattr(pushes, "ALONE", ALONE)
        yield


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200, color_system=None, markup=False)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@dataclass(frozen=True)
class Events:
    """What went through one layer, in order: keys, gradients as they were used (clipped), steps and examples."""

    keys: Tensor
    gradients: Tensor
    steps: Tensor
    examples: Tensor

    def coefficients(self, until: int) -> Tensor:
        """c of every event after so many steps: a gradient of momentum's steps is felt in all that follow."""
        steps = (until - self.steps + 1).clamp(min=0)
        return -LR * (1 - MOMENTUM ** steps.double()) / (1 - MOMENTUM)

    def values(self, until: int) -> Tensor:
        """e of every event."""
        return self.coefficients(until)[:, None] * self.gradients


@dataclass(frozen=True)
class Twin:
    """A training without a recorder: the model after every step (0: before the first), and all events."""

    recipe: Recipe
    data: Dataset
    model: nn.Module
    weights: list[dict[str, Tensor]]
    layers: dict[str, Events]

    @property
    def steps(self) -> int:
        return len(self.weights) - 1

    def inputs(self, split: Split) -> Tensor:
        """(pixel − mean) / std of each image's own task."""
        images = []
        for image, number in zip(split.images, split.tasks.tolist(), strict=True):
            task = self.recipe.tasks[number]
            images.append((image.float() - task.mean) / task.std)
        return torch.stack(images)

    @torch.no_grad()
    def logits(self, weights: dict[str, Tensor] | None = None) -> Tensor:
        """The outputs for all test images, of the trained network or of one with other weights."""
        model = NETWORK()
        model.load_state_dict(self.weights[-1] if weights is None else weights)
        found: Tensor = model(self.inputs(self.data.test))
        return found

    @torch.no_grad()
    def queries(self, split: Split) -> dict[str, Tensor]:
        """What some images give each layer, in fp64."""
        model, found = self.model, {}
        hidden = self.inputs(split).flatten(1)
        for name in ("fc0", "fc1", "fc2"):
            found[name] = hidden.double()
            hidden = torch.relu(getattr(model, name)(hidden))
        return found

    def scores(self, split: Split) -> dict[str, Tensor]:
        """α of every event, for some images: [images, events]."""
        return {name: query @ self.layers[name].keys.T for name, query in self.queries(split).items()}

    def contributions(self, split: Split) -> Tensor:
        """What every event adds to the logits of one image: [events, logits]."""
        (alpha,) = self.scores(split)["fc2"]
        return (alpha + 1)[:, None] * self.layers["fc2"].values(self.steps)  # the bias's key is 1

    def initial(self, split: Split) -> Tensor:
        """The part of the logits that no event made."""
        first = self.weights[0]
        return self.queries(split)["fc2"] @ first["fc2.weight"].double().T + first["fc2.bias"].double()

    def rebuilt(self, kept: Tensor | None = None, until: int | None = None) -> dict[str, Tensor]:
        """Initial weights plus the events of some examples (a mask over them)."""
        until = self.steps if until is None else until
        found = {}
        for name, events in self.layers.items():
            values = events.values(until)
            if kept is not None:
                values = values * kept[events.examples][:, None]
            found[f"{name}.weight"] = (self.weights[0][f"{name}.weight"].double() + values.T @ events.keys).float()
            found[f"{name}.bias"] = (self.weights[0][f"{name}.bias"].double() + values.sum(0)).float()
        return found

    def accuracy(self, weights: dict[str, Tensor] | None = None) -> dict[str, float]:
        """In per cent, by task."""
        right, tasks = self.logits(weights).argmax(1) == self.data.test.labels, self.data.test.tasks
        return {
            task.name: 100 * sum(right[tasks == number].tolist()) / int((tasks == number).sum())
            for number, task in enumerate(self.recipe.tasks)
        }

    def test_image(self, task: int, index: int) -> Split:
        """One test image, by its index in its task."""
        return self.data.test.of(task)[index : index + 1]

    def classes(self) -> list[tuple[int, int]]:
        """Task and label of every class, in the order of the figures."""
        return [(task, label) for task in range(len(self.recipe.tasks)) for label in range(10)]

    def of_class(self, task: int, label: int, layer: str = "fc2") -> Tensor:
        """Which events are of a class."""
        examples = self.layers[layer].examples
        return (self.data.train.labels[examples] == label) & (self.data.train.tasks[examples] == task)


@cache
def twin(name: str, seed: int = 0) -> Twin:
    """The plainest training loop of an experiment."""
    experiment = EXPERIMENTS[name]
    recipe = {"tiny": ONE, "tiny-two": TWO}[experiment.recipe_name]
    data = recipe.load()
    torch.manual_seed(seed)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    layers = {name: getattr(model, name) for name in ("fc0", "fc1", "fc2")}

    def hook(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[name] = inputs[0].detach(), output

    hooks = [layer.register_forward_hook(partial(hook, name)) for name, layer in layers.items()]
    blank = Twin(recipe, data, model, [], {})
    inputs = blank.inputs(data.train)
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
    weights = [{key: value.clone() for key, value in model.state_dict().items()}]
    ids = list(experiment.batches(data.train, seed))
    for batch in ids:
        F.cross_entropy(model(inputs[batch]), data.train.labels[batch]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM).double()
        scale = (NORM / (norm + 1e-6)).clamp(max=1.0)
        for name, (key, output) in seen.items():
            assert output.grad is not None
            rows[name].append((key.double(), scale * output.grad.double()))
        optimizer.step()
        optimizer.zero_grad()
        weights.append({key: value.clone() for key, value in model.state_dict().items()})
    for one in hooks:
        one.remove()
    steps = torch.arange(1, len(ids) + 1).repeat_interleave(len(ids[0]))
    events = {
        name: Events(
            torch.cat([key for key, _ in found]), torch.cat([gradient for _, gradient in found]), steps, torch.cat(ids)
        )
        for name, found in rows.items()
    }
    return replace(blank, weights=weights, layers=events)
