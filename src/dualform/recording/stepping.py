"""What one optimiser step does to every recorded parameter: its settings, its probe, its events, its findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.memory import Call, Finding, PassRow, StepRow
from dualform.memory.files import tensor_hash
from dualform.optimizers import HALF, LINEAR, UNEXPLAINED, Settings, is_linear, read_settings
from dualform.recording.capture import Capture
from dualform.recording.probe import Evidence, Fit, Vector, fit_all
from dualform.recording.targets import Pass, Target, Targets
from dualform.recording.watch import CHECK_EVERY, Watch


@dataclass(frozen=True)
class _Prepared:
    """One parameter just before its step."""

    settings: Settings
    gradient: Vector
    fit: Fit
    digest: int


class Stepping:
    """Counts steps and turns each into a journal row; keeps the findings of the whole run."""

    def __init__(
        self,
        targets: Targets,
        optimizers: Sequence[torch.optim.Optimizer],
        tell: Callable[[str, str], None],
        capture: Capture,
        values: bool,
    ) -> None:
        self._values = values
        self._targets, self._optimizers = targets, optimizers
        self._tell, self._capture = tell, capture
        self._by_parameter = {target.parameter: target for target in targets.parameters}
        self._number_of = {target: at for at, target in enumerate(targets.weights)}
        self._owner: dict[Target, int] = {}
        self._prepared: dict[Target, _Prepared] = {}
        self._previous: dict[Target, Vector] = {}
        self._watches: dict[Target, Watch] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._scales: dict[int, float] = {}
        self.steps = 0
        self._look_up_owners()

    def start(self, steps: int = 0, findings: Sequence[Finding] = ()) -> None:
        """Begin to watch the weights as they are now, after the steps and with the findings of a run so far."""
        self.steps = steps
        self._findings = {(finding.parameter, finding.kind): finding for finding in findings}
        self._watches = {t: Watch(t, self.velocity(t), steps) for t in self._targets.parameters}

    @property
    def findings(self) -> list[Finding]:
        """Every broken premise so far, one entry for each parameter and kind."""
        return list(self._findings.values())

    def owner(self, target: Target) -> int:
        """The number of the optimiser that steps a parameter; −1 for none."""
        return self._owner.get(target, -1)

    def owns(self, target: Target) -> bool:
        """Whether a recorded optimiser steps this parameter; told once where not."""
        if target not in self._owner:
            self._look_up_owners()
        if target not in self._owner:
            self._tell(
                f"owner {target.name}",
                f"{target.name} gets gradients, but no recorded optimiser steps it: its events are not recorded",
            )
        return target in self._owner

    def velocity(self, target: Target) -> Tensor | None:
        """The momentum a parameter has at this moment."""
        owner = self.owner(target)
        state = self._optimizers[owner].state if owner >= 0 else {}
        buffer = state[target.parameter].get("momentum_buffer") if target.parameter in state else None
        return buffer.detach() if isinstance(buffer, Tensor) else None

    def _look_up_owners(self) -> None:
        for index in range(len(self._optimizers)):
            for target, _ in self._owned(index):
                self._owner.setdefault(target, index)

    def _owned(self, index: int) -> Iterator[tuple[Target, Mapping[str, Any]]]:
        for group in self._optimizers[index].param_groups:
            for parameter in group["params"]:
                if parameter in self._by_parameter:
                    yield self._by_parameter[parameter], group

    def prepare(self, index: int) -> None:
        """Probe every gradient and read every setting, just before the step uses them."""
        optimizer = self._optimizers[index]
        self._prepared = {}
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return  # a fused optimiser with a loss scaler: this step does nothing
        grad_scale = getattr(optimizer, "grad_scale", None)
        linear = is_linear(optimizer)
        evidence: dict[Target, Evidence] = {}
        readings: dict[Target, tuple[Settings, Vector, int]] = {}
        for target, group in self._owned(index):
            if linear and target.parameter._version != self._watches[target].version:
                self._check(target, self.steps + 1)
            gradient = target.parameter.grad
            if gradient is None:
                continue
            self._capture.settle(target)  # only matters for an optimiser that steps inside backward
            found = target.quick_sketch(gradient.to_dense() if gradient.is_sparse else gradient)
            digest = tensor_hash(found)
            sketch = found.reshape(-1).numpy().astype(np.float64)
            if grad_scale is not None:
                sketch = sketch / float(grad_scale)
            readings[target] = read_settings(optimizer, group, target.parameter), sketch, digest
            evidence[target] = Evidence(target, sketch, self._previous.get(target))
        with np.errstate(all="ignore"):
            fits = fit_all(evidence, self._scales)
        for target, fit in fits.items():
            settings, sketch, digest = readings[target]
            self._prepared[target] = _Prepared(settings, sketch, fit, digest)

    def finish(self, index: int) -> StepRow:
        """The journal row of the step just made, with the events that it used."""
        self.steps += 1
        row = StepRow.blank(index, len(self._targets.parameters))
        for target, _ in self._owned(index):
            self._owner.setdefault(target, index)
            prepared = self._prepared.get(target)
            scales = prepared.fit.scales if prepared else (0.0,) * len(target.passes)
            for one, scale in zip(target.passes, scales, strict=True):
                row.passes.append(PassRow(one.backward, target.index, scale))
                self._store(row, one)
            if prepared:
                self._journal(row, target, prepared)
            target.passes = []
        waiting = {one.backward for target in self._targets.parameters for one in target.passes}
        self._scales = {backward: scale for backward, scale in self._scales.items() if backward in waiting}
        for calls in row.calls.values():
            calls.sort(key=lambda call: call.backward)
        self._prepared = {}
        return row

    def _store(self, row: StepRow, one: Pass) -> None:
        """Make the rows of a pass events, unless the step of their weight or bias did so before."""
        for arrived in one.rows:
            if not arrived.stored:
                arrived.stored = True
                call = Call(
                    arrived.use.index,
                    one.backward,
                    arrived.keys,
                    arrived.gradients if self._values else None,
                    arrived.examples,
                    arrived.positions,
                    arrived.fixed,
                    arrived.nonfinite,
                )
                weight, bias = arrived.use.weight, arrived.use.bias
                if bias is not None and self.owner(weight) != self.owner(bias):
                    arrived.move_out()  # the other one's step may come much later
                row.calls.setdefault(self._number_of[arrived.use.weight], []).append(call)

    def _journal(self, row: StepRow, target: Target, prepared: _Prepared) -> None:
        fit = prepared.fit
        settings = dataclasses.replace(prepared.settings, l2=fit.l2)
        at = target.index
        row.settings[at] = settings.row
        row.flags[at] = settings.flags | (0 if fit.explained else UNEXPLAINED) | (HALF if target.half else 0)
        target.half = False
        row.remainders[at] = fit.remainder
        row.digests[at] = prepared.digest
        if not fit.explained:
            self._find(target, *_what_was_found(target, fit, self.steps))
        self._previous[target] = prepared.gradient
        watch = self._watches[target]
        if settings.flags & LINEAR:
            # The sketch of the gradient holds any L2 term already, so the plain settings predict the step.
            watch.follow(prepared.settings, prepared.gradient)
            if self.steps - watch.checked >= CHECK_EVERY:
                self._check(target, self.steps)
        else:
            watch.resume(None)
            watch.checked = self.steps

    def check_all(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Compare every weight with its prediction; the sketches of weights and velocities as they are now."""
        sketches = {target: target.sketch(target.parameter) for target in self._targets.parameters}
        for target, sketch in sketches.items():
            self._check(target, self.steps, sketch)
        for use in self._targets.uses:
            for used in (use.weight, use.bias):
                if used and all(used.parameter is not one for one in use.module._parameters.values()):
                    reason = f"the parameter of {use.map} was replaced by another one; recording follows the old one"
                    self._find(used, "replaced", reason, self.steps, self.steps)
        velocities = {target: self.velocity(target) for target in sketches}
        return (
            {target.index: sketch for target, sketch in sketches.items()},
            {target.index: target.sketch(v) for target, v in velocities.items() if v is not None},
        )

    def _check(self, target: Target, step: int, sketch: Tensor | None = None) -> None:
        watch = self._watches[target]
        since, watch.checked = watch.checked, min(step, self.steps)
        sketch = target.quick_sketch(target.parameter) if sketch is None else sketch
        with np.errstate(all="ignore"):
            deviation = watch.deviation(sketch.reshape(-1).numpy().astype(np.float64))
        if deviation <= 1.0:
            return
        if step > self.steps:
            since = self.steps
        between = f"between step {since} and step {step}" if step > since else f"after step {step}"
        reason = f"the weight was changed outside the optimiser {between}"
        self._find(target, "edited", reason, since, step)
        watch.resume(self.velocity(target))

    def _find(self, target: Target, kind: str, reason: str, since: int, step: int) -> None:
        key = (target.name, kind)
        if key in self._findings:
            earlier = self._findings[key]
            self._findings[key] = dataclasses.replace(earlier, count=earlier.count + 1)
        else:
            self._findings[key] = Finding(target.name, kind, since, step, reason)
            self._tell(f"{kind} {target.name}", f"{target.name}: {reason}; its certificate will not be exact")


def _what_was_found(target: Target, fit: Fit, step: int) -> tuple[str, str, int, int]:
    """Kind, reason and steps of a gradient that the events do not explain."""
    if not math.isfinite(fit.remainder):
        return "nonfinite", f"the gradient at step {step} holds NaN or infinity", step - 1, step
    gradient = target.parameter.grad
    clipped = gradient is not None and _looks_clipped_by_value(gradient)
    if fit.carried and not clipped:
        reason = (
            f"the gradient of the step before was still there at step {step} "
            "(no zero_grad in between), so its events acted twice"
        )
        return "carried", reason, step - 1, step
    if not target.passes:
        reason = (
            f"there was a gradient at step {step}, but no event: the weight was used past its module "
            "(a functional call, a compiled or fused module, a gradient set by hand)"
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
