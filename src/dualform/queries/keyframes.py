"""Keyframes: weights and velocities after some steps, so that time travel folds only the events since.

A derived part: rebuilt from the events alone, kept in derived/keyframes, and made anew where it is missing, damaged or
of another run. Deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import xxhash
from jaxtyping import Float64
from torch import Tensor
from tqdm import tqdm

from dualform.errors import DamagedMemory
from dualform.memory import StoredMemory
from dualform.memory.derived import KEYFRAME, KEYFRAMES
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.optimizers import Coefficients
from dualform.queries.selection import Selection
from dualform.queries.values import fold

logger = logging.getLogger("dualform")
OPERATIONS = 3e10  # multiplications and additions between two keyframes: about half a second


@dataclass(frozen=True)
class State:
    """Every recorded parameter after a step, and its velocity where it has one; in fp64."""

    step: int
    weights: dict[str, Float64[Tensor, "..."]]
    velocities: dict[str, Float64[Tensor, "..."]]

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.velocities.values()))


class Keyframes:
    """The states of one memory after some of its steps."""

    def __init__(self, memory: StoredMemory) -> None:
        self._memory = memory
        self._remembered: set[int] = set()

    def at(self, until: int) -> State:
        """The state after step `until`, from the last keyframe before it; keyframes on the way are kept."""
        state = self._before(until)
        spacing = self.spacing
        between = range(state.step // spacing * spacing + spacing, until, spacing)
        stops = [*(step for step in between if self._memory.journal.is_clean(step)), until]
        for stop in tqdm(stops, "rebuilding", unit="stretch", disable=None if len(stops) > 3 else True, leave=False):
            if stop > state.step:
                kept = stop % spacing == 0 and self._memory.journal.is_clean(stop)
                state = self._advance(state, stop, velocities=kept or stop < until)
                if kept:
                    self._keep(state)
        return state

    @property
    def spacing(self) -> int:
        """Steps between keyframes, by how much work a step is."""
        manifest = self._memory.manifest
        work = sum(2.0 * manifest.events(at) * w.dim_in * w.dim_out for at, w in enumerate(manifest.weights))
        return max(1, math.ceil(OPERATIONS * max(manifest.steps, 1) / max(work, 1.0)))

    def _before(self, until: int) -> State:
        there = sorted({*self._remembered, *_steps(self._memory.path)}, reverse=True)
        for step in (step for step in there if 0 < step <= until and self._memory.journal.is_clean(step)):
            state = self._memory.room.find(("state", step)) or self._read(step)
            if state is not None:
                return self._remember(state)
        return self._initial()

    def _initial(self) -> State:
        names = [record.name for record in self._memory.manifest.parameters]
        velocities = {name: self._memory.velocity(name) for name in names}
        return State(
            0,
            {name: self._memory.initial(name).double() for name in names},
            {name: velocity.double() for name, velocity in velocities.items() if velocity is not None},
        )

    def _remember(self, state: State) -> State:
        self._remembered.add(state.step)
        self._memory.room.keep(("state", state.step), state, state.bytes)
        return state

    def _advance(self, state: State, until: int, velocities: bool) -> State:
        """The state after step `until` from an earlier one and the events between."""
        memory = self._memory
        moved: dict[bool, dict[str, Tensor]] = {False: {}, True: {}} if velocities else {False: {}}
        for velocity, parts in moved.items():
            for at, parameter in enumerate(memory.manifest.parameters):
                found = memory.journal.coefficients(at, until, velocity, state.step)
                parts[parameter.name] = _carried(found, state, parameter.name)
            for weight, record in enumerate(memory.manifest.weights):
                total, biases = fold(memory, weight, until, Selection(), velocity, state.step)
                for name, part in {record.name: total, **biases}.items():
                    parts[name] = parts[name] + part
        return State(until, moved[False], moved.get(True, {}))

    def _fingerprint(self, step: int) -> str:
        """What the state after a step depends on: the run, and the segments up to that step."""
        manifest = self._memory.manifest
        segments = [s.file.checksums for s in manifest.segments if s.first_step <= step]
        return xxhash.xxh3_64_hexdigest(json.dumps([manifest.id, step, manifest.initial.checksums, segments]).encode())

    def _keep(self, state: State) -> None:
        self._remember(state)
        tensors = {f"weight/{name}": tensor for name, tensor in state.weights.items()}
        tensors |= {f"velocity/{name}": tensor for name, tensor in state.velocities.items()}
        path = self._memory.path / KEYFRAME.format(state.step)
        try:
            disk.make_directory(path.parent)
            write_sealed(path, tensors, {"fingerprint": self._fingerprint(state.step)})
        except OSError as error:
            logger.info("no keyframe of step %d is kept: %s", state.step, error)

    def _read(self, step: int) -> State | None:
        """A keyframe as it was kept; None, and removed, where it is damaged or of another run."""
        name = KEYFRAME.format(step)
        try:
            file = TensorFile(self._memory.path, file=name)
            if file.metadata.get("fingerprint") == self._fingerprint(step):
                parts: dict[str, dict[str, Tensor]] = {"weight": {}, "velocity": {}}
                for tensor in file.names():
                    kind, _, parameter = tensor.partition("/")
                    parts[kind][parameter] = file.read(tensor)
                return State(step, parts["weight"], parts["velocity"])
        except (DamagedMemory, KeyError):
            logger.info("%s is damaged and made anew", self._memory.path / name)
        with contextlib.suppress(OSError):
            disk.remove(self._memory.path / name)
        return None


def _steps(root: Path) -> list[int]:
    return [int(path.stem) for path in (root / KEYFRAMES).glob("*.safetensors") if path.stem.isdigit()]


def _carried(found: Coefficients, state: State, name: str) -> Float64[Tensor, "..."]:
    part = found.initial * state.weights[name]
    if name in state.velocities and found.velocity != 0:
        part = part + found.velocity * state.velocities[name]
    return part
