"""Views of the explorer. A view is a page, and the numbers on it as JSON from the same address."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from dualform.errors import BadQuery
from dualform.view.explorer.answers import Answers, picture, png
from dualform.view.explorer.levers import pixels_text, read_input, read_levers
from dualform.view.explorer.overview import Overview
from dualform.view.explorer.subject import ImageSubject, Subject
from dualform.view.imagefiles import decode_image

PAGE = 60  # test images in a list


@runtime_checkable
class View(Protocol):
    """One kind of page: `name` is its address and its module on the page."""

    name: str
    title: str

    def is_slow(self, parameters: Mapping[str, str]) -> bool:
        """Whether an answer may take long, so that quick ones should not wait behind it."""

    def data(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The numbers of the page with these parameters."""

    def close(self) -> None:
        """End what goes on in the background."""


@dataclass(eq=False)
class OverviewView:
    """What a memory holds and how exact it is."""

    subject: Subject
    name: str = "overview"
    title: str = "Overview"
    _overview: Overview = field(init=False)

    def __post_init__(self) -> None:
        self._overview = Overview(self.subject)

    def is_slow(self, parameters: Mapping[str, str]) -> bool:
        return False

    def data(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        self._overview.measure()
        return self._overview.facts()

    def close(self) -> None:
        self._overview.close()


@dataclass(eq=False)
class ImagesView:
    """What an image attends to."""

    subject: Subject
    images: ImageSubject
    name: str = "images"
    title: str = "Images"
    _answers: Answers = field(init=False)
    _known: dict[int, Int64[Tensor, " images"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answers = Answers(self.subject, self.images)

    def is_slow(self, parameters: Mapping[str, str]) -> bool:
        levers = read_levers(parameters, self.images, self.subject.memory.steps)
        models = self._answers.models
        if parameters.get("part", "spotlights") != "spotlights" or not models.has(levers):
            return True
        # Earlier than the last step, what classes add is a pass over all events.
        return levers.measure == "contributions" and (levers.until is not None or not models.has_totals())

    def data(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        levers = read_levers(parameters, self.images, self.subject.memory.steps)
        asked = read_input(parameters, self.images)
        found = self._answers.answer(asked, levers, parameters.get("part", "spotlights"))
        task = self.images.tasks[asked.task]
        about = {
            "input": {
                "title": "your image" if asked.index is None else f"{task.title} test image {asked.index:,}",
                "task": task.name,
                "index": asked.index,
                "image": picture(asked.pixels),
                "pixels": pixels_text(asked.pixels),
            },
            "step": self.subject.memory.steps if levers.until is None else levers.until,
        }
        return about | found

    def setting(self) -> dict[str, Any]:
        """What does not change: tasks, classes, size and steps."""
        return {
            "steps": self.subject.memory.steps,
            "height": self.images.size[0],
            "width": self.images.size[1],
            "tasks": [
                {"name": task.name, "title": task.title, "class_names": list(task.class_names)}
                for task in self.images.tasks
            ],
            "masks": self.subject.has_values,
        }

    def examples(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Test images of a task, a class, right or wrong ones, a page at a time."""
        known = ("task", "label", "right", "page", "token")
        for name in parameters:
            if name not in known:
                raise BadQuery(f"there is no parameter {name[:40]!r}; there are {', '.join(known)}.")
        asked = read_input({name: value for name, value in parameters.items() if name == "task"}, self.images)
        of_task = (self.images.test.tasks == asked.task).nonzero()[:, 0]
        labels, answers = self.images.test.labels[of_task], self._answer_to_all(asked.task)
        chosen = torch.ones(len(labels), dtype=torch.bool)
        if parameters.get("label", "") != "":
            chosen &= labels == _whole(parameters["label"], "label", len(self.images.tasks[asked.task].class_names))
        right = parameters.get("right", "")
        if right not in ("", "yes", "no"):
            raise BadQuery(f"right is yes or no, not {right[:40]!r}.")
        if right:
            chosen &= (labels == answers) == (right == "yes")
        found = chosen.nonzero()[:, 0]
        page = _whole(parameters.get("page") or "0", "page", 10**6)
        return {
            "count": len(found),
            "page": page,
            "pages": -(-len(found) // PAGE),
            "examples": [
                {
                    "index": index,
                    "label": int(labels[index]),
                    "answer": int(answers[index]),
                    "image": picture(self.images.test.images[of_task[index]]),
                }
                for index in found[page * PAGE : (page + 1) * PAGE].tolist()
            ],
        }

    def train_image(self, example: str) -> bytes:
        """A training image, by the number of its example, as a PNG file."""
        return png(self.images.train.images[_whole(example, "a training example", len(self.images.train))])

    def upload(self, content: bytes, invert: bool) -> dict[str, Any]:
        """An image file as the pixels of the page's own parameter."""
        height, width = self.images.size
        pixels, notes = decode_image(io.BytesIO(content), "this file", height, width, invert)
        return {"pixels": pixels_text(pixels), "notes": [note.replace("--invert", "“invert”") for note in notes]}

    def close(self) -> None:
        """Nothing goes on in the background."""

    @torch.no_grad()
    def _answer_to_all(self, task: int) -> Int64[Tensor, " images"]:
        """The model's answers to a task's test images; a tenth of a second, once."""
        if task not in self._known:
            images = self.images.test.images[self.images.test.tasks == task]
            self._known[task] = self.images.model(self.images.preprocess(images, task)).argmax(1)
        return self._known[task]


def views_of(subject: Subject) -> list[View]:
    """The views that a subject has."""
    found: list[View] = [OverviewView(subject)]
    if subject.images is not None:
        found.insert(0, ImagesView(subject, subject.images))
    return found


def _whole(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < most):
        raise BadQuery(f"{name} is a whole number from 0 to {most - 1:,}, not {text[:40]!r}.")
    return int(text)
