"""Keys at hand: those of the largest norms, and those that were read lately."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor

from dualform.memory import StoredMemory

LEAST = 256  # keys
SHARE = 8  # of the room, more than which is not worth to be held for one question
Arrays = tuple[Float32[np.ndarray, "some dim_in"], Int32[np.ndarray, " keys"]]
Keys = tuple[Float[Tensor, "some dim_in"], Int64[Tensor, " keys"], Float64[Tensor, " some"]]


class HotKeys:
    """The keys of a weight by their numbers; some stay at hand for good, others as long as there is room.

    `norms` are not below those of the keys; `room` are the bytes that all this may take.
    """

    def __init__(self, memory: StoredMemory, weight: int, norms: Float32[Tensor, " keys"], room: int) -> None:
        self._owner, self._weight = weakref.ref(memory), weight
        self._width = memory.manifest.weights[weight].dim_in
        self._room = max(room // (4 * self._width + 16), LEAST)
        self._all_norms = norms
        self._lock = threading.Lock()
        self._slots = torch.full((len(norms),), -1, dtype=torch.int32)
        self._keys = torch.empty(0, self._width)
        self._arrays = _arrays(self._keys, self._slots)
        self._norms = torch.empty(0, dtype=torch.float64)
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._fixed = self._filled = 0
        self.complete = True  # whether all that was to stay at hand does

    def fix(self, numbers: Int64[Tensor, " keys"], keys: Float[Tensor, "keys dim_in"]) -> None:
        """Keep some keys at hand for good, as far as half of the room goes."""
        some = max(min(len(numbers), self._room // 2 - self._fixed), 0)
        if some and (self._filled == 0 or keys.dtype == self._keys.dtype):
            self._hold(numbers[:some], keys[:some])
            self._fixed = self._filled
        else:
            some = 0
        self.complete &= some == len(numbers)

    def at_hand(self) -> Arrays:
        """The keys that are at hand, and by a key's number where among them it is; −1, or beyond them, where it is not.

        They stay what they are as long as they are held. Keys that are not in fp32 are none here.
        """
        with self._lock:
            return self._arrays[0][: self._filled], self._arrays[1]

    def get(self, numbers: Int64[Tensor, " keys"]) -> Keys | None:
        """Keys, where among them each number is, and their norms; None where too many are not at hand to be held."""
        asked = numbers.numpy()
        with self._lock:
            # Mostly all are at hand; of some dozen numpy tells that in a fraction of torch's time.
            slots = self._arrays[1][asked]
            if len(slots) and slots.min() >= 0:
                return self._keys, torch.from_numpy(slots.astype(np.int64)), self._norms
            missing = numbers[self._slots[numbers] < 0].unique()
            if len(missing) > max(self._room // SHARE, LEAST):
                return None
            if self._filled + len(missing) > self._room:
                self._clear()
                missing = numbers[self._slots[numbers] < 0].unique()
                if self._filled + len(missing) > self._room:
                    return None
            if len(missing):
                memory = self._owner()
                assert memory is not None
                self._hold(missing, memory.keys(self._weight, missing))
            return self._keys, self._slots[numbers].long(), self._norms

    def _hold(self, numbers: Int64[Tensor, " keys"], keys: Float[Tensor, "keys dim_in"]) -> None:
        dtype = keys.dtype if self._filled == 0 else torch.promote_types(keys.dtype, self._keys.dtype)
        if len(self._keys) == 0 or dtype != self._keys.dtype:
            self._renew(self._filled, dtype)
        at = slice(self._filled, self._filled + len(keys))
        self._keys[at], self._numbers[at] = keys, numbers
        self._norms[at] = self._all_norms[numbers].double()
        self._slots[numbers] = torch.arange(at.start, at.stop, dtype=torch.int32)
        self._filled = at.stop

    def _clear(self) -> None:
        """Let go of all but what stays for good."""
        gone = self._numbers[self._fixed : self._filled]
        self._renew(self._fixed, self._keys.dtype)
        self._slots[gone] = -1

    def _renew(self, filled: int, dtype: torch.dtype) -> None:
        """The first keys in other memory: other threads may still be reading what was handed out."""
        old = self._keys, self._norms, self._numbers
        self._slots = self._slots.clone()
        self._keys = torch.empty(self._room, self._width, dtype=dtype)
        self._norms = torch.empty(self._room, dtype=torch.float64)
        self._numbers = torch.empty(self._room, dtype=torch.int64)
        for new, before in zip((self._keys, self._norms, self._numbers), old, strict=True):
            new[:filled] = before[:filled]
        self._arrays = _arrays(self._keys, self._slots)
        self._filled = filled


def _arrays(keys: Tensor, slots: Tensor) -> Arrays:
    """Keys in fp32 and slots as the compiled loops read them."""
    return (keys if keys.dtype == torch.float32 else torch.empty(0, keys.shape[1])).numpy(), slots.numpy()
