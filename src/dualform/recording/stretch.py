"""A stretch of everyday steps: the same layers, parameters and shapes at each, worked out all at once.

What would take a dozen small objects a step takes a few arrays for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from dualform.memory import Call, StepRows
from dualform.memory.files import bytes_hashes
from dualform.memory.slab import Slab
from dualform.optimizers import COLUMNS, Settings
from dualform.recording.calls import Known
from dualform.recording.everyday import everyday_stretch
from dualform.recording.ids import NO_EXAMPLE, Numbers
from dualform.recording.jobs import comparing
from dualform.recording.reading import Step
from dualform.recording.routine import Copied, Sketched
from dualform.recording.swift import Swift
from dualform.recording.targets import Target


@dataclass(frozen=True)
class Stretch:
    """Steps of one optimiser, each with one backward pass that one routine copied, and gradients that one sketched.

    `places` says of every parameter which call put its gradient there.
    """

    steps: Sequence[Step]
    copied: list[Copied]
    sketched: list[Sketched]
    targets: Sequence[Target]
    places: list[int]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Stretch | None:
        """These steps, which are alike, as a stretch; None where such steps have to be judged one by one."""
        if len(steps) < 2 or not _is_plain(steps[0]):
            return None
        copied = [step.backwards[0].copied[0] for step in steps]
        sketched = [step.sketches for step in steps if isinstance(step.sketches, Sketched)]
        first, targets, reached = copied[0], [target for target, _ in steps[0].seen], steps[0].backwards[0].accumulated
        uses = [use for use, _, _ in first.routine.inputs]
        calls = {t: at for at, use in enumerate(uses) for t in (use.weight, use.bias) if t is not None}
        once = len(calls) == sum(1 if use.bias is None else 2 for use in uses)
        whole = calls.keys() == set(targets) and set(map(id, reached)) == {id(target.parameter) for target in targets}
        if not once or not whole or any(target.passes for target in targets):
            return None
        if all(target.equations == 1 for target in targets):
            return None  # single numbers accept any scale
        return cls(steps, copied, sketched, targets, [calls[target] for target in targets])

    def judge(self, swift: Swift) -> tuple[list[float], Float64[np.ndarray, "steps parameters"]] | None:
        """The scale of every step, and what is left of every gradient; None where any step is in doubt."""
        taken = self.copied[0]
        taking = taken.routine
        routine, sketches = self.sketched[0].routine, self.sketched[0].results
        sums = np.empty((len(self.steps), len(self.targets), 3))
        to, of_events, of_sketches = sums.ctypes.data, taken.results.ctypes.data, sketches.ctypes.data
        wide, high = 4 * taken.results.shape[1], 4 * sketches.shape[1]
        of_events, of_sketches = of_events + wide * taken.row, of_sketches + high * self.sketched[0].row
        jobs: list[int] = []
        for at, (target, call) in enumerate(zip(self.targets, self.places, strict=True)):
            jobs += comparing(
                len(self.steps),
                len(target.parameter),
                target.projection is None,
                (of_sketches + 4 * routine.at[at], high),
                (of_events + 4 * taking.at[call], wide),
                (to + 24 * at, sums.strides[0]),
            )
        swift.table(jobs).run()
        with np.errstate(all="ignore"):
            return everyday_stretch(sums)

    def gradients(self, at: int) -> Float32[np.ndarray, "steps _"]:
        """The sketches of one parameter's gradient, a row a step."""
        one = self.sketched[0]
        return one.results[one.row : one.row + len(self.steps), one.routine.at[at] : one.routine.at[at + 1]]

    def settings(self, at: int) -> list[Settings]:
        """The settings of one parameter, step by step."""
        return [settings for step in self.steps if (settings := step.seen[at][1]) is not None]

    def rows(
        self, parameters: int, backward: int, scales: list[float], remainders: Float64[np.ndarray, "steps parameters"],
        numbers: Callable[[Known], Numbers], slab: Slab,
    ) -> StepRows:  # fmt: skip
        """The journal rows of all steps, with their events."""
        steps, indices = len(self.steps), [target.index for target in self.targets]
        settings = slab.zeros((steps, parameters, len(COLUMNS)), np.float64)
        flags, left = slab.zeros((steps, parameters), np.uint8), slab.zeros((steps, parameters), np.float64)
        digests, passes = slab.zeros((steps, parameters), np.int64), slab.empty((steps, len(indices), 3), np.int64)
        left[:, indices] = remainders
        before: list[Settings] | None = None
        for at, index in enumerate(indices):
            each = self.settings(at)
            if each != before:  # the parameters of a group share them
                before, rows, marks = each, np.array([one.row for one in each]), [one.flags for one in each]
            settings[:, index], flags[:, index] = rows, marks
            digests[:, index] = bytes_hashes([sketch.data for sketch in self.gradients(at)])
        number = np.arange(steps)[:, None]
        passes[:, :, 0], passes[:, :, 1], passes[:, :, 2] = backward + number, indices, number
        journal = settings, flags, left, digests, passes.reshape(-1, 3), np.repeat(scales, len(indices))
        calls = dict(self._calls(backward, numbers, slab))
        return StepRows(self.steps[0].optimizer, *journal, [step.others for step in self.steps], calls)

    def _calls(
        self, backward: int, numbers: Callable[[Known], Numbers], slab: Slab
    ) -> Iterator[tuple[int, list[Call]]]:
        """The number of every layer's weight, and all its events."""
        (plan, starts), routine = self.copied[0].room, self.copied[0].routine
        spans = (
            place.narrow(0, start, rows * len(self.steps))
            for (_, place, _, _, rows, _), start in zip(plan, starts, strict=True)
        )
        shared: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        for number, ((use, shape, fixed), (keys, gradients, hashes)) in enumerate(
            zip(routine.inputs, routine.each(spans), strict=True)
        ):
            # Layers whose inputs have the same leading dimensions have the same examples, batch by batch.
            calls = [one.call(number) for one in self.copied]
            of = *use.kind.leading(shape), *[id(call.batch) for call in calls]
            examples, positions = shared.get(of) or _numbered(map(numbers, calls), slab)
            if not (examples == NO_EXAMPLE).any():  # else every layer is told of
                shared[of] = examples, positions
            events = keys, gradients, examples, positions
            call = Call(use.index, backward, *events, fixed, steps=len(self.steps), hashes=hashes)
            yield use.weight_number, [call]


