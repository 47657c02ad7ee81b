"""The plainest computations there are: every event in a list, every number by a loop, exact or in fp64.

`history(kind)` records a small run with chosen inputs and returns its memory together with the events as they
were fed in, so that any answer can be compared with a loop over that list.
"""

from __future__ import annotations

import atexit
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import dualform
from dualform.blocks import Block
from dualform.memory import StoredMemory

DIM_IN, DIM_OUT, EXAMPLES = 5, 3, 9
LABELS = [2, 0, 7, 2, 7, 7, 0, 2, 5]
NAMES = ["b", "a", "b", "<i>", "a", "b", "b", "a", "b"]
OF_WEIGHTS = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}
OF_BIASES = {"lr": 0.05, "momentum": 0.5, "nesterov": True}

# What the keys are like; the last ones have no sensible weights, so they are for scores only.
FINITE = ("gauss", "ties", "repeated", "zero", "float64")
KINDS = (*FINITE, "cancel", "denormal", "huge", "bfloat16", "nan", "keys only")


def dtype_of(kind: str) -> torch.dtype:
    return {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)


def rows(kind: str, generator: np.random.Generator, count: int, width: int = DIM_IN) -> Tensor:
    """Some rows that are of that kind."""
    numbers = generator.standard_normal((count, width))
    if kind == "ties":
        numbers = generator.integers(-1, 3, (count, width)).astype(float)
    elif kind == "repeated":
        numbers = np.random.default_rng(7).standard_normal((3, width))[generator.integers(0, 3, count)]
    elif kind == "zero":
        numbers = numbers * (generator.random((count, 1)) < 0.3) * np.sign(generator.standard_normal((count, width)))
    elif kind == "denormal":
        numbers = numbers * 10.0 ** generator.integers(-45, -36, (count, width))
    elif kind == "huge":
        numbers = numbers * 10.0 ** generator.integers(-25, 25, (count, width))
    elif kind == "cancel":
        # Neighbours nearly cancel, so that the sum lies close to the border of two fp32 numbers or near zero.
        numbers = generator.integers(1, 2**24, (count, width)) * 2.0 ** generator.integers(-30, 30, (count, 1))
        numbers[:, 1::2] = -numbers[:, 0 : width - width % 2 : 2]
        numbers[:, -1] *= 2.0 ** generator.integers(-40, 0, count)
    elif kind == "nan":
        numbers[generator.random((count, width)) < 0.05] = np.nan
        numbers[generator.random((count, width)) < 0.05] = np.inf
    return torch.from_numpy(numbers).to(dtype_of(kind))


@dataclass(frozen=True)
class Event:
    """One row that was forwarded, and everything that is said of it."""

    key: list[float]
    gradient: list[float]
    step: int
    example: int
    position: int
    use: int

    @property
    def label(self) -> int | None:
        return LABELS[self.example] if self.example >= 0 else None

    @property
    def name(self) -> str | None:
        return NAMES[self.example] if self.example >= 0 else None

    def value(self, column: str) -> Any:
        return getattr(self, column)


@dataclass(frozen=True)
class History:
    """A recorded run of `fc`, whose weight `twin` shares, and the plain list of its events."""

    memory: dualform.Memory
    model: nn.Module
    events: list[Event]
    initial: dict[str, Tensor]

    @property
    def steps(self) -> int:
        return max(event.step for event in self.events)

    def until(self, step: int) -> list[Event]:
        return [event for event in self.events if event.step <= step]

    def coefficient(self, event: Event, until: int) -> float:
        return response(OF_WEIGHTS, until, event.step)

    def bias_coefficient(self, event: Event, until: int, use: int = 0) -> float:
        return response(OF_BIASES, until, event.step) if event.use == use else 0.0


