"""Small arrays that are kept for many steps, in memory of their own.

A training frees and takes the same large blocks at every step, and has them in the caches. A small array that is put
into such a block while it is free, and stays, moves it elsewhere: after some steps all of them wander through memory.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

SLAB = 4 << 20
LINE = 64  # bytes of a line of the caches, where an array begins


Piece = tuple[np.ndarray, int, int]
"""Memory, at which byte of it a piece begins, and the address of that."""


class Slab:
    """Cuts small pieces one after the other from large memory, which is given back when the last of them is."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)
        self._address = self._used = self._size = 0

    def piece(self, size: int) -> Piece:
        """So many bytes of any content: for those who make an array of them later, if ever."""
        if self._used + size > self._size:
            self._memory, self._used = pages(max(SLAB, size)), 0
            self._address, self._size = self._memory.ctypes.data, len(self._memory)
        start, self._used = self._used, self._used + -(-size // LINE) * LINE
        return self._memory, start, self._address + start

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of any content."""
        kind = np.dtype(dtype)
        return array_in(self.piece(math.prod(shape) * kind.itemsize), shape, kind)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array


def array_in(piece: Piece, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
    """What lies there, as an array."""
    memory, start, _ = piece
    part: np.ndarray = memory[start : start + math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
    return part


def pages(size: int, at_once: bool = True) -> np.ndarray:
    """Memory straight from the system; `at_once` it is put in place where that can be asked for, otherwise on use.

    A forked child has its own.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (getattr(mmap, "MAP_POPULATE", 0) if at_once else 0)
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=flags), dtype=np.uint8)
