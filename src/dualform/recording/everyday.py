"""The everyday case of the probe, for many parameters or steps at once.

One backward pass in all parameters, one scale for them all, nothing left: that is what nearly every step of nearly
every training is. Where there is any doubt, the probe itself decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float64

from dualform.recording.probe import HALF, PRECISIONS, Evidence, Fit, clear_scale, norm
from dualform.recording.targets import Target


def everyday(evidence: Mapping[Target, Evidence], known: dict[int, float]) -> dict[Target, Fit] | None:
    """The scale of an everyday step for all its parameters; None where there is any doubt."""
    seen = list(evidence.values())
    if not seen or any(len(one.passes) != 1 for one in seen):
        return None
    exactly, backward = seen[0].precision, seen[0].passes[0].backward
    if any(one.precision is not exactly or one.passes[0].backward != backward for one in seen):
        return None
    if exactly is HALF or all(one.target.equations == 1 for one in seen):
        return None
    products = [one.products for one in seen]
    square = sum(own for _, _, own in products)
    scale = clear_scale(sum(common for _, common, _ in products) / square if square > 0 else math.nan, exactly)
    if scale is None:
        return None
    fits: dict[Target, Fit] = {}
    for one, (size, common, own) in zip(seen, products, strict=True):
        if not size > exactly.tiny:
            return None
        # ‖g − c s‖² of what was multiplied out already; where it cancels too much to tell, all over again.
        rest = size - 2 * scale * common + scale * scale * own
        if exactly.floor < 1e-7:
            rest = norm(one.gradient - scale * one.passes[0].sketch) ** 2
        if not rest <= exactly.floor**2 * size:
            return None
        fits[one.target] = Fit((scale,), math.sqrt(max(rest, 0.0) / size), exactly.floor)
    known.setdefault(backward, scale)
    return fits


def everyday_stretch(
    products: Float64[np.ndarray, "steps parameters 3"],
) -> tuple[list[float], Float64[np.ndarray, "steps parameters"]] | None:
    """The same for several fp32 steps at once: the scale of every step, and the remainders.

    `products` are those of the sketches (see Evidence.products). None where any step is in doubt.
    """
    exactly = PRECISIONS[torch.float32]
    sizes, common, own = np.moveaxis(products, 2, 0)
    ratios = (common.sum(axis=1) / own.sum(axis=1)).tolist()
    scales = [clear_scale(ratio, exactly) for ratio in ratios]
    certain = [scale for scale in scales if scale is not None]
    if len(certain) < len(scales):
        return None
    factor = np.array(certain)[:, None]
    rests = sizes - 2 * factor * common + factor * factor * own
    # Also false where anything is NaN.
    if not (sizes > exactly.tiny).all() or not (rests <= exactly.floor**2 * sizes).all():
        return None
    return certain, np.sqrt(np.maximum(rests, 0.0) / sizes)
