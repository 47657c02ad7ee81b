"""The probe: which scale of each backward pass is in a gradient, and is there anything else in it?

Freivalds' check with a fixed random R of four columns: p.grad @ R is compared with Σ g_t (x_t · R), by least
squares over the scales of the backward passes. Clipping, loss scaling and accumulation are such scales. What
stays unexplained beyond rounding was made by something else than the recorded events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float64

from dualform.recording.targets import PROBE_COLUMNS, Pass, Target, Vector

MANY = 64  # passes of one step beyond which no scale of their own is fitted to each


@dataclass(frozen=True)
class Precision:
    """What rounding costs: one rounding error of a product, the least tolerance of a remainder, how near a scale
    is taken for a power of two, and how small a gradient is lost to underflow.
    """

    unit: float
    floor: float
    snap: float
    tiny: float


PRECISIONS = {
    torch.float64: Precision(2.0**-53, 1e-12, 2.0**-50, 1e-280),
    torch.float32: Precision(2.0**-24, 1e-5, 2.0**-21, 1e-30),
}
# Half-precision products are summed in fp32, but the gradient itself is rounded to 8 or 11 bits.
HALF = Precision(2.0**-24, 1e-2, 1e-3, 1e-30)


def norm(vector: Vector) -> float:
    """The Euclidean norm; np.linalg.norm takes five times as long for the few numbers of a sketch."""
    return math.sqrt(vector @ vector)


def products(gradient: Vector, events: Vector) -> tuple[float, float, float]:
    """‖G‖², G·S and ‖S‖² of the sketches of a gradient and of events."""
    return float(gradient @ gradient), float(gradient @ events), float(events @ events)


def precision(target: Target, half: bool) -> Precision:
    """The precision of the products that make a parameter's gradient."""
    return HALF if half else PRECISIONS.get(target.parameter.dtype, HALF)


@dataclass(frozen=True)
class Fit:
    """The scales that explain a gradient, what is left of it, and whether that is no more than rounding."""

    scales: tuple[float, ...]
    remainder: float
    tolerance: float
    l2: float = 0.0
    carried: bool = False
    determined: bool = True

    @property
    def explained(self) -> bool:
        """Whether nothing but the recorded events (and a decay in the loss) made this gradient."""
        return self.remainder <= self.tolerance and not self.carried


