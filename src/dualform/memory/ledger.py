"""The ledger: which keys of a weight are stored already, so that a repeated key is stored once.

The input layer sees the same key for the same example in every epoch. Keys that depend on no trained parameter are
compared, one after the other, with the last one stored for their example and position, by a 128-bit hash of their
bytes. How many of them are entered at once makes no difference, but for when comparing is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.fast import load
from dualform.memory.entering import enter_rows
from dualform.memory.files import tensor_bytes

SLOTS = 1 << 22  # pairs of example and position that a ledger keeps: 100 MB
MANY = 1 << 22  # bytes of keys from which on a compiled loop pays, which leaves the interpreter to the training
SHORTEST = 256  # bytes that are hashed of every key: of 240 or less XXH3 is another function
TRIES = 1000  # comparisons without a single match after which a weight's keys are not compared any more

Numbers = Int64[np.ndarray, "_"]
Stored = tuple[Tensor, Numbers, Numbers, Numbers]
"""Keys that are stored, and of each the example, the position and the number."""


def is_hashed(width: int, dtype: torch.dtype) -> bool:
    """Whether the recorder's loops hash keys of this kind while they copy them."""
    return dtype is torch.float32 and 4 * width >= SHORTEST


class Ledger:
    """Numbers the stored keys of one weight."""

    def __init__(self, stored: int = 0, earlier: Callable[[], Iterator[Stored]] | None = None) -> None:
        self.stored = stored
        self._earlier = earlier
        self._dtype: torch.dtype | None = None
        self._positions = 1
        self._number = np.full(1, -1, dtype=np.int64)
        self._hash = np.zeros((1, 2), dtype=np.uint64)
        self._tries, self._matches = 0, 0
        self._seen = 0
        self._loops: ModuleType | None = None
        self._tried = False

    @property
    def hopeless(self) -> bool:
        """Whether so many keys were new that comparing them does not pay."""
        return self._tries >= TRIES and not self._matches

    def append(self, keys: int) -> Numbers:
        """Keys that are stored whatever they are; the number of each."""
        self.stored += keys
        return np.arange(self.stored - keys, self.stored)

    def enter(
        self,
        keys: Sequence[Tensor],
        examples: Numbers,
        positions: Numbers,
        hashes: Sequence[Int64[Tensor, "_ 2"] | None] = (),
    ) -> tuple[Bool[np.ndarray, "_"], Numbers]:
        """Which of these keys are new, and the number under which each is stored; `hashes` are those known already."""
        self._recall()
        self._dtype = self._dtype or keys[0].dtype
        slots = self._slots(examples, positions)
        if self.hopeless or any(part.dtype != self._dtype for part in keys) or slots.max(initial=-1) < 0:
            return np.ones(len(examples), dtype=bool), self.append(len(examples))
        numbers, at = np.empty(len(slots), dtype=np.int64), 0
        for part, known in zip(keys, hashes or [None] * len(keys), strict=True):
            own, end = self._hashes(part, known), at + len(part)
            loop = enter_rows if self._loops is None else self._loops.enter_rows
            found = loop(slots[at:end], own, self._number, self._hash, self.stored, numbers[at:end])
            self.stored, tries, matches = found
            self._tries += tries
            self._matches += matches
            at = end
        new = numbers >= 0
        return new, np.where(new, numbers, -1 - numbers)

    def _hashes(self, keys: Tensor, known: Int64[Tensor, "_ 2"] | None = None) -> np.ndarray:
        """128 bits of every key: XXH3 of its bytes, and zeros where they are few."""
        if known is not None:
            self._done(keys.nbytes)
            return known.numpy().view(np.uint64)
        if not len(keys):
            return np.zeros((0, 2), dtype=np.uint64)
        rows = np.frombuffer(tensor_bytes(keys), dtype=np.uint8).reshape(len(keys), -1)
        if rows.shape[1] < SHORTEST:
            rows = np.pad(rows, ((0, 0), (0, SHORTEST - rows.shape[1])))
        self._done(rows.nbytes)
        if self._loops is None:
            digests = b"".join(xxhash.xxh3_128_digest(row.data) for row in rows)
            return np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2)
        result = np.empty((len(keys), 2), dtype=np.uint64)
        self._loops.hash_rows(rows.ctypes.data, rows.shape[1], len(rows), result.ctypes.data)
        return result

    def _done(self, size: int) -> None:
        """Note that so many bytes of keys were looked at."""
        self._seen += size
        if not self._tried and self._seen >= MANY:
            self._tried, self._loops = True, load("dualform.memory.xxh3")

    def _recall(self) -> None:
        """Enter what a resumed run stored before it was interrupted."""
        if self._earlier is not None:
            earlier, self._earlier = self._earlier(), None
            for keys, examples, positions, numbers in earlier:
                self._dtype = self._dtype or keys.dtype
                if keys.dtype == self._dtype:
                    self._remember(self._slots(examples, positions), self._hashes(keys), numbers)

    def _remember(self, slots: Numbers, hashes: np.ndarray, numbers: Numbers) -> None:
        kept = slots >= 0
        self._number[slots[kept]] = numbers[kept]
        self._hash[slots[kept]] = hashes[kept]

    def _slots(self, examples: Numbers, positions: Numbers) -> Numbers:
        """Where example and position are looked up; −1 for an event without an example, or beyond what is kept."""
        width = int(positions.max(initial=0)) + 1
        if width > self._positions and width * len(self._number) // self._positions <= SLOTS:
            self._widen(width)
        fits = (examples >= 0) & (examples < SLOTS) & (positions < self._positions)
        slots = np.where(fits, examples * self._positions + positions, -1)
        slots[slots >= SLOTS] = -1
        examples_needed = int(slots.max(initial=0)) // self._positions + 1
        if examples_needed * self._positions > len(self._number):
            size = max(2 * len(self._number) // self._positions, examples_needed) * self._positions
            self._number = _grown(self._number, size, -1)
            self._hash = _grown(self._hash, size, 0)
        return slots

    def _widen(self, positions: int) -> None:
        """Make room for more positions of every example."""
        extra = positions - self._positions
        number = self._number.reshape(-1, self._positions)
        hashes = self._hash.reshape(-1, self._positions, 2)
        self._number = np.pad(number, ((0, 0), (0, extra)), constant_values=-1).reshape(-1)
        self._hash = np.pad(hashes, ((0, 0), (0, extra), (0, 0))).reshape(-1, 2)
        self._positions = positions


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    grown = np.full((size, *array.shape[1:]), fill, dtype=array.dtype)
    grown[: len(array)] = array
    return grown
