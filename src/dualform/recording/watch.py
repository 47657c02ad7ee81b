"""The watch: does the weight still go where the optimiser's recurrence says?

The sketches of W and of its velocity follow the same recurrence as the weight itself, so the gradients' sketches of
some steps predict W @ R after them. Comparing the two now and then finds every change made outside the optimiser,
also one that bumps no version counter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dualform.optimizers import Settings, transitions
from dualform.recording.probe import Vector, norm
from dualform.recording.targets import Target

CHECK_EVERY = 32


class Watch:
    """Predicts the sketch of one parameter over a stretch of steps."""

    def __init__(self, target: Target, velocity: Tensor | None, step: int) -> None:
        self._target = target
        self._unit = torch.finfo(target.parameter.dtype).eps / 2
        self.checked = step
        self.resume(velocity)

    def resume(self, velocity: Tensor | None) -> None:
        """Believe the parameter and the velocity as they are now."""
        self._weight = self._target.sketch(self._target.parameter).reshape(-1).numpy()
        zeros = np.zeros_like(self._weight)
        self._velocity = zeros if velocity is None else self._target.sketch(velocity).reshape(-1).numpy()
        self._stretch: list[tuple[Settings, Vector]] = []
        self.version = self._target.parameter._version

    def follow(self, settings: Settings, gradient: Vector) -> None:
        """Take note of one step and of the gradient's sketch that the optimiser really used."""
        self._stretch.append((settings, gradient))
        self.version = self._target.parameter._version

    def deviation(self, actual: Vector) -> float:
        """How far the parameter's sketch is from its prediction, in units of what rounding allows; then believe it."""
        before, steps = self._weight, len(self._stretch)
        predicted, self._velocity, swing = self._predict()
        self._weight = actual
        self._stretch = []
        self.version = self._target.parameter._version
        distance = norm(actual - predicted)
        if distance == 0.0 or (not math.isfinite(distance) and not bool(np.isfinite(predicted).all())):
            return 0.0  # where the recurrence itself says NaN, a NaN is no surprise
        size = max(norm(before), norm(predicted), swing)
        allowed = 64 * self._unit * math.sqrt(max(steps, 1)) * size + torch.finfo(self._target.parameter.dtype).tiny
        return distance / allowed if allowed > 0 and math.isfinite(distance) else math.inf

    def _predict(self) -> tuple[Vector, Vector, float]:
        """The sketches of weight and velocity after the stretch, and the largest move of the weight within it.

        They are linear in the sketches before the stretch and in the gradients.
        """
        if not self._stretch:
            return self._weight, self._velocity, 0.0
        rows = np.array([settings.row for settings, _ in self._stretch])
        flags = np.array([settings.flags for settings, _ in self._stretch], dtype=np.uint8)
        matrices, inputs = transitions(rows, flags)
        state = np.eye(2)
        factors = np.empty((2, len(flags)))
        for at in reversed(range(len(flags))):
            factors[:, at] = state @ inputs[at]
            state = state @ matrices[at]
        gradients = np.stack([gradient for _, gradient in self._stretch])
        moved = factors @ gradients
        # Factors of zero must not meet infinities.
        start = [
            sum(c * s for c, s in zip(row, (self._weight, self._velocity), strict=True) if c != 0) for row in state
        ]
        swing = float((np.abs(factors[0]) * np.linalg.norm(gradients, axis=1)).max())
        return moved[0] + start[0], moved[1] + start[1], swing
