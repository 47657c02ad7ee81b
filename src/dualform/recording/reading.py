"""What is read of a step just before it is made: settings, and the sketch of every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dualform.optimizers import Settings
from dualform.recording.backward import Backward
from dualform.recording.probe import Fit
from dualform.recording.routine import Sketched, Sketching
from dualform.recording.targets import Pass, Sketch, Target


class Reading(NamedTuple):
    """One parameter just before its step; no settings and no sketch where it had no gradient, or nothing happens."""

    target: Target
    passes: list[Pass]
    settings: Settings | None = None
    sketch: Sketch | None = None
    unscale: float = 1.0
    half: bool = False


class Seen(NamedTuple):
    """What the steps of one optimiser treat, as long as nothing of it changes.

    `pairs` are its recorded parameters with their settings where they have a gradient, `routine` sketches these.
    """

    owned: Sequence[tuple[Target, Mapping[str, Any]]]
    settings: Sequence[Settings]
    pairs: Sequence[tuple[Target, Settings | None]]
    routine: Sketching | None

    @property
    def moving(self) -> list[Target]:
        """The parameters that have a gradient."""
        return [target for target, settings in self.pairs if settings is not None]


@dataclass(slots=True)
class Step:
    """One step of one optimiser, until it is judged.

    `seen` are the parameters it treats, with their settings where they have a gradient; `sketches` gives the sketches
    of these gradients, and `backwards` are the backward passes since the step before. `readings` are made of them when
    they are needed; `fits` then say what the gradients are made of.
    """

    optimizer: int
    seen: Sequence[tuple[Target, Settings | None]]
    sketches: Sketched | Callable[[], list[Sketch]]
    backwards: Sequence[Backward] = ()
    unscale: float = 1.0
    number: int = 0
    others: Mapping[str, Tensor] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    fits: dict[Target, Fit] | None = None
    gradients: dict[Target, Sketch] = field(default_factory=dict)


def scaling(optimizer: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether a fused optimiser with a loss scaler does nothing in this step, and what it multiplies gradients with."""
    # A scaler sets these on the optimiser itself; to ask for attributes that are not there takes longer.
    found_inf, grad_scale = optimizer.get("found_inf"), optimizer.get("grad_scale")
    skipped = found_inf is not None and bool(found_inf)
    return skipped, 1.0 if grad_scale is None else 1.0 / float(grad_scale)


def sketched_by_torch(targets: Sequence[Target], gradients: Sequence[Tensor]) -> Callable[[], list[Sketch]]:
    """The same as a routine makes of the gradients of these parameters, without the loops."""
    for target in targets:
        target.check_shape()
    sketches = [target.quick_sketch(one) for target, one in zip(targets, gradients, strict=True)]
    return lambda: sketches
