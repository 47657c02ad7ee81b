"""What is found where the recorded events do not explain a gradient, in words."""

from __future__ import annotations

import math

from torch import Tensor

from dualform.recording.probe import Fit
from dualform.recording.reading import Reading


def what_was_found(reading: Reading, fit: Fit, step: int, late: bool) -> tuple[str, str, int, int]:
    """Kind, reason and steps of a gradient that the events do not explain."""
    if not math.isfinite(fit.remainder):
        return "nonfinite", f"the gradient at step {step} holds NaN or infinity", step - 1, step
    gradient = None if late else reading.target.parameter.grad
    clipped = gradient is not None and _looks_clipped_by_value(gradient)
    if fit.carried and not clipped:
        reason = (
            f"the gradient of the step before was still there at step {step} "
            "(no zero_grad in between), so its events acted twice"
        )
        return "carried", reason, step - 1, step
    if not reading.passes:
        reason = (
            f"there was a gradient at step {step}, but no event: the weight was used past its module "
            "(a functional call, a compiled or fused module, a gradient set by hand, an input that was freed)"
        )
        return "no events", reason, step - 1, step
    share = f"{fit.remainder:.2g} of the gradient at step {step} was not made by the recorded events"
    if clipped:
        return "unexplained", f"{share}: it looks clipped elementwise (clip_grad_value_)", step - 1, step
    hint = "(noise, an unrecorded second use of the weight, a penalty on gradients, an edit of .grad)"
    return "unexplained", f"{share} {hint}", step - 1, step


def _looks_clipped_by_value(gradient: Tensor) -> bool:
    size = gradient.detach().abs()
    return int((size == size.max()).sum()) >= 3