def _numbered(numbers: Iterable[Numbers], slab: Slab) -> tuple[Tensor, Tensor]:
    """The examples and positions of all events of one layer, batch by batch."""
    of_examples, of_positions = zip(*numbers, strict=True)
    both = slab.empty((2, sum(map(len, of_examples))), np.int64)
    np.concatenate(of_examples, out=both[0])
    np.concatenate(of_positions, out=both[1])
    examples, positions = torch.from_numpy(both).unbind(0)
    return examples, positions


def alike(steps: Sequence[Step]) -> int:
    """How many of the first steps are alike: plain, and each right behind the one before; or none of them plain."""
    plain = _is_plain(steps[0])
    count = 1
    for before, step in itertools.pairwise(steps):
        if _is_plain(step) != plain or (plain and not _follows(step, before)):
            break
        count += 1
    return count


def _follows(step: Step, before: Step) -> bool:
    """Whether a plain step is of the same kind as another one, and what was made of it lies right behind."""
    ours, theirs = step.backwards[0], before.backwards[0]
    copied, last = ours.copied[0], theirs.copied[0]
    sketched, sketched_last = step.sketches, before.sketches
    assert isinstance(sketched, Sketched) and isinstance(sketched_last, Sketched)
    plan, starts = copied.room
    return (
        step.optimizer == before.optimizer
        and copied.routine is last.routine
        and copied.results is last.results
        and copied.row == last.row + 1
        and plan is last.room[0]
        and starts == [start + rows for start, (*_, rows, _) in zip(last.room[1], plan, strict=True)]
        and sketched.routine is sketched_last.routine
        and sketched.results is sketched_last.results
        and sketched.row == sketched_last.row + 1
        and len(step.seen) == len(before.seen)
        and len(ours.accumulated) == len(theirs.accumulated)
        and all(map(is_, ours.accumulated, theirs.accumulated))
    )


def _is_plain(step: Step) -> bool:
    """Whether a step had one backward pass, all of which a routine copied, and a routine sketched its gradients."""
    if step.fits is not None or step.readings or step.unscale != 1.0 or len(step.backwards) != 1:
        return False
    backward = step.backwards[0]
    if len(backward.copied) != 1 or backward.copied[0].needed or backward.arrived or backward.settled:
        return False
    return isinstance(step.sketches, Sketched) and None not in [settings for _, settings in step.seen]
