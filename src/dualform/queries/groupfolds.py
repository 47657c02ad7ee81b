"""Folds of groups: what the events of every group made of every parameter, so that any mask of groups is a sum.

They are made for some steps, the marks, so that a mask at any step folds only the events since the last mark. They
are a derived part, in derived/folds: made at first use, and made anew where a file is damaged, of another run or of
other groups. Deleting them loses nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from tqdm import tqdm

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.memory import StoredMemory
from dualform.memory.derived import FOLD
from dualform.memory.disk import disk
from dualform.queries.folds import Folds
from dualform.queries.selection import Grouping, Selection
from dualform.queries.states import State, advance, read_state, write_state
from dualform.queries.sums import one_event_each
from dualform.queries.values import Coefficients, parameters_of, require_values

VERSION = 2
MOST = 64  # groups
STRIDE = 10  # keyframes from one mark to the next
FORGOTTEN = 2.0**-80  # against the largest coefficient: less than any rounding


@dataclass(frozen=True)
class GroupFolds:
    """States of groups: for every parameter the part that each group's events made of it, in fp64.

    They are [groups + 1, …]: the last is of the events that are in no group.
    """

    grouping: Grouping
    _memory: StoredMemory
    _folds: Folds

    @property
    def at_hand(self) -> bool:
        """Whether the parts at the last step are there already."""
        kept = self._memory.room.find(self._key(None)) is not None
        return kept or (self._memory.path / self._file(self._memory.steps)).exists()

    def last(self) -> State:
        """The parts at the last step."""
        key, steps = self._key(None), self._memory.steps
        return self._memory.room.get(key, lambda: self._state(steps), lambda state: state.bytes)

    def without(self, groups: Iterable[int], until: int) -> dict[str, Float64[Tensor, "..."]]:
        """Every parameter after a step, without the events of some groups.

        The whole less what they made, or what the others made, whichever folds fewer events since the last mark.
        """
        left_out = sorted(set(groups))
        if until == self._memory.steps:
            kept = [at for at in range(len(self.grouping.groups) + 1) if at not in left_out]
            untouched = self._folds.untouched_all(until)
            return {name: untouched[name] + part[kept].sum(dim=0) for name, part in self.last().weights.items()}
        mark = max((mark for mark in self._marks() if mark <= until), default=0)
        parts = self._state(mark)
        made = State(mark, _summed(parts.weights, left_out), _summed(parts.velocities, left_out))
        chosen = torch.isin(self._of_examples, torch.tensor(left_out, dtype=torch.int64))
        if 2 * int(chosen.sum()) <= len(chosen):
            made = advance(self._memory, made, until, Selection().narrowed(self._memory, {"example": chosen}))
            return (State(until, self._folds.parameters(until, Selection()), {}) - made).weights
        rest = self._folds.keyframes.at(mark) - made
        return advance(self._memory, rest, until, Selection().without(self._memory, {"example": chosen})).weights

    def _marks(self) -> list[int]:
        steps, every = self._memory.steps, STRIDE * self._folds.keyframes.spacing
        return [*filter(self._memory.journal.is_clean, range(every, steps, every)), steps]

    @cached_property
    def _of_examples(self) -> Int64[Tensor, " examples"]:
        """The group of every example."""
        return self.grouping.codes(one_event_each(self._memory.manifest.examples))[:-1]

    def _state(self, mark: int) -> State:
        """The parts after a mark, read or made, and those of the marks before it on the way."""
        marks = [one for one in self._marks() if one <= mark]
        there = (found for one in reversed(marks) if (found := self._find(one)) is not None)
        state = next(there, None) or self._zero()
        ahead = [one for one in marks if one > state.step]
        weights = range(len(self._memory.manifest.weights))
        total = sum(self._memory.events(at, mark) - self._memory.events(at, state.step) for at in weights)
        options = {"unit": "event", "unit_scale": True, "leave": False, "disable": None if ahead else True}
        with tqdm(total=total, desc="folding groups", **options) as progress:
            for one in ahead:
                state = self._next(state, one, progress)
                if not self._keep(state):
                    self._memory.room.keep(self._key(one), state, state.bytes)
        return state

    def _find(self, mark: int) -> State | None:
        found: State | None = self._memory.room.find(self._key(mark))
        return found or read_state(self._memory, self._file(mark), mark, self._fingerprint(mark))

    def _key(self, mark: int | None) -> tuple[object, ...]:
        """Under which the parts after a mark are kept at hand; None is the last step, whichever that is."""
        return ("group folds", self.grouping.key, mark)

    def _zero(self) -> State:
        groups, parameters = len(self.grouping.groups) + 1, self._memory.manifest.parameters
        return State(0, {one.name: torch.zeros(groups, *one.shape, dtype=torch.float64) for one in parameters}, {})

    def _next(self, state: State, until: int, progress: tqdm) -> State:
        """The parts after a later mark, in one pass over the events between."""
        memory = self._memory
        weights, velocities = {}, {}
        for at, parameter in enumerate(memory.manifest.parameters):
            name = parameter.name
            weights[name] = state.carried(name, memory.journal.coefficients(at, until, False, state.step))
            of_velocity = memory.journal.coefficients(at, until, True, state.step)
            # After the last step nothing moves on.
            if until < memory.steps and (of_velocity.initial or of_velocity.velocity or of_velocity.steps.any()):
                velocities[name] = state.carried(name, of_velocity)
        for weight in range(len(memory.manifest.weights)):
            sums = [
                _Sums(memory, weight, until, velocity, state.step, parts)
                for velocity, parts in ((False, weights), (True, velocities))
            ]
            for block in memory.blocks(weight, until, since=state.step):
                codes = self.grouping.codes(block)
                codes = codes.where(codes >= 0, len(self.grouping.groups))
                for one in sums:
                    one.add(block, codes)
                progress.update(len(block))
        return State(until, weights, velocities)

    def _file(self, mark: int) -> str:
        return FOLD.format(xxhash.xxh3_64_hexdigest("/".join(self.grouping.names).encode()), mark)

    def _fingerprint(self, mark: int) -> str:
        """What the parts after a mark depend on: the run, its segments, and who is in which group."""
        manifest = self._memory.manifest
        segments = [record.text for record in manifest.segments if record.first_step <= mark]
        # An annotation may put an example into another group.
        codes = xxhash.xxh3_64_hexdigest(self._of_examples.numpy().tobytes())
        last = mark == self._memory.steps  # is kept without velocities
        content = json.dumps([VERSION, manifest.id, mark, last, manifest.initial.checksums, segments, codes])
        return xxhash.xxh3_64_hexdigest(content.encode())

    def _keep(self, state: State) -> bool:
        """Write the parts after a mark, in place of those of a last step that is no longer the last."""
        if not write_state(self._memory, self._file(state.step), state, self._fingerprint(state.step)):
            return False
        folder = (self._memory.path / self._file(state.step)).parent
        wanted = {self._memory.path / self._file(mark) for mark in self._marks()}
        for other in {*folder.glob("*.safetensors")} - wanted:
            with contextlib.suppress(OSError):
                disk.remove(other)
        return True


class _Sums:
    """Σ e_t ⊗ x_t of every group, and Σ c^b g_t for every bias, added to the parts of the weights or velocities."""

    def __init__(
        self, memory: StoredMemory, weight: int, until: int, velocity: bool, since: int, parts: dict[str, Tensor]
    ) -> None:
        self._name, *biases = parameters_of(memory, weight)
        self._parts = parts
        self._own = Coefficients.of(memory, weight, None, until, velocity, since)
        # Of a velocity most is long forgotten.
        self._least = FORGOTTEN * float(self._own.weight.abs().max()) if len(self._own.weight) else 0.0
        self._biases = {
            bias: Coefficients.of(memory, weight, bias, until, velocity, since) for bias in biases if bias in parts
        }

    def add(self, block: Block, codes: Int64[Tensor, " events"]) -> None:
        """Take in the events of a block, whose groups are `codes`."""
        assert block.gradients is not None
        own, _ = self._own.of_events(block)
        if self._name in self._parts:
            # A pass that was dropped has coefficient 0, and may hold infinities.
            for code, chosen in _by_code(codes, own.abs() > self._least):
                values = block.gradients[chosen].double() * own[chosen, None]
                self._parts[self._name][code].addmm_(values.T, block.keys[chosen].double())
        for bias, table in self._biases.items():
            _, of_bias = table.of_events(block)
            used = of_bias != 0
            self._parts[bias].index_add_(0, codes[used], block.gradients[used].double() * of_bias[used, None])


def _by_code(
    codes: Int64[Tensor, " events"], used: Bool[Tensor, " events"]
) -> Iterator[tuple[int, Int64[Tensor, " chosen"]]]:
    """The used events of every group that has some."""
    order = codes.argsort(stable=True)
    order = order[used[order]]
    found, counts = codes[order].unique_consecutive(return_counts=True)
    yield from zip(found.tolist(), order.split(counts.tolist()), strict=True)


def _summed(parts: dict[str, Tensor], groups: list[int]) -> dict[str, Tensor]:
    return {name: part[groups].sum(dim=0) for name, part in parts.items()}


def group_folds(memory: StoredMemory, folds: Folds, columns: tuple[str, ...]) -> GroupFolds:
    """The folds of groups by some columns of examples."""
    grouping = Grouping.by(memory, columns)
    if len(grouping.groups) > MOST or not grouping.by_example:
        raise BadQuery(
            f"{', '.join(columns)} makes {len(grouping.groups):,} groups; at most {MOST} groups of examples are folded."
        )
    for weight in range(len(memory.manifest.weights)):
        require_values(memory, weight, "a mask")
    return GroupFolds(grouping, memory, folds)