class Twins(nn.Module):
    """Two modules with one weight and a bias each."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM_IN, DIM_OUT, dtype=dtype)
        self.twin = nn.Linear(DIM_IN, DIM_OUT, dtype=dtype)
        self.twin.weight = self.fc.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def response(options: Mapping[str, Any], until: int, at: int, initial: float = 0.0) -> float:
    """What a gradient of 1 at step `at` (0: none) leaves in a weight after `until` steps: torch's own optimiser."""
    return _response(tuple(options.items()), until, at, initial)


@cache
def _response(options: tuple[tuple[str, Any], ...], until: int, at: int, initial: float) -> float:
    parameter = nn.Parameter(torch.tensor([initial], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], **dict(options))
    for step in range(1, until + 1):
        parameter.grad = torch.tensor([float(step == at)], dtype=torch.float64)
        optimizer.step()
    return parameter.item()


def twins_optimizer(model: Twins) -> torch.optim.SGD:
    biases = [model.fc.bias, model.twin.bias]
    return torch.optim.SGD([{"params": [model.fc.weight], **OF_WEIGHTS}, {"params": biases, **OF_BIASES}])


@cache
def history(kind: str) -> History:
    """A run with keys of some kind: several segments, two backward passes a step, two uses, missing ids."""
    generator = np.random.default_rng(sorted(KINDS).index(kind))
    dtype = dtype_of(kind)
    torch.manual_seed(3)
    model = Twins(dtype)
    initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    optimizer = twins_optimizer(model)
    path = Path(_directory().name) / kind
    events: list[Event] = []

    def call(use: int, shape: tuple[int, ...], ids: Tensor | None) -> Tensor:
        count = math.prod(shape)
        x = rows(kind, generator, count).reshape(*shape, DIM_IN)
        g = torch.from_numpy(generator.standard_normal((*shape, DIM_OUT))).to(dtype)
        per_id = 1 if ids is None else count // len(ids)
        for at, (key, gradient) in enumerate(
            zip(x.reshape(-1, DIM_IN).tolist(), g.reshape(-1, DIM_OUT).tolist(), strict=True)
        ):
            example = -1 if ids is None else int(ids[at // per_id])
            position = 0 if ids is None else at % per_id
            events.append(Event(key, gradient, step, example, position, use))
        module = (model.fc, model.twin)[use]
        if ids is None:
            return (module(x) * g).sum()
        with recorder.batch(ids):
            return (module(x) * g).sum()

    def ids(count: int) -> Tensor:
        return torch.from_numpy(generator.integers(0, EXAMPLES, count))

    columns = {"label": torch.tensor(LABELS), "name": NAMES, "pair": np.arange(2 * EXAMPLES).reshape(-1, 2)}
    keep = "keys" if kind == "keys only" else "all"
    with dualform.record(model, optimizer, path, examples=columns, keep=keep) as recorder:
        for step in range(1, 7):
            # Both biases always get a gradient: each steps in every step.
            (call(0, (4,), ids(4)) + call(1, (2, 3), ids(2))).backward()
            if step % 2:
                call(0, (3, 2), ids(3)).backward()
            if step == 4:
                (call(1, (2,), None) + call(0, (1,), ids(1))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, 3):
                recorder.commit()
    return History(dualform.open(path), model, events, initial)


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="dualform-plain-")
    atexit.register(directory.cleanup)
    return directory


@contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Inside, a memory is read in blocks of at most that many rows."""
    read = StoredMemory.blocks

    def small(memory: StoredMemory, weight: int, until: int, since: int = 0) -> Iterator[Block]:
        return read(memory, weight, until, rows, since)

    with mock.patch.object(StoredMemory, "blocks", small):
        yield


@dataclass(frozen=True)
class Call:
    """One forward and backward pass through `fc`: its rows, and the example of every id's rows; None for no ids."""

    keys: Tensor
    gradients: Tensor
    ids: list[int] | None


def recorded(path: Path, steps: Sequence[Sequence[Call]], commits: Sequence[int] = (), **options: Any) -> History:
    """A run of exactly these calls, some of them before each step; `commits` are the steps after which it commits."""
    torch.manual_seed(3)
    model = Twins(torch.float32)
    initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    optimizer = twins_optimizer(model)
    with dualform.record(model, optimizer, path, examples={"label": LABELS, "name": NAMES}, **options) as recorder:
        for step, calls in enumerate(steps, start=1):
            for call in calls:
                x, g = call.keys, call.gradients
                if call.ids is None:
                    (model.fc(x) * g).sum().backward()
                    continue
                x, g = (rows.reshape(len(call.ids), -1, rows.shape[1]) for rows in (x, g))
                with recorder.batch(torch.tensor(call.ids)):
                    (model.fc(x) * g).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in commits:
                recorder.commit()
    return History(dualform.open(path), model, events_of(steps), initial)


def events_of(steps: Sequence[Sequence[Call]]) -> list[Event]:
    """The events of some calls, in order."""
    events = []
    for step, calls in enumerate(steps, start=1):
        for call in calls:
            per_id = len(call.keys) // len(call.ids) if call.ids is not None else 1
            for at, (key, gradient) in enumerate(zip(call.keys.tolist(), call.gradients.tolist(), strict=True)):
                example, position = (call.ids[at // per_id], at % per_id) if call.ids is not None else (-1, 0)
                events.append(Event(key, gradient, step, example, position, 0))
    return events


def group_of(event: Event, columns: str | tuple[str, ...]) -> Any:
    """The group an event is in; None for none."""
    if isinstance(columns, str):
        value = event.value(columns)
        return None if value == -1 else value
    values = tuple(group_of(event, column) for column in columns)
    return None if None in values else values


def in_group(events: Sequence[Event], columns: str | tuple[str, ...], group: Any) -> list[int]:
    return [at for at, event in enumerate(events) if group_of(event, columns) == group]


def nearest_fp32(value: Fraction) -> float:
    """The fp32 number nearest to an exact value, ties to even."""
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    quantum = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(value / quantum) * quantum  # a Fraction rounds half to even
    return math.copysign(math.inf, rounded) if abs(rounded) >= 2**128 else float(rounded)


def score(key: Sequence[float], query: Sequence[float]) -> float:
    """x · q, the exact real number rounded once to fp32."""
    if not all(math.isfinite(number) for number in (*key, *query)):
        return float(sum(a * b for a, b in zip(key, query, strict=True)))
    return nearest_fp32(sum((Fraction(a) * Fraction(b) for a, b in zip(key, query, strict=True)), Fraction(0)))


def dot(key: Sequence[float], query: Sequence[float]) -> float:
    """x · q in fp64 with one rounding at the end."""
    if not all(math.isfinite(number) for number in (*key, *query)):
        return float(sum(a * b for a, b in zip(key, query, strict=True)))
    return math.sumprod(key, query) if hasattr(math, "sumprod") else math.fsum(map(float.__mul__, key, query))


def best(numbers: Sequence[float], k: int, order: str = "largest") -> list[int]:
    """The indices of the k best numbers: best first, ties by index; NaN never."""
    rank = {"largest": lambda v: -v, "smallest": lambda v: v, "absolute": lambda v: -abs(v)}[order]
    there = [at for at, number in enumerate(numbers) if not math.isnan(number)]
    return sorted(there, key=lambda at: (rank(numbers[at]), at))[:k]


def same(found: Iterable[float], expected: Iterable[float]) -> bool:
    """Equal numbers, with NaN equal to NaN."""
    return np.array_equal(np.array(list(found)), np.array(list(expected)), equal_nan=True)


def close(found: float, terms: Sequence[float], relative: float = 1e-12, slack: float = 0.0) -> bool:
    """Whether a sum is right up to rounding of its terms (or of something as large as `slack`); NaN where it is NaN."""
    plain = math.fsum(terms) if all(map(math.isfinite, terms)) else float(sum(terms))
    if not math.isfinite(plain):
        return math.isnan(found) if math.isnan(plain) else found == plain
    return abs(found - plain) <= relative * max(math.fsum(map(abs, terms)), slack)
