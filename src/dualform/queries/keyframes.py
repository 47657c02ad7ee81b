"""Keyframes: weights and velocities after some steps, so that time travel folds only the events since.

A derived part: rebuilt from the events alone, kept in derived/keyframes, and made anew where it is missing, damaged or
of another run. Deleting it loses nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import xxhash
from tqdm import tqdm

from dualform.memory import StoredMemory
from dualform.memory.derived import KEYFRAME, KEYFRAMES
from dualform.queries.selection import Selection
from dualform.queries.states import State, advance, read_state, write_state

OPERATIONS = 3e10  # multiplications and additions between two keyframes: about half a second


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
                state = advance(self._memory, state, stop, Selection(), velocities=kept or stop < until)
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

    def _fingerprint(self, step: int) -> str:
        """What the state after a step depends on: the run, and the segments up to that step."""
        manifest = self._memory.manifest
        segments = [s.file.checksums for s in manifest.segments if s.first_step <= step]
        return xxhash.xxh3_64_hexdigest(json.dumps([manifest.id, step, manifest.initial.checksums, segments]).encode())

    def _keep(self, state: State) -> None:
        self._remember(state)
        write_state(self._memory, KEYFRAME.format(state.step), state, self._fingerprint(state.step))

    def _read(self, step: int) -> State | None:
        return read_state(self._memory, KEYFRAME.format(step), step, self._fingerprint(step))


def _steps(root: Path) -> list[int]:
    return [int(path.stem) for path in (root / KEYFRAMES).glob("*.safetensors") if path.stem.isdigit()]
