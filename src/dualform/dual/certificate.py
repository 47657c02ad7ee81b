"""The certificate: the measured distance between a weight and its dual form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from dualform.memory import Finding, StoredMemory
from dualform.optimizers import ACTIVE, HALF
from dualform.queries.folds import Folds
from dualform.queries.selection import Selection
from dualform.queries.values import parameters_of, why_no_values

MARGIN = 10.0


@dataclass(frozen=True)
class CertificateRow:
    """How far one weight (with its bias) is from its dual form.

    `residual` is ‖W_T − (c_0 W0 + d_0 v_0 + Σ e_t ⊗ x_t)‖ / ‖W_T − c_0 W0 − d_0 v_0‖, None where there are no
    exact values; `rounding` is the floor to expect of it. `step` is the last step where all is well, and the
    first step that broke a premise otherwise.
    """

    weight: str
    residual: float | None
    rounding: float
    exact: bool
    reason: str
    step: int
    events: int

    def __str__(self) -> str:
        if self.exact and self.rounding > 0.1:
            return f"the weight of {self.weight} is exact, but it moved hardly more than rounding does"
        if self.exact:
            return f"the weight of {self.weight} is rebuilt from {self.events:,} events to {self.residual:.1e}: exact"
        distance = "" if self.residual is None else f" (residual {self.residual:.1e})"
        return f"the weight of {self.weight} is not certified exact{distance}: {self.reason}"


class Certificate(Sequence[CertificateRow]):
    """One row for every weight; `exact` when every row is. `failure` says why recording stopped early, if it did."""

    def __init__(self, rows: Sequence[CertificateRow], failure: str | None = None) -> None:
        self._rows = tuple(rows)
        self.failure = failure

    @property
    def exact(self) -> bool:
        """Whether every weight equals its dual form as far as rounding allows."""
        return all(row.exact for row in self._rows)

    def __getitem__(self, index: int) -> CertificateRow:  # type: ignore[override]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[CertificateRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        width = max([6, *(len(row.weight) for row in self)])
        lines = [f"{'weight'.ljust(width)}  {'residual':>9}  {'rounding':>9}  exact"]
        for row in self:
            residual = "none" if row.residual is None else f"{row.residual:.1e}"
            tail = "yes" if row.exact else f"no: {row.reason}"
            lines.append(f"{row.weight.ljust(width)}  {residual:>9}  {row.rounding:>9.1e}  {tail}")
        return "\n".join([*lines, *([self.failure] if self.failure else [])])


def certify(memory: StoredMemory, folds: Folds) -> Certificate:
    """Rebuild every weight from its events and measure the distance, in fp64."""
    needed = any(why_no_values(memory, weight) is None for weight in range(len(memory.manifest.weights)))
    rebuilt = folds.whole(memory.steps, Selection()) if needed else {}
    rows = [_row(memory, folds, rebuilt, at) for at in range(len(memory.manifest.weights))]
    return Certificate(rows, memory.manifest.failure)


def _row(memory: StoredMemory, folds: Folds, rebuilt: dict[str, Tensor], weight: int) -> CertificateRow:
    record = memory.manifest.weights[weight]
    names = parameters_of(memory, weight)
    missing = why_no_values(memory, weight)
    if not memory.has_weights(memory.steps):
        missing = missing or f"the run was cut at step {memory.steps}: there are no weights of it to compare with"
    findings = [f for f in memory.manifest.findings if f.parameter in names]
    first = min(findings, key=lambda finding: finding.step) if findings else None
    size, moved, distance = _distances(memory, folds, {} if missing else rebuilt, names)
    rounding = _rounding(memory, names, size, moved)
    residual = None if missing else _ratio(distance, moved)
    reason = missing or _why_not(memory, names, residual, rounding, first, weight)
    broken = first.step if first is not None and not missing else memory.steps
    return CertificateRow(
        weight=record.name,
        residual=residual,
        rounding=rounding,
        exact=not reason,
        reason=reason,
        step=broken,
        events=memory.manifest.events(weight),
    )


def _why_not(
    memory: StoredMemory,
    names: list[str],
    residual: float | None,
    rounding: float,
    first: Finding | None,
    weight: int,
) -> str:
    """Why a weight is not exact; "" where it is."""
    if first is not None:
        of = "" if first.parameter == names[0] else f" ({first.parameter})"
        again = f"; {first.count} such findings in all" if first.count > 1 else ""
        return f"{first.reason}{of}{again}"
    numbers = [memory.manifest.parameter(name) for name in names]
    half = (memory.journal.flags[:, numbers] & HALF > 0).any(axis=1)
    if half.any():
        name = memory.half_precision(weight) or "half precision"
        return f"from step {int(half.argmax()) + 1} on gradients were computed in {name}: training itself rounds them"
    if residual is None or not residual <= MARGIN * rounding:
        return f"the residual {residual:.1e} is more than {MARGIN:.0f} times the rounding floor {rounding:.1e}"
    return ""


def _ratio(distance: float, moved: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / moved if moved > 0 else math.inf


def _rounding(memory: StoredMemory, names: list[str], size: float, moved: float) -> float:
    """eps(dtype) · √steps · ‖W‖ / ‖W_T − c_0 W0 − d_0 v_0‖, with the steps that moved the weight or a bias."""
    numbers = [memory.manifest.parameter(name) for name in names]
    steps = int((memory.journal.flags[:, numbers] & ACTIVE > 0).any(axis=1).sum())
    if steps == 0:
        return 0.0
    if moved == 0.0:
        return math.inf  # every update was smaller than rounding
    eps = torch.finfo(getattr(torch, memory.manifest.parameters[numbers[0]].dtype)).eps
    return float(eps * math.sqrt(steps) * size / moved)


def _distances(
    memory: StoredMemory, folds: Folds, rebuilt: dict[str, Tensor], names: list[str]
) -> tuple[float, float, float]:
    """‖W‖, ‖W − c_0 W0 − d_0 v_0‖ and ‖W − rebuilt‖ of a weight and its biases together.

    A run that was not closed has no final weights; then the sketches W @ R of its last commit stand for them.
    """
    squares = [0.0, 0.0, 0.0]
    for name in names:
        at = memory.manifest.parameter(name)
        final = memory.final(name)
        probe = memory.probe(at) if final is None else None
        true = memory.sketch(at, memory.steps) if final is None else final.double()
        if true is None:
            continue
        untouched = _projected(folds.untouched(name, memory.steps), probe)
        squares[0] += float(true.square().sum())
        squares[1] += float((true - untouched).square().sum())
        if name in rebuilt:
            squares[2] += float((true - _projected(rebuilt[name], probe)).square().sum())
    size, moved, distance = (math.sqrt(square) for square in squares)
    return size, moved, distance


def _projected(matrix: Float64[Tensor, "..."], probe: Tensor | None) -> Float64[Tensor, "..."]:
    return matrix if probe is None else matrix @ probe
