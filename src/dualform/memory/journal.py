"""The journal: the per-step scalars of a run, and hashes and sketches of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from dualform.memory.manifest import SegmentRecord
from dualform.memory.mapped import TensorFile
from dualform.optimizers import COLUMNS, Coefficients, coefficients

SWEPT = 64  # end steps whose coefficients are remembered, over all parameters


@dataclass(frozen=True)
class Call:
    """The events that one use of a weight made in one backward pass: a row each, in the order of the input.

    `fixed` says that the keys depend on no trained parameter, so that they may come again. `nonfinite` counts the
    events with a NaN or an infinity. `gradients` is None where the keep level has none. With `steps` above 1 it stands
    for as many such calls, with as many events each, in steps and backward passes that follow each other.
    """

    use: int
    backward: int
    keys: Float[Tensor, "events dim_in"]
    gradients: Float[Tensor, "events dim_out"] | None
    examples: Int64[Tensor, " events"]
    positions: Int64[Tensor, " events"]
    fixed: bool = False
    nonfinite: int = 0
    steps: int = 1

    def counts(self, step: int) -> list[tuple[int, int, int, int]]:
        """Step, backward, use and events of every call, the first of which belongs to `step`."""
        events = len(self.keys) // self.steps
        return [(step + at, self.backward + at, self.use, events) for at in range(self.steps)]

    @property
    def bytes(self) -> int:
        """What it takes to store it."""
        values = 0 if self.gradients is None else self.gradients.nbytes
        return self.keys.nbytes + values + 2 * self.examples.nbytes


class PassRow(NamedTuple):
    """With which scale a step took up the gradient that one backward pass left in one parameter."""

    backward: int
    parameter: int
    scale: float


@dataclass
class StepRow:
    """One step of one optimiser, for all journalled parameters: its settings, its probe, its events."""

    optimizer: int
    settings: Float64[np.ndarray, "parameters columns"]
    flags: UInt8[np.ndarray, " parameters"]
    remainders: Float64[np.ndarray, " parameters"]
    digests: Int64[np.ndarray, " parameters"]
    passes: list[PassRow] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def blank(cls, optimizer: int, parameters: int) -> StepRow:
        """A step in which nothing happened to any parameter."""
        return cls(
            optimizer,
            np.zeros((parameters, len(COLUMNS))),
            np.zeros(parameters, dtype=np.uint8),
            np.zeros(parameters),
            np.zeros(parameters, dtype=np.int64),
        )


def journal_tensors(rows: Sequence[StepRow], first_step: int) -> dict[str, list[Tensor]]:
    """The journal's part of a segment."""
    passes = [(row, first_step + at) for at, step in enumerate(rows) for row in step.passes]
    numbers = [(row.backward, row.parameter, step) for row, step in passes]
    stacked = {
        "journal/optimizer": torch.tensor([row.optimizer for row in rows], dtype=torch.int64),
        "journal/settings": torch.from_numpy(np.stack([row.settings for row in rows])),
        "journal/flags": torch.from_numpy(np.stack([row.flags for row in rows])),
        "journal/remainders": torch.from_numpy(np.stack([row.remainders for row in rows])),
        "journal/digests": torch.from_numpy(np.stack([row.digests for row in rows])),
        "journal/passes": torch.tensor(numbers, dtype=torch.int64).reshape(-1, 3),
        "journal/scales": torch.tensor([row.scale for row, _ in passes], dtype=torch.float64),
    }
    return {name: [tensor] for name, tensor in stacked.items()}


