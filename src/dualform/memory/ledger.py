"""The ledger: which keys of a weight are stored already, so that a repeated key is stored once.

The input layer sees the same key for the same example in every epoch. Keys that depend on no trained parameter are
compared with the last one stored for their example and position, by a 128-bit hash of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.memory.files import tensor_bytes

SLOTS = 1 << 22  # pairs of example and position that a ledger keeps: 100 MB
TRIES = 1000  # comparisons without a single match after which a weight's keys are not compared any more


Stored = tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]
"""Keys that are stored, and of each the example, the position and the number."""


class Ledger:
    """Numbers the stored keys of one weight."""

    def __init__(self, rows: int = 0, earlier: Callable[[], Iterator[Stored]] | None = None) -> None:
        self.rows = rows
        self._earlier = earlier
        self._dtype: torch.dtype | None = None
        self._positions = 1
        self._row = np.zeros(0, dtype=np.int64)
        self._hash = np.zeros((0, 2), dtype=np.uint64)
        self._tries, self._matches = 0, 0

    @property
    def hopeless(self) -> bool:
        """Whether so many keys were new that comparing them does not pay."""
        return self._tries >= TRIES and not self._matches

    def append(self, events: int) -> Int64[np.ndarray, " events"]:
        """Keys that are stored whatever they are; the number of each."""
        self.rows += events
        return np.arange(self.rows - events, self.rows)

    def enter(
        self, keys: Tensor, examples: Int64[np.ndarray, " events"], positions: Int64[np.ndarray, " events"]
    ) -> tuple[Bool[np.ndarray, " events"], Int64[np.ndarray, " events"]]:
        """Which of these keys are new, and the number under which each is stored."""
        if self._earlier is not None:
            earlier, self._earlier = self._earlier(), None
            for stored in earlier:
                self._remember(*stored)
        self._dtype = self._dtype or keys.dtype
        if self.hopeless or keys.dtype != self._dtype or not len(keys):
            return np.ones(len(keys), dtype=bool), self.append(len(keys))
        slots = self._slots(examples, positions)
        looked_up = slots[slots >= 0]
        if not len(looked_up):
            return np.ones(len(keys), dtype=bool), self.append(len(keys))
        return self._compare(_hashes(keys), slots)

    def _remember(self, keys: Tensor, examples: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> None:
        """Keys that a resumed run stored before it was interrupted."""
        self._dtype = self._dtype or keys.dtype
        if keys.dtype == self._dtype and len(keys):
            slots = self._slots(examples, positions)
            kept = slots >= 0
            self._row[slots[kept]] = rows[kept]
            self._hash[slots[kept]] = _hashes(keys)[kept]

    def _compare(
        self, hashes: np.ndarray, slots: np.ndarray
    ) -> tuple[Bool[np.ndarray, " events"], Int64[np.ndarray, " events"]]:
        kept = slots >= 0
        known = kept & (self._row[slots] >= 0)
        same = known & (self._hash[slots] == hashes).all(axis=1)
        new = ~same
        source = _first_of_equals(hashes, slots) if len(np.unique(slots[kept])) < int(kept.sum()) else None
        if source is not None:
            new &= source == np.arange(len(slots))  # an example twice in one batch
        rows = np.where(same, self._row[slots], self.rows + np.cumsum(new) - 1)
        if source is not None:
            rows = rows[source]
        self.rows += int(new.sum())
        entered = new & kept
        self._row[slots[entered]] = rows[entered]
        self._hash[slots[entered]] = hashes[entered]
        self._tries += int(known.sum())
        self._matches += int(same.sum())
        if self.hopeless:
            self._row, self._hash = self._row[:0], self._hash[:0]
        return new, rows

    def _slots(self, examples: np.ndarray, positions: np.ndarray) -> Int64[np.ndarray, " events"]:
        """Where example and position are looked up; −1 for an event without an example, or beyond what is kept."""
        width = int(positions.max()) + 1
        if width > self._positions and width * (len(self._row) // self._positions) <= SLOTS:
            self._widen(width)
        slots = np.where((examples >= 0) & (positions < self._positions), examples * self._positions + positions, -1)
        slots[(slots >= SLOTS) | (examples >= SLOTS)] = -1
        top = int(slots.max()) + 1
        if top > len(self._row):
            size = min(max(2 * len(self._row), top), SLOTS)
            size = max(size // self._positions * self._positions, top)
            self._row = _grown(self._row, size, -1)
            self._hash = _grown(self._hash, size, 0)
        return slots

    def _widen(self, positions: int) -> None:
        """Make room for more positions of every example."""
        examples = -(-len(self._row) // self._positions)
        row = _grown(self._row, examples * self._positions, -1).reshape(examples, self._positions)
        hashes = _grown(self._hash, examples * self._positions, 0).reshape(examples, self._positions, 2)
        extra = positions - self._positions
        self._row = np.pad(row, ((0, 0), (0, extra)), constant_values=-1).reshape(-1)
        self._hash = np.pad(hashes, ((0, 0), (0, extra), (0, 0))).reshape(-1, 2)
        self._positions = positions


def _first_of_equals(hashes: np.ndarray, slots: np.ndarray) -> Int64[np.ndarray, " events"]:
    """For each event the first one of the same slot and hash; itself where it has no slot."""
    whole = np.column_stack([hashes, np.where(slots >= 0, slots, -1 - np.arange(len(slots))).view(np.uint64)])
    _, first, inverse = np.unique(whole, axis=0, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)]


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    grown = np.full((size, *array.shape[1:]), fill, dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _hashes(keys: Tensor) -> np.ndarray:
    data = tensor_bytes(keys)
    width = len(data) // len(keys)
    digests = [xxhash.xxh3_128_digest(data[at : at + width]) for at in range(0, len(data), width)]
    return np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)
