"""What one optimiser step does to every recorded parameter: its settings, its probe, its events, its findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.memory import Call, Finding, StepRows
from dualform.memory.files import bytes_hash
from dualform.memory.slab import Slab
from dualform.optimizers import HALF, UNEXPLAINED, SettingsReader, is_linear
from dualform.recording.capture import Capture
from dualform.recording.everyday import everyday
from dualform.recording.findings import what_was_found
from dualform.recording.owners import Owners
from dualform.recording.plain import run_plain
from dualform.recording.probe import Evidence, Fit, fit_all
from dualform.recording.reading import Reading, Seen, Step, scaling, sketched_by_torch
from dualform.recording.routine import AT_A_TIME, Sketching
from dualform.recording.stretch import Stretch, alike
from dualform.recording.targets import Pass, Sketch, Target, Targets, Vector
from dualform.recording.watch import CHECK_EVERY, Watch

OUTSIDE = 128 << 20  # bytes of rows in no arena, that wait for their steps to be judged
CALM = 32  # everyday steps after which the next ones are judged some at a time


class Stepping:
    """Counts steps and turns each into a journal row; keeps the findings of the whole run.

    A step is read just before it is made, and judged at once. After many everyday steps in a row, judging waits until
    some have gathered: the code is then in the cache, and costs a fraction.
    """

    def __init__(
        self,
        targets: Targets,
        optimizers: Sequence[torch.optim.Optimizer],
        tell: Callable[[str, str], None],
        capture: Capture,
        emit: Callable[[StepRows], None],
        slab: Slab,
        values: bool,
    ) -> None:
        self._emit, self._slab, self._values = emit, slab, values
        self._targets, self._optimizers = targets, optimizers
        self._tell, self._capture = tell, capture
        self.linear = [is_linear(optimizer) for optimizer in optimizers]
        self._readers = [SettingsReader(optimizer) for optimizer in optimizers]
        self._seen: dict[int, Seen] = {}
        self._owners = Owners(targets.parameters, optimizers)
        self._draft: Step | None = None
        self._pending: list[Step] = []
        self._waiting = 0
        self._routines: dict[tuple[int, ...], Sketching] = {}
        self._calm = 0
        self._at_a_time = AT_A_TIME
        self._previous: dict[Target, Sketch] = {}
        self._watches: dict[Target, Watch] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._scales: dict[int, float] = {}
        self.steps = 0

    def start(self, steps: int = 0, findings: Sequence[Finding] = ()) -> None:
        """Begin to watch the weights as they are now, after the steps and with the findings of a run so far."""
        self.steps = steps
        self._targets.swift.reached(steps)
        self._findings = {(finding.parameter, finding.kind): finding for finding in findings}
        self._watches = {t: Watch(t, self.velocity(t), steps) for t in self._targets.parameters}

    @property
    def findings(self) -> list[Finding]:
        """Every broken premise so far, one entry for each parameter and kind."""
        return list(self._findings.values())

    def owner(self, target: Target) -> int:
        """The number of the optimiser that steps a parameter; −1 for none."""
        return self._owners.of(target)

    def owns(self, target: Target) -> bool:
        """Whether a recorded optimiser steps this parameter; told once where not."""
        if self.owner(target) < 0:
            self._owners.look_up()
        if self.owner(target) < 0:
            self._tell(
                f"owner {target.name}",
                f"{target.name} gets gradients, but no recorded optimiser steps it: its events are not recorded",
            )
        return self.owner(target) >= 0

    def velocity(self, target: Target) -> Tensor | None:
        """The momentum a parameter has at this moment."""
        owner = self.owner(target)
        state = self._optimizers[owner].state if owner >= 0 else {}
        buffer = state[target.parameter].get("momentum_buffer") if target.parameter in state else None
        return buffer.detach() if isinstance(buffer, Tensor) else None

    def prepare(self, index: int) -> None:
        """Sketch every gradient and read every setting, just before the step uses them."""
        optimizer, owned, watches = self._optimizers[index], self._owners.owned(index), self._watches
        skipped, unscale = scaling(vars(optimizer))
        linear = self.linear[index]
        within = bool(self._capture.open)  # an optimiser that steps as soon as a gradient is there
        moving: list[tuple[Tensor, Mapping[str, Any]]] = []
        gradients: list[Tensor] = []
        idle: set[Target] = set()
        for target, group in owned:
            parameter = target.parameter
            if linear and parameter._version != watches[target].version:
                self.flush()
                run_plain(self._check, target, self.steps + 1)
            gradient = parameter.grad
            if within and gradient is not None:
                run_plain(self._capture.settle, target)
            if gradient is None or skipped:
                idle.add(target)
            else:
                moving.append((parameter, group))
                gradients.append(gradient)
        settings = self._readers[index].read(moving)
        seen = self._seen.get(index)
        if idle or seen is None or seen.routine is None or seen.owned is not owned or seen.settings != settings:
            each = iter(settings)
            pairs = [(target, None if target in idle else next(each)) for target, _ in owned]
            moved = [target for target, _ in owned if target not in idle]
            seen = self._seen[index] = Seen(owned, settings, pairs, self._routine(moved))
        sketches = None if seen.routine is None else seen.routine.sketch(gradients)
        if sketches is None:
            sketches = run_plain(sketched_by_torch, seen.moving, gradients)
        unmade = () if self._draft is None else self._draft.backwards  # of a step that failed
        ended = self._capture.ended
        # Whatever an interrupt cuts off here, every pass is in the draft or still there, and counts once.
        step = self._draft = Step(index, seen.pairs, sketches, [*dict.fromkeys((*unmade, *ended))], unscale)
        self._capture.ended = []
        if self._calm < CALM or within:
            self.flush()
            run_plain(self._read, step)
            step.fits = run_plain(self._judge, step, False)

    def _routine(self, targets: Sequence[Target]) -> Sketching | None:
        """What sketches the gradients of these parameters, once there are compiled loops."""
        if self._targets.swift.loops is None or not targets:
            return None
        of = tuple(map(id, targets))  # alternating optimisers, or weights that are frozen for a while, have one each
        if of not in self._routines:
            if any(target.parameter.dtype is not torch.float32 for target in targets):
                return None
            self._routines = {**dict(list(self._routines.items())[-3:]), of: Sketching(targets, self._targets.swift)}
        return self._routines[of]

    def _read(self, step: Step) -> None:
        """Make of a step what was left until now: the passes behind its gradients, and the sketches of these."""
        self._capture.settle_all(step.backwards)
        step.backwards = ()
        sketches = iter(step.sketches())
        step.readings = [
            Reading(t, t.passes, settings, None if settings is None else next(sketches), step.unscale, t.half)
            for t, settings in step.seen
        ]

    def _judge(self, step: Step, late: bool) -> dict[Target, Fit]:
        """What the gradients of a step are made of; `late` where the parameters have moved on since."""
        evidence: dict[Target, Evidence] = {}
        for target, passes, _, sketch, unscale, half in step.readings:
            if sketch is not None:
                gradient = sketch.astype(np.float64)
                gradient = gradient if unscale == 1.0 else gradient * unscale
                previous = self._previous.get(target)
                previous = None if previous is None else previous.astype(np.float64)
                weight = self._watches[target].predicted if late else partial(_weight, target)
                evidence[target] = Evidence(target, passes, gradient, previous, half, weight)
                step.gradients[target] = gradient
        with np.errstate(all="ignore"):
            fits = everyday(evidence, self._scales)
            self._calm = 0 if fits is None else self._calm + 1
            return fit_all(evidence, self._scales) if fits is None else fits

    def _together(self, stretch: Stretch) -> bool:
        """Judge a stretch of everyday steps at once and hand on their journal rows; False where there is any doubt."""
        found, steps = stretch.judge(self._targets.swift), len(stretch.steps)
        if found is None:
            return False
        first = self._capture.backwards
        rows = stretch.rows(len(self._targets.parameters), first, *found, self._capture.numbers, self._slab)
        # Until here an interrupt leaves the steps to the next time; from here on it is told.
        self._pending = self._pending[steps:]
        self._calm += steps
        self._capture.backwards = first + steps
        for at, target in enumerate(stretch.targets):
            gradients = stretch.gradients(at)
            self._previous[target] = gradients[-1].copy()
            self._watches[target].follow(stretch.settings(at), gradients)
        self._emit(rows)
        return True

    def finish(self, index: int, others: Mapping[str, Tensor]) -> None:
        """The step was made."""
        step, self._draft = self._draft, None
        self.steps += 1
        self._targets.swift.reached(self.steps)
        if step is None:  # a closure that was never called
            step = Step(index, [(target, None) for target, _ in self._owners.owned(index)], list, self._capture.ended)
            self._capture.ended = []
        step.number, step.others = self.steps, others
        for target, _ in step.seen:
            self._watches[target].version = target.parameter._version
        self._pending.append(step)

    def flush_when_due(self) -> None:
        """Judge the steps that wait, where the last of them does not wait itself or they are enough."""
        last = self._pending[-1]
        self._waiting += sum(backward.outside for backward in last.backwards)
        if last.fits is not None or len(self._pending) >= self._at_a_time or self._waiting >= OUTSIDE:
            self.flush()

    @property
    def moved(self) -> bool:
        """Whether a weight that an optimiser steps is not as it was after the last step that was finished."""
        return any(target.parameter._version != self._watches[target].version for target in self._owners.targets)

    def catch_up(self, check: bool = True) -> None:
        """Work out all that was left until later; without `check` the weights are compared by whoever asks."""
        run_plain(self._flush, check)
        if self._draft is not None:  # a step that is being made, or failed
            self._capture.settle_all(self._draft.backwards)
            self._draft.backwards = ()
        self._capture.settle_all(self._capture.ended)
        self._capture.ended = []

    def flush(self) -> None:
        """Judge the steps that wait for it, and hand on their journal rows."""
        run_plain(self._flush, True)

    def _flush(self, check: bool) -> None:
        waited, self._waiting = len(self._pending), 0
        treated: list[Step] = []  # of every stretch one
        while self._pending:
            steps = self._pending[: alike(self._pending)]
            stretch = Stretch.of(steps)
            if stretch is not None and self._together(stretch):
                treated.append(steps[-1])
            else:
                treated += steps
                self._one_by_one(len(steps))
        rings = [*(one.ring for one in self._capture.routines), *(one.ring for one in self._routines.values())]
        self._at_a_time = min([AT_A_TIME, *(ring.rows for ring in rings)])
        if waited > 1 or self._calm == CALM:  # the next ones are gathered anew
            for ring in rings:
                ring.begin()
        for target in dict.fromkeys(target for step in treated for target, _ in step.seen):
            watch = self._watches[target]
            if not watch.followed:
                watch.resume(None)
                watch.checked = self.steps
            elif check and self.steps - watch.checked >= CHECK_EVERY:
                self._check(target, self.steps)
        if self._scales:
            waiting = {one.backward for target in self._targets.parameters for one in target.passes}
            self._scales = {backward: scale for backward, scale in self._scales.items() if backward in waiting}

    def _one_by_one(self, count: int) -> None:
        """Judge so many of the steps that wait, each on its own."""
        steps, self._pending = self._pending[:count], self._pending[count:]
        for step in steps:
            if step.fits is None:
                self._read(step)
                step.fits = self._judge(step, late=True)
            for target, _ in step.seen:
                target.passes, target.half = [], False
            self._emit(self._row(step, step.fits))

    def _row(self, step: Step, fits: Mapping[Target, Fit]) -> StepRows:
        """The journal row of a step, with the events that it used."""
        row = StepRows.blank(step.optimizer, len(self._targets.parameters), step.others)
        used: list[tuple[int, int, int]] = []
        with_scales: list[float] = []
        for reading in step.readings:
            target, passes = reading.target, reading.passes
            fit = fits.get(target)
            for one, scale in zip(passes, fit.scales if fit else (0.0,) * len(passes), strict=True):
                used.append((one.backward, target.index, 0))
                with_scales.append(scale)
                self._store(row, one)
            if fit:
                self._journal(row, reading, fit, step)
        row.passes, row.scales = np.array(used, dtype=np.int64).reshape(-1, 3), np.array(with_scales, dtype=np.float64)
        for calls in row.calls.values():
            if len(calls) > 1:
                calls.sort(key=lambda call: call.backward)
        return row

    def _store(self, row: StepRows, one: Pass) -> None:
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
                row.calls.setdefault(arrived.use.weight_number, []).append(call)

    def _journal(self, row: StepRows, reading: Reading, fit: Fit, step: Step) -> None:
        target, at = reading.target, reading.target.index
        assert reading.settings is not None and reading.sketch is not None
        settings = reading.settings._replace(l2=fit.l2) if fit.l2 else reading.settings
        row.settings[0, at] = settings.row
        row.flags[0, at] = settings.flags | (0 if fit.explained else UNEXPLAINED) | (HALF if reading.half else 0)
        row.remainders[0, at] = fit.remainder
        row.digests[0, at] = bytes_hash(reading.sketch.data)
        if not fit.explained:
            self._find(target, *what_was_found(reading, fit, step.number, step.number < self.steps))
        # The sketch of the gradient holds any L2 term already, so the plain settings predict the step.
        self._previous[target] = step.gradients[target]
        self._watches[target].follow([reading.settings], step.gradients[target][None])

    def check_all(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Compare every weight with its prediction; the sketches of weights and velocities as they are now."""
        self.catch_up(check=False)
        sketches = {target: target.sketch(target.parameter) for target in self._targets.parameters}
        for target, sketch in sketches.items():
            if self._watches[target].followed:
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
        flat = target.quick_sketch(target.parameter) if sketch is None else sketch.reshape(-1).numpy()
        with np.errstate(all="ignore"):
            deviation = watch.deviation(flat.astype(np.float64))
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


def _weight(target: Target) -> Vector:
    return target.sketch(target.parameter).reshape(-1).numpy()
