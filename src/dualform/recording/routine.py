"""What is the same at every step of a training: tables of jobs in which only addresses are left to fill in.

Between two large products the interpreter's own code has left the cache, and every line is slow. So little is done
while the training waits; what the results mean is worked out later, for many steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from dualform.memory.arena import Held, Shape
from dualform.recording.jobs import (
    FIELDS,
    GRADIENTS,
    GRADIENTS_TO,
    KEYS_TO,
    MATRIX,
    RESULT,
    ROOM,
    ROWS,
    SUMS,
    comparing,
    copying,
    fits,
    projecting,
    room_of,
    taking,
)  # fmt: skip
from dualform.recording.swift import Swift
from dualform.recording.targets import Arrived, Sketch, Target, Use

Reserve = Callable[[Sequence[tuple[str, Shape]]], list[Held] | None]
Products = tuple[float, float, float]
"""‖G‖², G·S and ‖S‖² of the sketches of a gradient and of the events behind it."""


class Taken(NamedTuple):
    """What a routine made of one backward pass: where its rows are, and the sketches and sizes of all calls."""

    held: list[Held]
    results: Tensor


class Taking:
    """Copies and sketches the rows of backward passes of one kind: the same calls, with rows of the same shapes."""

    def __init__(self, rows: Sequence[tuple[Use, Tensor, Tensor]], values: bool, swift: Swift) -> None:
        self._swift, self._values = swift, values
        self._calls = [(use, keys.shape, gradients.shape) for use, keys, gradients in rows]
        self._wanted: list[tuple[str, Shape]] = []
        self._jobs: list[int] = []
        room = 0
        for use, keys, gradients in rows:
            columns = use.weight.columns(torch.float32, torch.device("cpu"))
            (events, width), outputs = keys.shape, gradients.shape[1]
            job = taking(events, width, outputs, columns)
            job[ROOM] = 8 * room
            room += room_of(job)
            self._jobs += job
            self._wanted.append((use.streams[0], Shape(events, width, torch.float32)))
            if values:
                self._wanted.append((use.streams[1], Shape(events, outputs, torch.float32)))
        self._room = torch.empty(room, dtype=torch.float64)
        for at in range(0, len(self._jobs), FIELDS):
            self._jobs[at + ROOM] += self._room.data_ptr()
        # Of every call two sizes in fp64, then of every call its sketch.
        self._at = np.cumsum([4 * len(rows), *(5 * shape[1] for _, _, shape in self._calls)]).tolist()

    @staticmethod
    def possible(rows: Sequence[tuple[Use, Tensor, Tensor]]) -> bool:
        """Whether the loops can read all of these rows."""
        return all(0 < len(keys) <= ROWS and fits(keys) and fits(gradients) for _, keys, gradients in rows)

    def matches(self, rows: Sequence[tuple[Use, Tensor, Tensor]]) -> bool:
        """Whether these are the calls and shapes that the routine is for."""
        return len(rows) == len(self._calls) and all(
            use is known and keys.shape == of_keys and gradients.shape == of_gradients
            for (use, keys, gradients), (known, of_keys, of_gradients) in zip(rows, self._calls, strict=True)
        )

    def take(self, rows: Sequence[tuple[Use, Tensor, Tensor]], reserve: Reserve) -> tuple[Taken, bool] | None:
        """Copy and sketch rows; also whether all sketches are finite. None where there is no room for them."""
        held = reserve(self._wanted)
        if held is None:
            return None
        results = torch.empty(self._at[-1], dtype=torch.float32)
        start, jobs, each = results.data_ptr(), self._jobs, iter(held)
        for number, (_, keys, gradients) in enumerate(rows):
            at = number * FIELDS
            jobs[at + MATRIX], jobs[at + GRADIENTS] = keys.data_ptr(), gradients.data_ptr()
            jobs[at + KEYS_TO] = next(each).address
            if self._values:
                jobs[at + GRADIENTS_TO] = next(each).address
            jobs[at + RESULT], jobs[at + SUMS] = start + 4 * self._at[number], start + 16 * number
        return Taken(held, results), self._swift.run(jobs)

    def tell(self, taken: Taken, arrived: Sequence[Arrived]) -> None:
        """Say of every call where its rows are, what their sketch is, and how large their terms are."""
        results, each = taken.results.numpy(), iter(taken.held)
        sizes = results[: 4 * len(arrived)].view(np.float64)
        for number, one in enumerate(arrived):
            one.kept_keys = next(each)
            if self._values:
                one.kept_gradients = next(each)
            at, end = self._at[number : number + 2]
            one.sketch = results[at:end].reshape(5, -1)
            one.sizes = float(sizes[2 * number]), float(sizes[2 * number + 1])


class Sketching:
    """Multiplies the gradients of the same parameters with the probe's columns."""

    def __init__(self, targets: Sequence[Target], swift: Swift) -> None:
        self.targets, self._swift = targets, swift
        self._jobs: list[int] = []
        sizes = []
        for target in targets:
            parameter = target.parameter.detach()
            if target.projection is None:
                self._jobs += copying(parameter)
                sizes.append(parameter.numel())
            else:
                self._jobs += projecting(parameter, target.columns(torch.float32, torch.device("cpu")))
                sizes.append(4 * len(parameter))
        self._at = np.cumsum([0, *sizes]).tolist()

    def sketch(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sketches of all gradients, one after the other."""
        results = torch.empty(self._at[-1], dtype=torch.float32)
        start, jobs = results.data_ptr(), self._jobs
        for number, gradient in enumerate(gradients):
            at = number * FIELDS
            jobs[at + MATRIX], jobs[at + RESULT] = gradient.data_ptr(), start + 4 * self._at[number]
        self._swift.run(jobs)
        return results

    def tell(self, results: Tensor) -> list[Sketch]:
        """The sketch of every gradient."""
        flat = results.numpy()
        return [flat[at:end] for at, end in zip(self._at, self._at[1:], strict=False)]


def compare(
    pairs: Sequence[tuple[Target, Float32[np.ndarray, "_"], Float32[np.ndarray, "_ _"]]], swift: Swift
) -> Float64[np.ndarray, "pairs 3"]:
    """‖G‖², G·S and ‖S‖² for the sketches of gradients and what the events behind each put into it."""
    sums = np.empty((len(pairs), 3))
    start = sums.ctypes.data
    jobs: list[int] = []
    for number, (target, sketch, events) in enumerate(pairs):
        of_bias, rows = target.projection is None, events.shape[1]
        jobs += comparing(rows, of_bias, sketch.ctypes.data, events.ctypes.data, start + 24 * number)
    swift.run(jobs)
    return sums
