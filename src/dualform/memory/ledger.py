"""The ledger: which keys of a weight are stored already, so that a repeated key is stored once.

The input layer sees the same key for the same example in every epoch. Keys that depend on no trained parameter are
compared with the last one stored for their example and position, by a 128-bit hash of their bytes.
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
from dualform.memory.files import tensor_bytes

SLOTS = 1 << 22  # pairs of example and position that a ledger keeps: 100 MB
MANY = 1 << 22  # bytes of keys from which on a compiled loop pays, which leaves the interpreter to the training
SHORTEST = 256  # bytes that are hashed of every key: of 240 or less XXH3 is another function
TRIES = 1000  # comparisons without a single match after which a weight's keys are not compared any more

Numbers = Int64[np.ndarray, "_"]
Stored = tuple[Tensor, Numbers, Numbers, Numbers]
"""Keys that are stored, and of each the example, the position and the number."""


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
        self._hashed = 0
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
        self, keys: Sequence[Tensor], examples: Numbers, positions: Numbers
    ) -> tuple[Bool[np.ndarray, "_"], Numbers]:
        """Which of these keys are new, and the number under which each is stored."""
        self._recall()
        self._dtype = self._dtype or keys[0].dtype
        slots = self._slots(examples, positions)
        if self.hopeless or any(part.dtype != self._dtype for part in keys) or not (slots >= 0).any():
            return np.ones(len(examples), dtype=bool), self.append(len(examples))
        hashes = np.concatenate([self._hashes(part) for part in keys])
        known = (slots >= 0) & (self._number[slots] >= 0)
        before = self._hash[slots]
        same = known & (before[:, 0] == hashes[:, 0]) & (before[:, 1] == hashes[:, 1])
        first = _first_of_equals(hashes, slots, len(self._number))  # an example may come twice
        new = ~same & (first == np.arange(len(slots)))
        numbers = np.where(same, self._number[slots], self.stored + np.cumsum(new) - 1)[first]
        self.stored += int(new.sum())
        self._remember(slots[new], hashes[new], numbers[new])
        self._tries += int(known.sum())
        self._matches += int(same.sum())
        return new, numbers

    def _hashes(self, keys: Tensor) -> np.ndarray:
        """128 bits of every key: XXH3 of its bytes, and zeros where they are few."""
        if not len(keys):
            return np.zeros((0, 2), dtype=np.uint64)
        rows = np.frombuffer(tensor_bytes(keys), dtype=np.uint8).reshape(len(keys), -1)
        if rows.shape[1] < SHORTEST:
            rows = np.pad(rows, ((0, 0), (0, SHORTEST - rows.shape[1])))
        self._hashed += rows.nbytes
        if not self._tried and self._hashed >= MANY:
            self._tried, self._loops = True, load("dualform.memory.xxh3")
        if self._loops is None:
            digests = b"".join(xxhash.xxh3_128_digest(row.data) for row in rows)
            return np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2)
        result = np.empty((len(keys), 2), dtype=np.uint64)
        self._loops.hash_rows(rows.ctypes.data, rows.shape[1], result)
        return result

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


def _first_of_equals(hashes: np.ndarray, slots: Numbers, most: int) -> Numbers:
    """For each key the first one with the same slot and hash, of at most so many; itself where it has no slot."""
    each = np.arange(len(slots))
    last = np.empty(most, dtype=np.int64)  # only what is written is read
    last[slots] = each
    if ((last[slots] == each) | (slots < 0)).all():
        return each
    own = np.where(slots >= 0, slots, -1 - each)
    order = np.lexsort((hashes[:, 1], hashes[:, 0], own))
    columns = (own[order], hashes[order, 0], hashes[order, 1])
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    grown = np.full((size, *array.shape[1:]), fill, dtype=array.dtype)
    grown[: len(array)] = array
    return grown
