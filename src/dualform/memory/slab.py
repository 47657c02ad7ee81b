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


class Slab:
    """Cuts arrays one after the other from large pieces of memory; a piece is given back when its last array is."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of any content."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if self._used + size > len(self._memory):
            self._memory, self._used = pages(max(SLAB, size)), 0
        start, self._used = self._used, self._used + -(-size // LINE) * LINE
        part: np.ndarray = self._memory[start : start + size].view(kind).reshape(shape)
        return part

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array


def pages(size: int) -> np.ndarray:
    """Memory straight from the system; a forked child has its own."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
