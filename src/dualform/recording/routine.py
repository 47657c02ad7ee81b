"""What is the same at every step of a training: tables of jobs in which only addresses are left to fill in.

Between two large products the interpreter's own code has left the cache, and every line is slow. So little is done
while the training waits; what the results mean is worked out later, for many steps at once.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from dualform.memory.arena import Held, Shape
from dualform.memory.slab import pages
from dualform.recording.jobs import (
    CHECKED,
    FIELDS,
    GRADIENTS,
    GRADIENTS_TO,
    HEAD,
    KEYS_TO,
    MATRIX,
    RESULT,
    ROOM,
    ROWS,
    SUMS,
    Table,
    copying,
    projecting,
    readable,
    room_of,
    taking,
)
from dualform.recording.swift import Swift
from dualform.recording.targets import Arrived, Sketch, Target, Use

Reserve = Callable[[Sequence[tuple[str, Shape]]], list[Held] | None]
AT_A_TIME = 32  # steps that are looked at together
RING = 8 << 20  # bytes that their results may take


class Ring:
    """Room for the results of some steps, one below the other, so that they can be looked at together."""

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers
        self._rows = max(min(AT_A_TIME, RING // (4 * numbers + 1)), 1)
        self._made: list[np.ndarray] = []
        self.begin()

    def begin(self) -> None:
        """Begin anew, elsewhere: what is there is kept as long as somebody looks at it."""
        self._next = self._rows

    def next(self) -> tuple[int, int]:
        """The next row for results, and its address."""
        if self._next == self._rows:
            self.results, self._next = self._unused(), 0
            self._address = self.results.ctypes.data
        row, self._next = self._next, self._next + 1
        return row, self._address + 4 * self._numbers * row

    def _unused(self) -> Float32[np.ndarray, "steps numbers"]:
        """Room at which nobody looks any more."""
        self.results = np.empty((0, self._numbers), dtype=np.float32)
        for made in self._made:
            if sys.getrefcount(made) <= _unused_count():
                break
        else:
            made = pages(4 * self._rows * self._numbers)
            self._made = [*self._made[-3:], made]
        # Every view of these results, and every view of such a view, holds on to `made` itself.
        return made.view(np.float32).reshape(self._rows, self._numbers)


@functools.cache
def _unused_count() -> int:
    """The references to memory that nobody looks at, counted as `Ring` counts them: versions of Python differ."""
    every = [pages(1)]
    for made in every:
        count = sys.getrefcount(made)
    return count


class Taken(NamedTuple):
    """What a routine made of one backward pass: where its rows are, and the sketches and sizes of all calls."""

    held: list[Held]
    results: Float32[np.ndarray, "steps numbers"]
    row: int


@dataclass(frozen=True, slots=True)
class Sketched:
    """What a routine made of the gradients of one step."""

    routine: Sketching
    results: Float32[np.ndarray, "steps numbers"]
    row: int

    def __call__(self) -> list[Sketch]:
        """The sketch of every gradient."""
        flat, at = self.results[self.row], self.routine.at
        return [flat[start:end] for start, end in itertools.pairwise(at)]


class Taking:
    """Copies and sketches the rows of backward passes of one kind: the same calls, with rows of the same shapes."""

    def __init__(self, rows: Sequence[tuple[Use, Tensor, Tensor]], values: bool, swift: Swift) -> None:
        self._swift, self.values = swift, values
        self.calls = [(use, keys.shape, gradients.shape) for use, keys, gradients in rows]
        self._wanted: list[tuple[str, Shape]] = []
        jobs: list[int] = []
        room = 0
        for use, keys, gradients in rows:
            columns = use.weight.columns(torch.float32, torch.device("cpu"))
            (events, width), outputs = keys.shape, gradients.shape[1]
            job = taking(events, width, outputs, columns)
            job[ROOM] = 8 * room
            room += room_of(job)
            jobs += job
            self._wanted.append((use.streams[0], Shape(events, width, torch.float32)))
            if values:
                self._wanted.append((use.streams[1], Shape(events, outputs, torch.float32)))
        self._room = torch.empty(room, dtype=torch.float64)
        for at in range(0, len(jobs), FIELDS):
            jobs[at + ROOM] += self._room.data_ptr()
        self._jobs = Table(jobs)
        # Of every call two sizes in fp64, then of every call its sketch.
        self.at: list[int] = np.cumsum([4 * len(rows), *(5 * shape[1] for _, _, shape in self.calls)]).tolist()
        self.ring = Ring(self.at[-1])

    @staticmethod
    def possible(rows: Sequence[tuple[Use, Tensor, Tensor]]) -> bool:
        """Whether the loops can read all of these rows."""
        alike = all(0 < len(keys) <= ROWS and len(keys) == len(gradients) for _, keys, gradients in rows)
        return alike and readable(_tensors(rows))

    def matches(self, rows: Sequence[tuple[Use, Tensor, Tensor]]) -> bool:
        """Whether these are the calls and shapes that the routine is for, and the loops can read their rows."""
        if len(rows) != len(self.calls):
            return False
        for (use, keys, gradients), (known, of_keys, of_gradients) in zip(rows, self.calls, strict=True):
            if use is not known or keys.shape != of_keys or gradients.shape != of_gradients:
                return False
        return readable(_tensors(rows))

    def take(self, rows: Sequence[tuple[Use, Tensor, Tensor]], reserve: Reserve) -> tuple[Taken, bool] | None:
        """Copy and sketch rows; also whether all sketches are finite. None where there is no room for them."""
        held = reserve(self._wanted)
        if held is None:
            return None
        row, start = self.ring.next()
        numbers, each, at, sums = self._jobs.numbers, iter(held), HEAD, start
        for (_, keys, gradients), result in zip(rows, self.at, strict=False):
            numbers[at + MATRIX], numbers[at + GRADIENTS] = keys.data_ptr(), gradients.data_ptr()
            to = next(each)
            numbers[at + KEYS_TO], numbers[at + CHECKED] = to.address, to.sums
            if self.values:
                numbers[at + GRADIENTS_TO] = next(each).address
            numbers[at + RESULT], numbers[at + SUMS] = start + 4 * result, sums
            at, sums = at + FIELDS, sums + 16
        return Taken(held, self.ring.results, row), self._swift.run(self._jobs)

    def tell(self, taken: Taken, arrived: Sequence[Arrived]) -> None:
        """Say of every call where its rows are, what their sketch is, and how large their terms are."""
        results, each = taken.results[taken.row], iter(taken.held)
        sizes = results[: 4 * len(arrived)].view(np.float64)
        for number, one in enumerate(arrived):
            one.kept_keys = next(each)
            if self.values:
                one.kept_gradients = next(each)
            at, end = self.at[number : number + 2]
            one.sketch = results[at:end].reshape(5, -1)
            one.sizes = float(sizes[2 * number]), float(sizes[2 * number + 1])


def _tensors(rows: Sequence[tuple[Use, Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for _, keys, gradients in rows for tensor in (keys, gradients)]


class Sketching:
    """Multiplies the gradients of the same parameters with the probe's columns."""

    def __init__(self, targets: Sequence[Target], swift: Swift) -> None:
        self.targets, self._swift = targets, swift
        jobs: list[int] = []
        sizes = []
        for target in targets:
            parameter = target.parameter.detach()
            if target.projection is None:
                jobs += copying(parameter)
                sizes.append(parameter.numel())
            else:
                jobs += projecting(parameter, target.columns(torch.float32, torch.device("cpu")))
                sizes.append(4 * len(parameter))
        self._jobs = Table(jobs)
        self.at: list[int] = np.cumsum([0, *sizes]).tolist()
        self.ring = Ring(self.at[-1])

    def sketch(self, gradients: Sequence[Tensor]) -> Sketched:
        """The sketches of all gradients, one after the other."""
        row, start = self.ring.next()
        numbers, at = self._jobs.numbers, HEAD
        for gradient, result in zip(gradients, self.at, strict=False):
            numbers[at + MATRIX], numbers[at + RESULT] = gradient.data_ptr(), start + 4 * result
            at += FIELDS
        self._swift.run(self._jobs)
        return Sketched(self, self.ring.results, row)
