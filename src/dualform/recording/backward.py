"""What the hooks gather of one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.ids import Batch
from dualform.recording.routine import Taken, Taking
from dualform.recording.targets import Arrived, Target, Use


class Known(NamedTuple):
    """What is known of one call of a module; `fixed`: its input depends on no trained parameter."""

    order: int
    use: Use
    shape: torch.Size
    fixed: bool
    batch: Batch | None


known: Callable[[tuple[int, Use, torch.Size, bool, Batch | None]], Known] = partial(tuple.__new__, Known)
"""The same as Known(…) of what is in a tuple, without the interpreter's help."""
Forward = tuple[Known, Tensor, int]
"""A call, its input by reference, and the version of that."""


class Copied(NamedTuple):
    """What a routine copied; `needed` are gradients that are not kept, but needed once more."""

    routine: Taking
    taken: Taken
    calls: list[Known]
    needed: list[Tensor]


@dataclass
class Backward:
    """What arrived in one backward pass so far, and which parameters have taken it up.

    `waiting` are calls and their gradients as they came, still to be copied; `copied` is still to be made rows of.
    `fresh` are the parameters without a gradient before it, `accumulated` are those that took one from it.
    """

    fresh: list[Target]
    waiting: list[tuple[Forward, Tensor]] = field(default_factory=list)
    bytes: int = 0
    copied: list[Copied] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    accumulated: list[Tensor] = field(default_factory=list)
    settled: set[Target] = field(default_factory=set)
    number: int | None = None
