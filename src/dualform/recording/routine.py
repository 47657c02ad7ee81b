"""What is the same at every step of a training: tables of jobs in which only addresses are left to fill in.

Between two large products the interpreter's own code has left the cache, and every line is slow. So little is done
while the training waits; what the results mean is worked out later, for many steps at once.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from dualform.memory.arena import Arena, Room, Shape, held
from dualform.memory.ledger import is_hashed
from dualform.memory.slab import pages
from dualform.recording.calls import Forward, Known
from dualform.recording.ids import Batch, Numbers
from dualform.recording.jobs import (
    CHECKED,
    FIELDS,
    GRADIENTS,
    GRADIENTS_TO,
    HASHES_TO,
    HEAD,
    KEYS_TO,
    MATRIX,
    RESULT,
    ROOM,
    ROWS,
    SUMS,
    copying,
    projecting,
    readable,
    room_of,
    taking,
)
from dualform.recording.swift import Swift
from dualform.recording.targets import Arrived, Sketch, Target

Rows = tuple[Tensor, Tensor]
"""The keys and the gradients of one call, a row an event."""
Waiting = Sequence[tuple[Forward, Tensor]]
"""Calls and their gradients as they came."""
AT_A_TIME = 64  # steps that are looked at together
RING = 16 << 20  # bytes that their results may take
T = TypeVar("T")

# What tensors are like, asked for at once.
_input_like = attrgetter("_version", "shape", "requires_grad", "dtype")
_gradient_like = attrgetter("shape", "dtype", "is_cpu")


class Ring:
    """Room for the results of some steps, one below the other, so that they can be looked at together."""

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers
        self.rows = max(min(AT_A_TIME, RING // (4 * numbers + 1)), 1)
        self._made: list[np.ndarray] = []
        self.begin()

    def begin(self) -> None:
        """Begin anew, elsewhere: what is there is kept as long as somebody looks at it."""
        self._next = self.rows

    def next(self) -> tuple[Float32[np.ndarray, "steps numbers"], int, int]:
        """Results, the next row of them, and its address."""
        row = self._next
        if row >= self.rows:
            self.results, row = self._unused(), 0
            self._address = self.results.ctypes.data
        self._next = row + 1
        return self.results, row, self._address + 4 * self._numbers * row

    def _unused(self) -> Float32[np.ndarray, "steps numbers"]:
        """Room at which nobody looks any more."""
        self.results = np.empty((0, self._numbers), dtype=np.float32)
        for made in self._made:
            if sys.getrefcount(made) <= _unused_count():
                break
        else:
            made = pages(4 * self.rows * self._numbers, at_once=False)
            self._made = [*self._made[-3:], made]
        # Every view of these results, and every view of such a view, holds on to `made` itself.
        return made.view(np.float32).reshape(self.rows, self._numbers)


@functools.cache
def _unused_count() -> int:
    """The references to memory that nobody looks at, counted as `Ring` counts them: versions of Python differ."""
    every = [pages(1)]
    for made in every:
        count = sys.getrefcount(made)
    return count


class Sketched(NamedTuple):
    """What a routine made of the gradients of one step."""

    routine: Sketching
    results: Float32[np.ndarray, "steps numbers"]
    row: int

    def __call__(self) -> list[Sketch]:
        """The sketch of every gradient."""
        flat, at = self.results[self.row], self.routine.at
        return [flat[start:end] for start, end in itertools.pairwise(at)]


class Copied(NamedTuple):
    """What a routine made of one backward pass: where its rows are, and the sketches and sizes of all calls.

    `orders` are the order and the batch of every call, `needed` gradients that are not kept, but needed once more.
    """

    routine: Taking
    room: Room
    results: Float32[np.ndarray, "steps numbers"]
    row: int
    orders: list[tuple[int, Batch | None]]
    needed: list[Tensor]

    @property
    def calls(self) -> list[Known]:
        """What is known of every call: all but order and batch is what the routine is for."""
        return [self.call(at) for at in range(len(self.orders))]

    def call(self, at: int) -> Known:
        """What is known of one of them."""
        order, batch = self.orders[at]
        return Known(order, *self.routine.inputs[at], batch)


class Taking:
    """Copies and sketches the rows of backward passes of one kind: the same calls, with inputs of the same shapes."""

    def __init__(self, waiting: Waiting, rows: Sequence[Rows], values: bool, swift: Swift) -> None:
        self.values = values
        self.inputs = [(call.use, call.shape, call.fixed) for call in (Known.of(forward) for forward, _ in waiting)]
        self.fitting: tuple[int, tuple[int, ...]] | None = None  # what ids looked like that fit them
        self._shapes = [(keys.shape, gradients.shape) for keys, gradients in rows]
        # Whether inputs and gradients are the rows as they lie, and no tensors have to be made of them.
        self._direct = all(
            keys.data_ptr() == forward[2].data_ptr() and gradients.data_ptr() == gradient.data_ptr()
            for (keys, gradients), (forward, gradient) in zip(rows, waiting, strict=True)
        )
        self._expected = [(*known, gradient.shape) for known, (_, gradient) in zip(self.inputs, waiting, strict=True)]
        self._wanted: list[tuple[str, Shape]] = []
        self._hashed: list[bool] = []
        jobs: list[int] = []
        changing: list[int] = []  # in a table of these jobs: where the address of each goes that is wanted
        room = 0
        for (use, _, fixed), (keys, gradients) in zip(self.inputs, rows, strict=True):
            columns = use.weight.columns(torch.float32, torch.device("cpu"))
            (events, width), outputs = keys.shape, gradients.shape[1]
            job = taking(events, width, outputs, columns)
            job[ROOM] = 8 * room
            room += room_of(job)
            self._wanted.append((use.streams[0], Shape(events, width, torch.float32)))
            changing.append(HEAD + len(jobs) + KEYS_TO)
            if values:
                self._wanted.append((use.streams[1], Shape(events, outputs, torch.float32)))
                changing.append(HEAD + len(jobs) + GRADIENTS_TO)
            # Keys that may come again will be looked up by their hashes: now they are in the cache.
            self._hashed.append(fixed and is_hashed(width, torch.float32))
            if self._hashed[-1]:
                self._wanted.append((use.streams[2], Shape(events, 2, torch.int64)))
                changing.append(HEAD + len(jobs) + HASHES_TO)
            jobs += job
        self._room = torch.empty(room, dtype=torch.float64)
        for at in range(0, len(jobs), FIELDS):
            jobs[at + ROOM] += self._room.data_ptr()
        calls = range(HEAD, HEAD + len(jobs), FIELDS)
        found = [at + field for at in calls for field in (MATRIX, GRADIENTS)]
        results = [at + field for at in calls for field in (CHECKED, RESULT, SUMS)]
        self._jobs = swift.table(jobs, [*changing, *found, *results])
        # Of every call two sizes in fp64, then of every call its sketch.
        self.at: list[int] = np.cumsum([4 * len(rows), *(5 * shape[1] for _, shape in self._shapes)]).tolist()
        self.ring = Ring(self.at[-1])

    def each(self, of_streams: Iterable[T]) -> Iterator[tuple[T, T | None, T | None]]:
        """Of what there is for every stream: that for keys, gradients and hashes of each call, where it has them."""
        streams = iter(of_streams)
        for hashed in self._hashed:
            yield next(streams), next(streams) if self.values else None, next(streams) if hashed else None

    @staticmethod
    def possible(rows: Sequence[Rows]) -> bool:
        """Whether the loops can read all of these rows."""
        alike = all(0 < len(keys) <= ROWS and len(keys) == len(gradients) for keys, gradients in rows)
        return alike and readable(itertools.chain.from_iterable(rows))

    def take(self, waiting: Waiting, arena: Arena) -> Copied | None:
        """Copy and sketch what has arrived as it lies; None where it is not what the routine is for, or has no room."""
        if not self._direct or len(waiting) != len(self._expected):
            return None
        orders: list[tuple[int, Batch | None]] = []
        found: list[int] = []
        try:
            for ((order, use, stored, version, batch), gradient), (of, shape, fixed, of_gradient) in zip(
                waiting, self._expected, strict=True
            ):
                if (
                    use is not of
                    or _input_like(stored) != (version, shape, not fixed, torch.float32)
                    or _gradient_like(gradient) != (of_gradient, torch.float32, True)  # and so is the input
                    or not (stored.is_contiguous() and gradient.is_contiguous())
                    or (stored.is_neg() or gradient.is_neg())
                ):
                    return None
                rows_at, gradients_at = stored.data_ptr(), gradient.data_ptr()
                if rows_at == 4 * stored.storage_offset() or gradients_at == 4 * gradient.storage_offset():
                    return None  # their memory was given back
                found += rows_at, gradients_at
                orders.append((order, batch))
        except RuntimeError:  # a tensor that does not lie in memory: sparse, or inside a vmap
            return None
        return self._run(waiting, orders, found, arena)

    def matches(self, waiting: Waiting, rows: Sequence[Rows]) -> bool:
        """Whether the routine is for rows like these."""
        shapes = [(keys.shape, gradients.shape) for keys, gradients in rows]
        calls = (Known.of(forward) for forward, _ in waiting)
        return shapes == self._shapes and [(call.use, call.shape, call.fixed) for call in calls] == self.inputs

    def take_rows(self, waiting: Waiting, rows: Sequence[Rows], arena: Arena) -> Copied | None:
        """The same of rows that were made of what has arrived, and which it is for."""
        found = [matrix.data_ptr() for pair in rows for matrix in pair]
        return self._run(waiting, [(forward[0], forward[4]) for forward, _ in waiting], found, arena)

    def fits(self, batch: Batch) -> bool:
        """Whether the ids of a batch fit the last of the inputs, which is remembered."""
        use, shape, _ = self.inputs[-1]
        if batch.fit(use.kind.leading(shape)) is None:
            return False
        self.fitting = batch.dim, batch.shape
        return True

    def _run(
        self, waiting: Waiting, orders: list[tuple[int, Batch | None]], found: list[int], arena: Arena
    ) -> Copied | None:
        """Copy and sketch the rows that are at these addresses."""
        room = arena.reserve(self._wanted)
        if room is None:
            return None
        results, row, start = self.ring.next()
        values = [address + first * width for (_, _, address, width, _, _), first in zip(*room, strict=True)]
        values += found
        sums, table = start, arena.sums.table
        for result in self.at[:-1]:
            values += table, start + 4 * result, sums
            sums += 16
        finite = self._jobs.run(values)
        # Gradients that are not kept are needed once more only to count the events that are not finite.
        needed = [] if finite or self.values else [use.kind.gradients(g) for (_, use, *_), g in waiting]
        return copied((self, room, results, row, orders, needed))

    def arrived(self, copied: Copied, numbers: Callable[[Known], Numbers]) -> list[Arrived]:
        """The rows of every call: where they are, what their sketch is, and how large their terms are."""
        results = copied.results[copied.row]
        sizes = results[: 4 * len(self.inputs)].view(np.float64)
        found = []
        for at, (call, (keys, kept, _)) in enumerate(zip(copied.calls, self.each(held(copied.room)), strict=True)):
            gradients = copied.needed[at] if copied.needed else kept
            examples, positions = map(torch.from_numpy, numbers(call))
            one = Arrived(call.order, call.use, keys, gradients, examples, positions, call.fixed)
            one.sketch = results[self.at[at] : self.at[at + 1]].reshape(5, -1)
            one.sizes = float(sizes[2 * at]), float(sizes[2 * at + 1])
            found.append(one)
        return found


class Sketching:
    """Multiplies the gradients of the same parameters with the probe's columns."""

    def __init__(self, targets: Sequence[Target], swift: Swift) -> None:
        jobs: list[int] = []
        sizes = []
        # The last first: what was used last is in the cache, and what is used next will be.
        for target in reversed(targets):
            parameter = target.parameter.detach()
            if target.projection is None:
                jobs += copying(parameter)
                sizes.append(parameter.numel())
            else:
                jobs += projecting(parameter, target.columns(torch.float32, torch.device("cpu")))
                sizes.append(4 * len(parameter))
        calls = range(HEAD, HEAD + len(jobs), FIELDS)
        self._jobs = swift.table(jobs, [at + field for at in calls for field in (MATRIX, RESULT)])
        self.at: list[int] = np.cumsum([0, *reversed(sizes)]).tolist()
        self.ring = Ring(self.at[-1])
        self._shapes = [(target.shape, at) for target, at in zip(reversed(targets), self.at[-2::-1], strict=True)]

    def sketch(self, gradients: Sequence[Tensor]) -> Sketched | None:
        """The sketches of all gradients, one after the other; None where the loops cannot read one of them."""
        results, row, start = self.ring.next()
        values: list[int] = []
        try:
            for gradient, (shape, result) in zip(reversed(gradients), self._shapes, strict=True):
                # The shape is another one where the parameter's `data` is.
                if (
                    _gradient_like(gradient) != (shape, torch.float32, True)
                    or not gradient.is_contiguous()
                    or gradient.is_neg()
                ):
                    return None
                values += gradient.data_ptr(), start + 4 * result
        except RuntimeError:  # a gradient that does not lie in memory as it is
            return None
        self._jobs.run(values)
        return sketched((self, results, row))


# The same as Copied(…) and Sketched(…) of what is in a tuple, without the interpreter's help.
copied: Callable[[tuple[Any, ...]], Copied] = partial(tuple.__new__, Copied)
sketched: Callable[[tuple[Any, ...]], Sketched] = partial(tuple.__new__, Sketched)
