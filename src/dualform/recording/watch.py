"""The watch: does the weight still go where the optimiser's recurrence says?

The sketches of W and of its velocity follow the same recurrence as the weight itself, so the gradients' sketches of
some steps predict W @ R after them. Comparing the two now and then finds every change made outside the optimiser,
also one that bumps no version counter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dualform.optimizers import LINEAR, Settings, transitions
from dualform.recording.probe import norm
from dualform.recording.targets import Target, Vector

CHECK_EVERY = 32


class Watch:
    """Predicts the sketch of one parameter over a stretch of steps."""

    def __init__(self, target: Target, velocity: Tensor | None, step: int) -> None:
        self._target = target
        self._unit = torch.finfo(target.parameter.dtype).eps / 2
        self.checked = step
        self.followed = True
        self.resume(velocity)

    def resume(self, velocity: Tensor | None) -> None:
        """Believe the parameter and the velocity as they are now."""
        self._weight = self._target.sketch(self._target.parameter).reshape(-1).numpy()
        zeros = np.zeros_like(self._weight)
        self._velocity = zeros if velocity is None else self._target.sketch(velocity).reshape(-1).numpy()
        self._begin()
        self.version = self._target.parameter._version

    def _begin(self) -> None:
        self._settings: list[Settings] = []
        self._gradients: list[Float[np.ndarray, "steps _"]] = []

    def follow(self, settings: Sequence[Settings], gradients: Float[np.ndarray, "steps _"]) -> None:
        """Take note of some steps, and of the sketches of the gradients that the optimiser really used."""
        self.followed = bool(settings[-1].flags & LINEAR)
        self._settings += settings
        self._gradients.append(gradients)

    def predicted(self) -> Vector:
        """The sketch of the parameter after the steps so far, as it should be."""
        return self._predict()[0]

    def deviation(self, actual: Vector) -> float:
        """How far the parameter's sketch is from its prediction, in units of what rounding allows; then believe it."""
        before, steps = self._weight, len(self._settings)
        predicted, self._velocity, swing = self._predict()
        self._weight = actual
        self._begin()
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
        if not self._settings:
            return self._weight, self._velocity, 0.0
        state, factors = _sweep(tuple(self._settings))
        moved, sizes = self._moved(factors)
        # Factors of zero must not meet infinities.
        start = [
            sum(c * s for c, s in zip(row, (self._weight, self._velocity), strict=True) if c != 0) for row in state
        ]
        swing = float((np.abs(factors[0]) * np.sqrt(sizes)).max())
        return moved[0] + start[0], moved[1] + start[1], swing

    def _moved(self, factors: Float64[np.ndarray, "2 steps"]) -> tuple[Float64[np.ndarray, "2 _"], Vector]:
        """The gradients, with these factors, summed over the steps; and the square of the size of each."""
        loops, first = self._target.swift.loops, self._gradients[0]
        if loops is None or len(self._gradients) > 1 or first.dtype != np.float32 or first.strides[1] != 4:
            gradients = np.concatenate(self._gradients, dtype=np.float64)
            return factors @ gradients, np.einsum("ij,ij->i", gradients, gradients)
        moved, sizes = np.zeros((2, first.shape[1])), np.empty(len(first))
        loops.follow(first.ctypes.data, first.strides[0], factors, moved, sizes)
        return moved, sizes


@functools.lru_cache(maxsize=16)
def _sweep(stretch: tuple[Settings, ...]) -> tuple[Float64[np.ndarray, "2 2"], Float64[np.ndarray, "2 steps"]]:
    """What a stretch of steps makes of weight and velocity, and with which factors each gradient is in them.

    The parameters of one optimiser mostly share it.
    """
    rows = np.array([settings.row for settings in stretch])
    matrices, inputs = transitions(rows, np.array([settings.flags for settings in stretch], dtype=np.uint8))
    state = np.eye(2)
    factors = np.empty((2, len(stretch)))
    for at in reversed(range(len(stretch))):
        factors[:, at] = state @ inputs[at]
        state = state @ matrices[at]
    return state, factors
