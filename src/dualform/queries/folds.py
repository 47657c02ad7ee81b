"""Folds: the events of a memory put back into weights."""

from __future__ import annotations

from jaxtyping import Float64
from torch import Tensor

from dualform.memory import StoredMemory
from dualform.queries.keyframes import Keyframes
from dualform.queries.selection import Selection
from dualform.queries.values import fold


class Folds:
    """Rebuilt parameters of a memory; the last ones without a mask are remembered."""

    def __init__(self, memory: StoredMemory) -> None:
        self._memory = memory
        self.keyframes = Keyframes(memory)
        self._last: tuple[int, dict[str, Tensor]] | None = None

    def parameters(self, until: int, selection: Selection) -> dict[str, Float64[Tensor, "..."]]:
        """c_0 W0 + d_0 v_0 + Σ (the selected events' part) of every recorded parameter, in fp64."""
        if selection:
            return self.whole(until, selection)
        if self._last is None or self._last[0] != until:
            self._last = (until, self.keyframes.at(until).weights)
        return self._last[1]

    def whole(self, until: int, selection: Selection) -> dict[str, Float64[Tensor, "..."]]:
        """The same from every event, in one sum, past any keyframe: what a certificate is measured with."""
        memory = self._memory
        rebuilt = self.untouched_all(until)
        for weight, record in enumerate(memory.manifest.weights):
            total, biases = fold(memory, weight, until, selection)
            rebuilt[record.name] = rebuilt[record.name] + total
            for name, part in biases.items():
                rebuilt[name] = rebuilt[name] + part
        if not selection:
            self._last = (until, rebuilt)
        return rebuilt

    def untouched_all(self, until: int) -> dict[str, Float64[Tensor, "..."]]:
        """The part of every parameter that no event made."""
        return {record.name: self.untouched(record.name, until) for record in self._memory.manifest.parameters}

    def untouched(self, parameter: str, until: int) -> Float64[Tensor, "..."]:
        """c_0 W0 + d_0 v_0: the part of a parameter that no event made."""
        memory = self._memory
        found = memory.journal.coefficients(memory.manifest.parameter(parameter), until)
        part = found.initial * memory.initial(parameter).double()
        velocity = memory.velocity(parameter)
        return part if velocity is None else part + found.velocity * velocity.double()
