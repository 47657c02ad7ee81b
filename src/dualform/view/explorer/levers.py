"""Levers: how the model is set before it is asked. They come from the address of a page, and make it a link."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from dualform.errors import BadQuery
from dualform.view.explorer.subject import ImageSubject

MEASURES = ("scores", "contributions")
NAMES = ("test", "task", "pixels", "until", "without", "measure", "unit", "against", "part", "token", "mode")


@dataclass(frozen=True)
class Levers:
    """The model as it was after step `until` (None: the last), without the events of some classes.

    What is ranked: scores, or in the last layer contributions to `unit`, or to `unit` rather than `against`.
    """

    until: int | None = None
    without: frozenset[tuple[int, int]] = frozenset()
    measure: str = "scores"
    unit: int | None = None
    against: int | None = None

    @property
    def model(self) -> tuple[int | None, frozenset[tuple[int, int]]]:
        """What the model depends on."""
        return self.until, self.without


def read_levers(parameters: Mapping[str, str], subject: ImageSubject, steps: int) -> Levers:
    """The levers in the parameters of an address; BadQuery for what cannot be."""
    unknown = [name for name in parameters if name not in NAMES]
    if unknown:
        raise BadQuery(f"there is no parameter {unknown[0][:40]!r}; there are {', '.join(NAMES)}.")
    classes = len(subject.tasks[0].class_names)
    until = _number(parameters, "until", 0, steps)
    measure = parameters.get("measure", "scores")
    if measure not in MEASURES:
        raise BadQuery(f"measure is one of {', '.join(MEASURES)}, not {measure[:40]!r}.")
    unit, against = _number(parameters, "unit", 0, classes - 1), _number(parameters, "against", 0, classes - 1)
    if unit is not None and unit == against:
        raise BadQuery(f"unit and against are both {unit}: give two different outputs.")
    without = frozenset(_groups(parameters.get("without", ""), subject))
    if len(without) == len(subject.groups):
        raise BadQuery("without leaves no event at all: leave some classes on.")
    return Levers(None if until == steps else until, without, measure, unit, against)


@dataclass(frozen=True, eq=False)
class Input:
    """The image that is asked about: a test image (index in its task) or drawn pixels."""

    pixels: UInt8[Tensor, "height width"]
    task: int
    index: int | None = None
    label: int | None = None


def read_input(parameters: Mapping[str, str], subject: ImageSubject) -> Input:
    """The image in the parameters of an address: `pixels` (base64), or a `test` image; else the showcase."""
    names = [task.name for task in subject.tasks]
    task_name = parameters.get("task", names[0])
    if task_name not in names:
        raise BadQuery(f"task is one of {', '.join(names)}, not {task_name[:40]!r}.")
    task = names.index(task_name)
    if "pixels" in parameters:
        if "test" in parameters:
            raise BadQuery("give test or pixels, not both.")
        return Input(_pixels(parameters["pixels"], subject.size), task)
    count = int((subject.test.tasks == task).sum())
    index = _number(parameters, "test", 0, count - 1)
    index = min(subject.showcase, count - 1) if index is None else index
    place = subject.test_place(task, index)
    return Input(subject.test.images[place], task, index, int(subject.test.labels[place]))


def _number(parameters: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = parameters.get(name, "")
    if text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise BadQuery(f"{name} is a whole number from {least} to {most:,}, not {text[:40]!r}.")
    return int(text)


def _groups(text: str, subject: ImageSubject) -> set[tuple[int, int]]:
    """Classes in a text: `fashion-mnist` a whole task, `fashion-mnist:3` one class, `3` one of the first task."""
    names = {task.name: number for number, task in enumerate(subject.tasks)}
    found: set[tuple[int, int]] = set()
    items = [item for item in text.split(",") if item]
    if len(items) > 2 * len(subject.groups):
        raise BadQuery(f"without names {len(items):,} classes; there are {len(subject.groups)}.")
    for item in items:
        task, colon, label = item.rpartition(":") if ":" in item else (subject.tasks[0].name, ":", item)
        if item in names:
            found |= {group for group in subject.groups if group[0] == names[item]}
        elif (
            colon
            and task in names
            and label.isascii()
            and label.isdigit()
            and len(label) < 7
            and (names[task], int(label)) in subject.groups
        ):
            found.add((names[task], int(label)))
        else:
            raise BadQuery(
                f"without names tasks ({', '.join(names)}) or classes (as 3 or {subject.tasks[0].name}:3), "
                f"not {item[:40]!r}."
            )
    return found


def _pixels(text: str, size: tuple[int, int]) -> UInt8[Tensor, "height width"]:
    height, width = size
    try:
        raw = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadQuery("pixels is not base64 (the web's variant, with - and _).") from None
    if len(raw) != height * width:
        raise BadQuery(f"pixels has {len(raw):,} bytes; {height} × {width} = {height * width:,} are expected.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(height, width)


def pixels_text(pixels: UInt8[Tensor, "height width"]) -> str:
    """Pixels as a parameter."""
    return base64.b64encode(pixels.contiguous().numpy().tobytes(), altchars=b"-_").decode("ascii")
