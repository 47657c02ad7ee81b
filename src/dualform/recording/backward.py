"""What the hooks gather of one backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dualform.recording.calls import Forward
from dualform.recording.routine import Copied
from dualform.recording.targets import Arrived, Target


@dataclass(slots=True, eq=False)
class Backward:
    """What arrived in one backward pass so far, and which parameters have taken it up.

    `waiting` are calls and their gradients as they came, still to be copied; `copied` is still to be made rows of, and
    `outside` are the bytes of rows for which there was no arena. `fresh` says of every parameter whether it had no
    gradient before, `accumulated` are those that took one from it.
    """

    fresh: list[bool]
    waiting: list[tuple[Forward, Tensor]] = field(default_factory=list)
    bytes: int = 0
    outside: int = 0
    copied: list[Copied] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    accumulated: list[Tensor] = field(default_factory=list)
    settled: set[Target] = field(default_factory=set)
    number: int | None = None