class Evidence:
    """What there is to go by for one parameter just before its step, as sketches in fp64.

    Most of it is needed only where the simplest story fails, and is computed then.
    """

    def __init__(
        self,
        target: Target,
        passes: Sequence[Pass],
        gradient: Vector,
        previous: Vector | None,
        half: bool,
        weight: Callable[[], Vector],
    ) -> None:
        self.target = target
        self.passes = passes
        self.gradient = gradient
        self.previous = previous
        self.precision = precision(target, half)
        self._weight = weight

    @cached_property
    def norm(self) -> float:
        """The size of the gradient's sketch."""
        return norm(self.gradient)

    @property
    def products(self) -> tuple[float, float, float]:
        """‖G‖², G·S and ‖S‖² of the gradient's sketch and of that of its only pass."""
        return products(self.gradient, self.passes[0].sketch)

    @cached_property
    def finite(self) -> list[bool]:
        """Which passes have a finite sketch: one that overflowed cannot be part of a finite gradient."""
        return [bool(np.isfinite(one.sketch).all()) for one in self.passes]

    @property
    def thrown_away(self) -> int:
        """How many of the first passes were in a .grad that was None again later."""
        return max((at for at, one in enumerate(self.passes) if one.fresh), default=0)

    @cached_property
    def columns(self) -> Float64[np.ndarray, "equations passes"]:
        """The sketch of every pass; zeros for one that overflowed, which zero_grad must have dropped."""
        sketches = [one.sketch for one in self.passes]
        kept = [s if ok else np.zeros_like(s) for s, ok in zip(sketches, self.finite, strict=True)]
        return np.stack(kept, axis=1) if kept else np.zeros((len(self.gradient), 0))

    @cached_property
    def magnitudes(self) -> list[float]:
        """The square of the size that each pass's terms have before they cancel, on the scale of the sketch."""
        # ‖G R‖² is about four times ‖G‖² for a Gaussian R of four columns.
        columns = PROBE_COLUMNS if self.target.projection is not None else 1
        return [columns * one.magnitude if ok else 0.0 for one, ok in zip(self.passes, self.finite, strict=True)]

    @property
    def weight(self) -> Vector:
        """The sketch of the parameter itself, to find an L2 term of the user's loss."""
        return self._weight()

    def rounding(self, scales: Sequence[float]) -> float:
        """64 rounding errors of the terms that these scales let in, relative to the gradient: 64 units times κ."""
        size = math.sqrt(sum(s * s * m for s, m in zip(scales, self.magnitudes, strict=True)))
        return 64 * self.precision.unit * size / self.norm

    def saw(self, at: int) -> bool:
        """Whether a pass left more than rounding in this parameter, or was thrown away before another one."""
        heard = norm(self.columns[:, at]) > 128 * self.precision.unit * math.sqrt(self.magnitudes[at])
        return heard or at < self.thrown_away

    @property
    def silent(self) -> bool:
        """Whether the events' own terms cancel to zero as far as rounding can tell."""
        return norm(self.columns.reshape(-1)) <= 128 * self.precision.unit * math.sqrt(sum(self.magnitudes))

    def judge(self, scales: Sequence[float], l2: float = 0.0, extra: Vector | None = None) -> Fit:
        """How well these scales (and `l2` times the extra column) explain the gradient."""
        scales = [scale if ok else 0.0 for scale, ok in zip(scales, self.finite, strict=True)]
        rest = self.gradient - self.columns @ np.array(scales, dtype=np.float64)
        if extra is not None:
            rest = rest - l2 * extra
        tolerance = max(self.precision.floor, self.rounding(scales))
        return Fit(tuple(scales), norm(rest) / self.norm, tolerance, l2=l2)


def fit(seen: Evidence, known: Sequence[float] | None = None, known_l2: float = 0.0) -> Fit:
    """Explain a gradient by the simplest story that leaves nothing over.

    In this order: the scales `known` from other parameters; one scale for all passes, with the first ones
    dropped by zero_grad or not; a scale per pass; each again with an L2 term of the user's loss. Failing all,
    a look whether the gradient of the last step was carried over.
    """
    count = len(seen.passes)
    if not math.isfinite(seen.norm):
        return Fit((1.0,) * count, math.inf, 0.0)
    if count and seen.thrown_away == count - 1 and seen.norm > 0.0:
        simple = _one_pass(seen, known)
        if simple is not None:
            return simple
    if seen.norm == 0.0:
        return Fit((0.0,) * count, 0.0, 0.0, determined=not seen.silent)
    if seen.norm <= seen.precision.tiny and norm(seen.columns.reshape(-1)) <= seen.precision.tiny:
        return Fit(tuple(known or (1.0,) * count), 0.0, 0.0, determined=False)  # lost to underflow
    if count and seen.silent:
        guess = seen.judge(known or (1.0,) * count)
        if guess.explained:
            return Fit(guess.scales, guess.remainder, guess.tolerance, determined=False)

    closest: Fit | None = None
    for with_l2 in (False, True):
        for story in _stories(seen, known, known_l2, seen.weight if with_l2 else None):
            if story.explained:
                return story
            closest = story if closest is None or story.remainder < closest.remainder else closest
    assert closest is not None
    plain = Fit(closest.scales, closest.remainder, closest.tolerance)
    if seen.previous is not None and seen.target.equations > 1:
        for story in _stories(seen, None, 0.0, seen.previous):
            if story.explained:
                return Fit(story.scales, plain.remainder, plain.tolerance, carried=True)
    return plain


def clear_scale(scale: float, precision: Precision, known: bool = False) -> float | None:
    """A scale, as a power of two where it is one within rounding; None where there is any doubt."""
    if not math.isfinite(scale) or scale == 0.0:
        return None
    power = math.copysign(2.0 ** round(math.log2(abs(scale))), scale)
    off = abs(scale / power - 1.0)
    if off <= precision.snap:
        return power
    # Whether it is a power of two depends on how much the terms cancel.
    return None if not known and off < 1e-3 else scale


