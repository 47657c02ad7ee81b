"""Which example each row of a layer's input is."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dualform.errors import BadIds

NO_EXAMPLE = -1


@dataclass
class Batch:
    """The ids of the batch at work, and the shapes of the inputs that layers saw meanwhile."""

    ids: Int64[Tensor, "..."]
    dim: int
    shapes: dict[torch.Size, Any] = field(default_factory=dict)
    fits: dict[tuple[int, ...], tuple[Tensor, Tensor] | None] = field(default_factory=dict)

    def fit(self, leading: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """The example and the position of every event of an input with these leading dimensions, if the ids fit."""
        if leading not in self.fits:
            self.fits[leading] = fit_ids(self, leading)
        return self.fits[leading]


def read_ids(ids: Any, examples: int | None) -> Int64[Tensor, "..."]:
    """Ids as the user gives them, checked: whole numbers from 0 to the end of the examples table."""
    try:
        tensor = ids if isinstance(ids, Tensor) else torch.as_tensor(np.asarray(ids))
    except (TypeError, ValueError, RuntimeError):
        raise BadIds(f"ids must be whole numbers, one for each example of the batch, not {ids!r}.") from None
    if tensor.numel() == 0:
        return torch.zeros(tensor.shape, dtype=torch.int64)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise BadIds(f"ids must be whole numbers (int64); these are {tensor.dtype}. Convert them with .long().")
    tensor = tensor.detach().to("cpu", torch.int64, copy=True)
    low, high = int(tensor.numpy().min()), int(tensor.numpy().max())
    if low < 0:
        raise BadIds(f"ids must be 0 or larger; the smallest of these is {low}.")
    if examples is not None and high >= examples:
        raise BadIds(
            f"example id {high} is outside the examples table, which has {examples:,} entries "
            f"(ids 0 to {examples - 1:,}). Give every column an entry for every id."
        )
    return tensor


@functools.lru_cache(maxsize=8)
def _nowhere(events: int) -> Int64[Tensor, " events"]:
    """Position 0 for every event; shared, since nobody writes to it."""
    return torch.zeros(events, dtype=torch.int64)


def fit_ids(batch: Batch, leading: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """The example and the position of every event of an input with these leading dimensions.

    The first that fits: ids.shape == leading; ids.numel() == prod(leading); one id for each index of
    dimension `dim`, spread over the other dimensions, which make the position. None where nothing fits.
    """
    events = math.prod(leading)
    ids, dim = batch.ids, batch.dim
    if ids.numel() == events:
        return ids.reshape(-1), _nowhere(events)
    if ids.ndim != 1 or len(leading) <= dim or len(ids) != leading[dim]:
        return None
    rest = [size for at, size in enumerate(leading) if at != dim]
    positions = torch.arange(int(np.prod(rest))).reshape(rest).unsqueeze(dim).expand(leading)
    shape = [1] * len(leading)
    shape[dim] = len(ids)
    return ids.reshape(shape).expand(leading).reshape(-1), positions.reshape(-1)
