"""What is read of a step just before it is made: settings, and the sketch of every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.optimizers import Settings
from dualform.recording.jobs import fits
from dualform.recording.probe import Fit
from dualform.recording.swift import Swift
from dualform.recording.targets import Pass, Sketch, Target

Products = tuple[float, float, float]
"""‖G‖², G·S and ‖S‖² of the sketches of a gradient and of the events behind it."""


class Reading(NamedTuple):
    """One parameter just before its step; no settings and no sketch where it had no gradient, or nothing happens."""

    target: Target
    passes: list[Pass]
    settings: Settings | None = None
    sketch: Sketch | None = None
    unscale: float = 1.0
    half: bool = False
    products: Products | None = None


@dataclass
class Step:
    """One step of one optimiser, until it is judged: `fits` says then what its gradients are made of."""

    optimizer: int
    readings: list[Reading]
    number: int = 0
    others: Mapping[str, Tensor] = field(default_factory=dict)
    fits: dict[Target, Fit] | None = None
    gradients: dict[Target, Sketch] = field(default_factory=dict)


def sketch_gradients(gradients: Sequence[tuple[Target, Tensor]], swift: Swift) -> list[tuple[Sketch, Products | None]]:
    """p.grad @ R of every parameter, and how it compares with the events, where one pass of one call made it."""
    jobs = swift.jobs()
    if jobs is None or not all(fits(gradient) for _, gradient in gradients):
        return [(target.quick_sketch(_dense(gradient)), None) for target, gradient in gradients]
    asked = []
    for target, gradient in gradients:
        rows = target.passes[0].rows if len(target.passes) == 1 else ()
        events = rows[0].address if len(rows) == 1 else 0
        if target.projection is None:
            asked.append((jobs.copy(gradient, events), gradient.numel(), events))
        else:
            columns = target.columns(torch.float32, gradient.device)
            asked.append((jobs.project(gradient, columns, events), 4 * len(gradient), events))
    results, sums = jobs.run()
    products = sums.tolist()
    return [
        (results[at : at + numbers], tuple(products[first : first + 3]) if events else None)
        for (at, first), numbers, events in asked
    ]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
