"""The watch: does the weight still go where the optimiser's recurrence says?

The sketches of W and of its velocity follow the same recurrence as the weight itself. Comparing the prediction
with W @ R now and then finds every change made outside the optimiser, also one that bumps no version counter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dualform.optimizers import Settings, transitions
from dualform.recording.targets import Target

CHECK_EVERY = 32

_transitions: dict[Settings, tuple[list[list[float]], list[float]]] = {}


def _transition(settings: Settings) -> tuple[list[list[float]], list[float]]:
    if settings not in _transitions:
        if len(_transitions) > 4096:
            _transitions.clear()
        matrices, inputs = transitions(np.array([settings.row]), np.array([settings.flags], dtype=np.uint8))
        _transitions[settings] = (matrices[0].tolist(), inputs[0].tolist())
    return _transitions[settings]


class Watch:
    """Predicts the sketch of one parameter from step to step."""

    def __init__(self, target: Target, velocity: Tensor | None) -> None:
        self._target = target
        self._unit = torch.finfo(target.parameter.dtype).eps / 2
        self.checked = 0
        self.resume(velocity)

    def resume(self, velocity: Tensor | None) -> None:
        """Believe the parameter and the velocity as they are now."""
        self._weight = self._target.sketch(self._target.parameter)
        zeros = torch.zeros_like(self._weight)
        self._velocity = zeros if velocity is None else self._target.sketch(velocity)
        self._variance = 0.0
        self.version = self._target.parameter._version

    def follow(self, settings: Settings, gradient: Tensor) -> None:
        """Predict one step from the gradient's sketch that the optimiser really used."""
        ((a, b), (c, d)), (into_weight, into_velocity) = _transition(settings)
        moved = b * self._velocity + into_weight * gradient
        self._weight, self._velocity = (
            a * self._weight + moved,
            c * self._weight + d * self._velocity + into_velocity * gradient,
        )
        size = max(float(self._weight.norm()), float(moved.norm()))
        self._variance += (self._unit * size) ** 2

    def deviation(self) -> float:
        """How far the parameter is from its prediction, in units of what rounding allows; then believe it."""
        actual = self._target.sketch(self._target.parameter)
        predicted = self._weight
        distance = float((actual - predicted).norm())
        allowed = 64 * max(math.sqrt(self._variance), self._unit * float(actual.norm()))
        self._weight, self._variance = actual, 0.0
        self.version = self._target.parameter._version
        lost = not math.isfinite(distance) and not bool(predicted.isfinite().all())
        if distance == 0.0 or lost:
            return 0.0  # where the recurrence itself says NaN, a NaN is no surprise
        return distance / allowed if allowed > 0 and math.isfinite(distance) else math.inf