def _one_pass(seen: Evidence, known: Sequence[float] | None) -> Fit | None:
    """The everyday case: one pass since zero_grad, one scale, nothing left. None where there is any doubt."""
    if seen.target.equations == 1 and not known:
        return None
    sketch = seen.passes[-1].sketch
    square = float(sketch @ sketch)
    nearest = float(sketch @ seen.gradient) / square if square > 0 else math.nan
    scale = clear_scale(known[-1] if known else nearest, seen.precision, bool(known))
    if scale is None:
        return None
    remainder = norm(seen.gradient - scale * sketch) / seen.norm
    scales = (0.0,) * seen.thrown_away + (scale,)
    return Fit(scales, remainder, seen.precision.floor) if remainder <= seen.precision.floor else None


def _stories(seen: Evidence, known: Sequence[float] | None, known_l2: float, extra: Vector | None) -> Iterator[Fit]:
    count = len(seen.passes)
    if known is not None:
        yield seen.judge(known, known_l2 if extra is not None else 0.0, extra)
    if count == 0:
        alone = None if extra is None else _solve(seen, [], extra)
        yield seen.judge([], alone[0] if alone else 0.0, extra)
    if seen.target.equations == 1:
        # One equation would accept any scale: only a power of two, which noise would not hit by chance.
        for dropped in range(min(count, MANY) if known is None else 0):
            solution = _solve(seen, [seen.columns[:, dropped:].sum(axis=1)], None)
            scale = abs(solution[0]) if solution else 0.0
            power = 2.0 ** round(math.log2(scale)) if scale and math.isfinite(scale) else 1.0
            yield seen.judge([0.0] * dropped + [power] * (count - dropped))
        return
    if count > 1 and extra is None:
        # As they are, first: where the passes point the same way, some other scale of too many would fit as well.
        rest = seen.gradient[:, None] - _suffixes(seen.columns)
        dropped = int(np.square(rest).sum(axis=0).argmin())
        yield seen.judge([0.0] * dropped + [1.0] * (count - dropped))
    likely = [seen.thrown_away, 0, _dropped(seen)] if count else []
    # Beside an unknown L2 term the best suffix is not known beforehand.
    every = range(count) if extra is not None and count <= MANY else ()
    for dropped in dict.fromkeys([*likely, *every]):
        solution = _solve(seen, [seen.columns[:, dropped:].sum(axis=1)], extra)
        if solution is not None:
            scales = [0.0] * dropped + [solution[0]] * (count - dropped)
            yield _simplest(seen, scales, solution[1] if extra is not None else 0.0, extra)
    if 1 < count <= MANY:
        solution = _solve(seen, list(seen.columns.T), extra)
        if solution is not None:
            yield _simplest(seen, solution[:count], solution[count] if extra is not None else 0.0, extra)


def _simplest(seen: Evidence, scales: list[float], l2: float, extra: Vector | None) -> Fit:
    """The fit with snapped scales, unless snapping costs more than rounding does."""
    plain = seen.judge(scales, l2, extra)
    snapped = seen.judge(_snapped(seen, scales), l2, extra)
    return snapped if snapped.remainder <= plain.remainder + seen.precision.floor else plain


def _dropped(seen: Evidence) -> int:
    """How many of the first passes zero_grad most likely dropped: the suffix that one scale fits best."""
    suffixes = _suffixes(seen.columns)
    squares = np.square(suffixes).sum(axis=0)
    explained = np.where(squares > 0, np.square(seen.gradient @ suffixes) / squares, 0.0)
    return int(explained.argmax())


def _suffixes(columns: Float64[np.ndarray, "equations passes"]) -> Float64[np.ndarray, "equations passes"]:
    """The sum of every column and those after it."""
    return columns[:, ::-1].cumsum(axis=1)[:, ::-1]


