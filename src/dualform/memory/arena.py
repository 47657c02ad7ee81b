"""The arena: page-aligned memory, made once, in which keys and gradients gather until they are written.

A stream is what one tensor of a segment is made of: the keys, or the gradients, of one weight. Rows that a training
step produces are copied into their stream one behind the other, and leave for the disk from there.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.memory.blocksums import BlockSums
from dualform.memory.disk import PAGE

WIPE_ON_FORK = 18 if sys.platform == "linux" else None  # MADV_WIPEONFORK, which Python has no name for


@dataclass(frozen=True)
class Shape:
    """How many rows of which width and dtype a stream has room for."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The room it takes, in whole pages."""
        return -(-self.rows * self.width * self.dtype.itemsize // PAGE) * PAGE


Plan = list[tuple[str, Tensor, int, int, int, int]]
"""The same every time some rows are wanted: stream, its rows, address, bytes of a row, rows wanted, rows at most."""
Room = tuple[Plan, list[int]]
"""Room for some rows in streams, and at which row of each it begins; the tensors are made when they are asked for."""


class Held(NamedTuple):
    """Some rows of a stream."""

    place: Tensor
    start: int
    length: int

    @property
    def rows(self) -> Tensor:
        """The rows that were copied there."""
        return self.place.narrow(0, self.start, self.length)


def held(room: Room) -> list[Held]:
    """The rows for which there is this room, stream by stream."""
    plan, starts = room
    return [Held(place, start, rows) for (_, place, _, _, rows, _), start in zip(plan, starts, strict=True)]


class Arena:
    """One buffer with a place for every stream; `pinned` for rows that come from a GPU."""

    def __init__(self, shapes: Mapping[str, Shape], pinned: bool) -> None:
        self.pinned = pinned
        whole = _pages(sum(shape.bytes for shape in shapes.values()), pinned)
        self.sums = BlockSums(whole.ctypes.data, len(whole))
        self._streams: dict[str, Tensor] = {}
        self._shapes, self._addresses = dict(shapes), dict.fromkeys(shapes, 0)
        self._wanted: Sequence[tuple[str, Shape]] = ()
        self._plan: Plan | None = []
        at = 0
        for name, shape in shapes.items():
            part = torch.from_numpy(whole[at : at + shape.rows * shape.width * shape.dtype.itemsize])
            self._streams[name] = part.view(shape.dtype).reshape(shape.rows, shape.width)
            self._addresses[name] = part.data_ptr()
            at += shape.bytes
        self.reset()

    def reset(self) -> None:
        """Begin anew: what was held is on disk."""
        self._filled = dict.fromkeys(self._streams, 0)
        self.bytes = 0
        self.sums.reset()

    def reserve(self, wanted: Sequence[tuple[str, Shape]]) -> Room | None:
        """Room for some rows at the end of each of these streams; None where any of them has none."""
        if wanted is not self._wanted:
            self._wanted, self._plan = wanted, self._planned(wanted)
        if self._plan is None:
            return None
        starts: list[int] = []
        filled, size = self._filled.copy(), 0  # a weight that is used twice has its stream twice
        for stream, _, _, width, rows, room in self._plan:
            start = filled[stream]
            if start + rows > room:
                return None
            starts.append(start)
            filled[stream] = start + rows
            size += rows * width
        self._filled = filled
        self.bytes += size
        return self._plan, starts

    def _planned(self, wanted: Sequence[tuple[str, Shape]]) -> Plan | None:
        plan = []
        for stream, shape in wanted:
            room = self._shapes.get(stream)
            if room is None or (room.width, room.dtype) != (shape.width, shape.dtype):
                return None
            width = shape.width * shape.dtype.itemsize
            plan.append((stream, self._streams[stream], self._addresses[stream], width, shape.rows, room.rows))
        return plan

    def hold(self, stream: str, rows: Tensor) -> Tensor | None:
        """Copy rows to the end of their stream; None where they do not fit there."""
        if rows.is_cuda != self.pinned:
            return None
        room = self.reserve([(stream, Shape(rows.shape[0], rows.shape[1], rows.dtype))])
        return None if room is None else held(room)[0].rows.copy_(rows, non_blocking=self.pinned)


class Staging:
    """Two arenas in turn: training fills one while the other is being written."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self.outside = 0  # bytes so far that no arena had room for
        self.arena: Arena | None = None  # the one being filled, where rows of the CPU go
        self._from_gpu = False
        self._side: torch.cuda.Stream | None = None

    @property
    def ready(self) -> bool:
        """Whether there are arenas yet."""
        return bool(self._arenas)

    @property
    def bytes(self) -> int:
        """What is held in the arena now being filled."""
        return self._arenas[0].bytes if self._arenas else 0

    def make(self, shapes: Mapping[str, Shape]) -> None:
        """Make both arenas, once it is known what a step needs."""
        self._arenas = [Arena(shapes, self._from_gpu), Arena(shapes, self._from_gpu)]
        self.arena = None if self._from_gpu else self._arenas[0]

    def hold(self, stream: str, rows: Tensor) -> Tensor:
        """A copy of rows on the CPU, in the arena if there is room."""
        if rows.is_cuda:
            self._from_gpu, self.arena = True, None
        if rows.is_cuda and self._arenas:
            return self._hold_from_gpu(stream, rows)
        held = self._arenas[0].hold(stream, rows) if self._arenas else None
        return self._hold_outside(rows) if held is None else held

    def _hold_outside(self, rows: Tensor) -> Tensor:
        self.outside += rows.nbytes
        return rows.to("cpu", copy=True).contiguous()

    def _hold_from_gpu(self, stream: str, rows: Tensor) -> Tensor:  # not run on a GPU here
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            held = self._arenas[0].hold(stream, rows)
        rows.record_stream(self._side)
        return self._hold_outside(rows) if held is None else held

    def wait(self) -> None:
        """Until every copy from a GPU has arrived."""
        if self._side is not None:
            self._side.synchronize()

    def turn(self) -> BlockSums | None:
        """Fill the other arena from now on; what it held before must be written. The sums of the one to be written."""
        if not self._arenas:
            return None
        self._arenas.reverse()
        self._arenas[0].reset()
        self.arena = None if self._from_gpu else self._arenas[0]
        return self._arenas[1].sums


def _pages(size: int, pinned: bool) -> np.ndarray:
    """Page-aligned memory, touched now and not page by page during training."""
    if pinned:  # not run on a GPU here
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
    memory = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are pinned faster for a direct write. A forked worker finds zeros here: sharing would slow us, and had
    # it no memory here at all, it would one day unmap what has taken its place.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), WIPE_ON_FORK):
        if advice is not None:
            with contextlib.suppress(OSError):
                memory.madvise(advice)
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole[::PAGE] = 0
    return whole
