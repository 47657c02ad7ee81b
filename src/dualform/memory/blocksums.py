"""What every block of an arena adds to the checksums of a file, taken while the block was in the cache anyway."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualform.memory.slab import pages

BLOCK = 1024  # bytes that XXH3 mixes at once
SUMS = 64  # bytes of its sums for a block


class BlockSums:
    """The sums of some blocks of an arena, and of which.

    Compiled loops read and write them (see xxh3.py) by `table`: where the arena, the sums and the marks begin.
    """

    def __init__(self, address: int, size: int) -> None:
        blocks = size // BLOCK
        self._address, self._size = address, size
        self._sums, self._known = pages(SUMS * blocks), np.zeros(blocks, dtype=np.uint8)
        places = address, self._sums.ctypes.data, self._known.ctypes.data
        self._table = np.array(places, dtype=np.int64)
        self.table: int = self._table.ctypes.data

    def reset(self) -> None:
        """Begin anew: other rows come to lie in the arena."""
        self._known.fill(0)

    @property
    def any(self) -> bool:
        """Whether there is any block of which the sums are known."""
        return bool(self._known.any())

    def pieces(self, views: Sequence[memoryview]) -> np.ndarray:
        """Address and length of these bytes, and the address of the table for those that lie in the arena."""
        found = []
        for view in views:
            address = np.frombuffer(view, dtype=np.uint8).ctypes.data
            inside = self._address <= address and address + len(view) <= self._address + self._size
            found.append((address, len(view), self.table if inside else 0))
        return np.array(found, dtype=np.int64)