def _solve(seen: Evidence, basis: list[Vector], extra: Vector | None) -> list[float] | None:
    """Least squares; None where there are not more equations than unknowns, which would explain anything."""
    matrix = np.stack([*basis, *([extra] if extra is not None else [])], axis=1)
    if matrix.shape[1] == 1:
        square = float(matrix[:, 0] @ matrix[:, 0])
        return [float(matrix[:, 0] @ seen.gradient) / square if square > 0 else 0.0]
    if seen.target.equations <= matrix.shape[1]:
        return None
    # Columns of very different size (a gradient and a weight) would lose the small one to the cut-off.
    sizes = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    # Nearly equal columns would get huge scales that cancel, and with them a tolerance that lets anything pass.
    try:
        solution = np.linalg.lstsq(matrix / sizes, seen.gradient, rcond=math.sqrt(seen.precision.unit))[0]
    except np.linalg.LinAlgError:
        return None
    return [float(value) for value in solution / sizes]


def _snapped(seen: Evidence, scales: list[float]) -> list[float]:
    """Scales within rounding of 0, 1 or a power of two are that."""
    largest = max(abs(scale) for scale in scales)
    noise = seen.rounding(scales) / 8 * seen.norm  # what rounding may add to a sketch
    sizes = np.linalg.norm(seen.columns, axis=0).tolist()
    common = len(set(scales)) == 1
    whole = norm(seen.columns.sum(axis=1))
    result = []
    for scale, size in zip(scales, sizes, strict=True):
        size = whole if common else size
        near = max(noise / (abs(scale) * size) if scale and size else 0.0, seen.precision.snap)
        if abs(scale) <= near * largest or scale == 0.0:
            result.append(0.0)
            continue
        power = 2.0 ** round(math.log2(abs(scale)))
        result.append(math.copysign(power, scale) if abs(abs(scale) / power - 1.0) <= near else scale)
    return result


def _together(unexplained: Mapping[Target, Evidence]) -> dict[Target, Fit]:
    """One scale for several parameters of a single number each: none of them could verify it alone."""
    single = [seen for seen in unexplained.values() if seen.target.equations == 1 and math.isfinite(seen.norm)]
    passes = {tuple(one.backward for one in seen.passes) for seen in single}
    if len(single) < 2 or len(passes) > 1:
        return {}
    count = len(single[0].passes)
    gradients = np.concatenate([seen.gradient for seen in single])
    columns = np.concatenate([seen.columns for seen in single])
    for dropped in range(min(count, MANY)):
        suffix = columns[:, dropped:].sum(axis=1)
        square = float(suffix @ suffix)
        scale = float(suffix @ gradients) / square if square > 0 else 0.0
        fits = {seen.target: seen.judge([0.0] * dropped + [scale] * (count - dropped)) for seen in single}
        if scale and all(result.explained for result in fits.values()):
            return fits
    return {}


def fit_all(evidence: Mapping[Target, Evidence], known: dict[int, float]) -> dict[Target, Fit]:
    """Fit every parameter of one optimiser step; what one cannot tell alone is taken from the others.

    `known` has the scales of backward passes that other optimisers' steps told of, and takes up what this one tells.
    """
    known_l2 = 0.0
    fits: dict[Target, Fit] = {}
    # Those with the most equations first: a bias or a small weight mostly shares their scale, and may have too few
    # equations to tell a scale from anything else.
    for target in sorted(evidence, key=lambda target: (target.projection is None, -target.equations)):
        prefer = None
        few = target.projection is None or target.equations <= PROBE_COLUMNS
        if few and evidence[target].passes and all(one.backward in known for one in evidence[target].passes):
            prefer = [known[one.backward] for one in evidence[target].passes]
        result = fits[target] = fit(evidence[target], prefer, known_l2)
        if result.determined and result.explained:
            known_l2 = result.l2 or known_l2
            for at, (one, scale) in enumerate(zip(evidence[target].passes, result.scales, strict=True)):
                # Of a pass that left nothing here this scale says nothing; in other parameters it may have left much.
                if len(evidence[target].passes) == 1 or evidence[target].saw(at):
                    known.setdefault(one.backward, scale)
    fits |= _together({target: evidence[target] for target, result in fits.items() if not result.explained})
    for target, result in fits.items():
        if not result.determined:
            scales = tuple(known.get(one.backward, 1.0) for one in evidence[target].passes)
            fits[target] = Fit(scales, result.remainder, result.tolerance, determined=False)
    return fits
