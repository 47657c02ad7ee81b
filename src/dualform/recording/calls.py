"""One call of a recorded module: as its hook saw it, and what is left of that once its input is copied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.ids import Batch
from dualform.recording.targets import Use

Forward = tuple[int, Use, Tensor, int, Batch | None]
"""The order of the call, the map, its input by reference, the version of that, and the batch. Made at every call."""


class Known(NamedTuple):
    """What is known of one call of a module; `fixed`: its input depends on no trained parameter."""

    order: int
    use: Use
    shape: torch.Size
    fixed: bool
    batch: Batch | None

    @classmethod
    def of(cls, forward: Forward) -> Known:
        """What is left of a call."""
        order, use, stored, _, batch = forward
        return cls(order, use, stored.shape, not stored.requires_grad, batch)
