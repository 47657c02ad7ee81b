"""States: every parameter and its velocity after a step, how they move on, and how they are kept."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from dualform.errors import DamagedMemory
from dualform.memory import StoredMemory
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.optimizers import Coefficients
from dualform.queries.selection import Selection
from dualform.queries.values import fold

logger = logging.getLogger("dualform")


@dataclass(frozen=True)
class State:
    """Recorded parameters after a step, and their velocities where they have one; in fp64."""

    step: int
    weights: dict[str, Float64[Tensor, "..."]]
    velocities: dict[str, Float64[Tensor, "..."]]

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.velocities.values()))

    def carried(self, name: str, found: Coefficients) -> Float64[Tensor, "..."]:
        """What is left of a parameter and its velocity at a later step, without the events between."""
        part = found.initial * self.weights[name]
        if name in self.velocities and found.velocity != 0:
            part = part + found.velocity * self.velocities[name]
        return part

    def __sub__(self, other: State) -> State:
        """What is left without a part of it."""
        return State(self.step, _less(self.weights, other.weights), _less(self.velocities, other.velocities))


def _less(whole: dict[str, Tensor], part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one - part[name] if name in part else one for name, one in whole.items()}


def advance(memory: StoredMemory, state: State, until: int, selection: Selection, velocities: bool = False) -> State:
    """The state after step `until` from an earlier one and the selected events between."""
    moved: dict[bool, dict[str, Tensor]] = {False: {}, True: {}} if velocities else {False: {}}
    for velocity, parts in moved.items():
        for at, parameter in enumerate(memory.manifest.parameters):
            found = memory.journal.coefficients(at, until, velocity, state.step)
            parts[parameter.name] = state.carried(parameter.name, found)
        for weight, record in enumerate(memory.manifest.weights):
            total, biases = fold(memory, weight, until, selection, velocity, state.step)
            for name, part in {record.name: total, **biases}.items():
                parts[name] = parts[name] + part
    return State(until, moved[False], moved.get(True, {}))


def write_state(memory: StoredMemory, file: str, state: State, fingerprint: str) -> bool:
    """Keep a state in a file of a derived part; False where it cannot be written."""
    tensors = {f"weight/{name}": tensor for name, tensor in state.weights.items()}
    tensors |= {f"velocity/{name}": tensor for name, tensor in state.velocities.items()}
    path = memory.path / file
    try:
        disk.make_directory(path.parent)
        write_sealed(path, tensors, {"fingerprint": fingerprint})
    except OSError as error:
        logger.info("%s is not kept: %s", path, error)
        return False
    return True


def read_state(memory: StoredMemory, file: str, step: int, fingerprint: str) -> State | None:
    """A state as it was kept; None, and removed, where it is damaged or has another fingerprint."""
    path = memory.path / file
    if not path.exists():
        return None
    try:
        found = TensorFile(memory.path, file=file)
        if found.metadata.get("fingerprint") == fingerprint:
            kinds: dict[str, dict[str, Tensor]] = {"weight": {}, "velocity": {}}
            for tensor in found.names():
                kind, _, parameter = tensor.partition("/")
                kinds[kind][parameter] = found.read(tensor)
            return State(step, kinds["weight"], kinds["velocity"])
    except (DamagedMemory, KeyError):
        logger.info("%s is damaged and made anew", path)
    with contextlib.suppress(OSError):
        disk.remove(path)
    return None