class Journal:
    """The journal of all committed steps, read from the segments."""

    def __init__(self, segments: Sequence[tuple[TensorFile, SegmentRecord]], parameters: int) -> None:
        self._segments = segments
        self._parameters = parameters
        self._swept: dict[tuple[int, int, bool, int], Coefficients] = {}

    def _joined(self, name: str, empty: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        parts = [file.read(name, 0, 1 + one.last_step - one.first_step) for file, one in self._segments]
        return torch.cat(parts) if parts else torch.empty(empty, dtype=dtype)

    @cached_property
    def settings(self) -> Float64[np.ndarray, "steps parameters columns"]:
        """Learning rate, momentum, … of every step for every parameter (see optimizers.COLUMNS)."""
        empty = (0, self._parameters, len(COLUMNS))
        return self._joined("journal/settings", empty, torch.float64).numpy()

    @cached_property
    def optimizers(self) -> Int64[np.ndarray, " steps"]:
        """The number of the optimiser that made each step."""
        return self._joined("journal/optimizer", (0,), torch.int64).numpy()

    @cached_property
    def flags(self) -> UInt8[np.ndarray, "steps parameters"]:
        """The flags of every step for every parameter (see optimizers)."""
        return self._joined("journal/flags", (0, self._parameters), torch.uint8).numpy()

    @cached_property
    def remainders(self) -> Float64[np.ndarray, "steps parameters"]:
        """What the probe left unexplained of every gradient, relative."""
        return self._joined("journal/remainders", (0, self._parameters), torch.float64).numpy()

    @cached_property
    def digests(self) -> Int64[np.ndarray, "steps parameters"]:
        """A hash of every gradient's sketch: two runs are the same exactly as long as these are equal."""
        return self._joined("journal/digests", (0, self._parameters), torch.int64).numpy()

    @cached_property
    def _passes(self) -> tuple[Int64[np.ndarray, "passes 3"], Float64[np.ndarray, " passes"]]:
        numbers, scales = [np.zeros((0, 3), dtype=np.int64)], [np.zeros(0)]
        for file, one in self._segments:
            passes = file.read("journal/passes").numpy()
            valid = passes[:, 2] <= one.last_step
            numbers.append(passes[valid])
            scales.append(file.read("journal/scales").numpy()[valid])
        return np.concatenate(numbers), np.concatenate(scales)

    def is_clean(self, step: int) -> bool:
        """Whether no step after this one uses events of it or before: a bias may be stepped later than its weight."""
        first, last = self._spans
        return not bool(((first <= step) & (last > step)).any())

    @cached_property
    def _spans(self) -> tuple[Int64[np.ndarray, " backwards"], Int64[np.ndarray, " backwards"]]:
        """The first and the last step that uses each backward pass."""
        numbers, _ = self._passes
        first = np.full(self.backwards, np.iinfo(np.int64).max)
        last = np.zeros(self.backwards, dtype=np.int64)
        np.minimum.at(first, numbers[:, 0], numbers[:, 2])
        np.maximum.at(last, numbers[:, 0], numbers[:, 2])
        return first, last

    @property
    def backwards(self) -> int:
        """One more than the largest number of a backward pass."""
        numbers, _ = self._passes
        return int(numbers[:, 0].max()) + 1 if len(numbers) else 0

    def coefficients(self, parameter: int, until: int, velocity: bool = False, since: int = 0) -> Coefficients:
        """c_0, d_0 and c_s of a parameter, or of its velocity, for the end step `until`, from the state at `since`."""
        asked = (parameter, until, velocity, since)
        if asked not in self._swept:
            if len(self._swept) >= SWEPT:
                self._swept.pop(next(iter(self._swept)))
            stretch = slice(since, until)
            self._swept[asked] = coefficients(
                self.settings[stretch, parameter], self.flags[stretch, parameter], velocity
            )
        return self._swept[asked]

    def event_coefficients(
        self, parameter: int, until: int, velocity: bool = False, since: int = 0
    ) -> Float64[Tensor, " backwards"]:
        """c of an event by the number of its backward pass: value = c · gradient; 0 for a pass not used."""
        numbers, scales = self._passes
        table = np.zeros(self.backwards)
        chosen = (numbers[:, 1] == parameter) & (numbers[:, 2] <= until) & (numbers[:, 2] > since)
        steps = self.coefficients(parameter, until, velocity, since).steps
        np.add.at(table, numbers[chosen, 0], scales[chosen] * steps[numbers[chosen, 2] - 1 - since])
        return torch.from_numpy(table)
