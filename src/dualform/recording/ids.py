"""Which example each row of a layer's input is."""

from __future__ import annotations

import functools
import math
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dualform.errors import BadCall, BadIds
from dualform.memory.slab import Piece, Slab, array_in

if TYPE_CHECKING:
    from dualform.recording.capture import Capture
    from dualform.recording.targets import Use

NO_EXAMPLE = -1

Ids = tuple[Piece, tuple[int, ...]]
"""Where a copy of ids lies, and their shape."""
Numbers = tuple[Int64[np.ndarray, " events"], Int64[np.ndarray, " events"]]
"""The example and the position of every event."""


class Batch:
    """The ids of a batch: while it is entered, forward passes are of it.

    A generator as a context manager would cost more at every step.
    """

    __slots__ = ("_capture", "_fits", "_piece", "dim", "fitted", "inputs", "shape")

    def __init__(self, capture: Capture, ids: Ids, dim: int) -> None:
        self._piece, self.shape = ids
        self.dim = dim
        self.inputs: list[tuple[Use, torch.Size]] = []
        self.fitted = False  # whether it is known already that the ids fit one of the inputs
        self._capture = capture
        self._fits: dict[tuple[int, ...], Numbers | None] = {}

    @property
    def ids(self) -> Int64[np.ndarray, "..."]:
        """The ids."""
        return array_in(self._piece, self.shape, np.dtype(np.int64))

    def fit(self, leading: tuple[int, ...]) -> Numbers | None:
        """The example and the position of every event of an input with these leading dimensions, if the ids fit."""
        if leading not in self._fits:
            self._fits[leading] = fit_ids(self, leading)
        return self._fits[leading]

    def __enter__(self) -> None:
        if self._capture.batch is not None:
            self._capture.batch = None  # one that an interrupt kept from being left must not be in the way for ever
            raise BadCall("recorder.batch(…) is already open; leave it before the next batch.")
        self.fitted = False
        self._capture.batch = self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._capture.batch = None
        if self._capture.open:
            self._capture.forget_unfinished()
        inputs, self.inputs = self.inputs, []
        if not inputs or self.fitted or kind is not None or os.getpid() != self._capture.pid:
            return
        shapes = [use.kind.leading(shape) for use, shape in inputs]
        if not any(self.fit(leading) for leading in shapes):
            raise BadIds(
                f"ids of shape {list(self.shape)} fit no recorded layer: inputs have leading dimensions "
                f"{list(shapes[-1])}. Pass one id per row, one per example along dimension {self.dim}, "
                "or name the batch dimension with recorder.batch(ids, dim=…)."
            )


def read_ids(ids: Any, examples: int | None, slab: Slab, loops: ModuleType | None) -> Ids:
    """A copy of ids as the user gives them, checked: whole numbers from 0 to the end of the examples table."""
    # Numpy's code has left the cache between two steps, and takes a tenth of a millisecond for this.
    if (
        loops is not None
        and type(ids) is Tensor
        and ids.dtype is torch.int64
        and ids.is_cpu
        and ids.is_contiguous()
        and not ids.is_neg()
    ):
        count = ids.numel()
        piece = slab.piece(8 * count)
        if loops.copy_ids(ids.data_ptr(), piece[2], count) < (1 << 63 if examples is None else examples):
            return piece, ids.shape
    try:
        tensor = ids if isinstance(ids, Tensor) else torch.as_tensor(np.asarray(ids))
    except (TypeError, ValueError, RuntimeError):
        raise BadIds(f"ids must be whole numbers, one for each example of the batch, not {ids!r}.") from None
    kind, shape = tensor.dtype, tuple(tensor.shape)
    piece = slab.piece(8 * tensor.numel())
    if tensor.numel() == 0:
        return piece, shape
    if kind is not torch.int64 and (kind.is_floating_point or kind.is_complex or kind is torch.bool):
        raise BadIds(f"ids must be whole numbers (int64); these are {kind}. Convert them with .long().")
    numbers = array_in(piece, shape, np.dtype(np.int64))
    np.copyto(numbers, tensor.numpy(force=True))
    high = int(np.maximum.reduce(numbers.view(np.uint64), axis=None))  # a negative number is a large one here
    if high >= 1 << 63:
        raise BadIds(f"ids must be 0 or larger; the smallest of these is {int(numbers.min())}.")
    if examples is not None and high >= examples:
        raise BadIds(
            f"example id {high} is outside the examples table, which has {examples:,} entries "
            f"(ids 0 to {examples - 1:,}). Give every column an entry for every id."
        )
    return piece, shape


@functools.lru_cache(maxsize=8)
def nowhere(events: int) -> Int64[np.ndarray, " events"]:
    """Position 0 for every event; shared, since nobody writes to it."""
    return np.zeros(events, dtype=np.int64)


def fit_ids(batch: Batch, leading: tuple[int, ...]) -> Numbers | None:
    """The example and the position of every event of an input with these leading dimensions.

    The first that fits: ids.shape == leading; ids.numel() == prod(leading); one id for each index of
    dimension `dim`, spread over the other dimensions, which make the position. None where nothing fits.
    """
    events = math.prod(leading)
    ids, dim = batch.ids, batch.dim
    if ids.size == events:
        return ids.reshape(-1), nowhere(events)
    if ids.ndim != 1 or len(leading) <= dim or len(ids) != leading[dim]:
        return None
    rest = [size for at, size in enumerate(leading) if at != dim]
    positions = np.broadcast_to(np.expand_dims(np.arange(math.prod(rest)).reshape(rest), dim), leading)
    shape = [1] * len(leading)
    shape[dim] = len(ids)
    examples = np.broadcast_to(ids.reshape(shape), leading)
    return np.array(examples).reshape(-1), np.array(positions).reshape(-1)  # copies, which torch may take over
