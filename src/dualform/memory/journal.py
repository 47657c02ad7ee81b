"""The journal: the per-step scalars of a run, and hashes and sketches of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
    for as many such calls, with as many events each, in steps and backward passes that follow each other. `hashes` are
    those of the keys (see ledger.py) where they were taken when the keys were copied.
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
    hashes: Int64[Tensor, "events 2"] | None = None

    def counts(self, step: int) -> list[tuple[int, int, int, int]]:
        """Step, backward, use and events of every call, the first of which belongs to `step`."""
        events = len(self.keys) // self.steps
        return [(step + at, self.backward + at, self.use, events) for at in range(self.steps)]

    @property
    def bytes(self) -> int:
        """What it takes to store it."""
        values = 0 if self.gradients is None else self.gradients.nbytes
        return self.keys.nbytes + values + 2 * self.examples.nbytes


@dataclass
class StepRows:
    """Steps of one optimiser, a row each, for all journalled parameters: their settings, their probe, their events.

    `passes` say whose gradient a step took up: the backward pass, the parameter in which it left that, and the step's
    row; `scales` say with which scale. `calls` are those of every weight, and `others` what was noted at every step.
    """

    optimizer: int
    settings: Float64[np.ndarray, "steps parameters columns"]
    flags: UInt8[np.ndarray, "steps parameters"]
    remainders: Float64[np.ndarray, "steps parameters"]
    digests: Int64[np.ndarray, "steps parameters"]
    passes: Int64[np.ndarray, "passes 3"]
    scales: Float64[np.ndarray, " passes"]
    others: Sequence[Mapping[str, Tensor]]
    calls: dict[int, list[Call]] = field(default_factory=dict)

    @classmethod
    def blank(cls, optimizer: int, parameters: int, others: Mapping[str, Tensor]) -> StepRows:
        """One step in which nothing happened to any parameter."""
        return cls(
            optimizer,
            np.zeros((1, parameters, len(COLUMNS))),
            np.zeros((1, parameters), dtype=np.uint8),
            np.zeros((1, parameters)),
            np.zeros((1, parameters), dtype=np.int64),
            np.zeros((0, 3), dtype=np.int64),
            np.zeros(0),
            [others],
        )

    def __len__(self) -> int:
        return len(self.flags)


def journal_tensors(rows: Sequence[StepRows], first_step: int) -> dict[str, list[Tensor]]:
    """The journal's part of a segment."""
    steps = [len(each) for each in rows]
    passes = np.concatenate([each.passes for each in rows])
    firsts = np.cumsum([first_step, *steps[:-1]])
    passes[:, 2] += np.repeat(firsts, [len(each.passes) for each in rows])
    joined = {
        "optimizer": np.repeat([each.optimizer for each in rows], steps),
        "settings": np.concatenate([each.settings for each in rows]),
        "flags": np.concatenate([each.flags for each in rows]),
        "remainders": np.concatenate([each.remainders for each in rows]),
        "digests": np.concatenate([each.digests for each in rows]),
        "passes": passes,
        "scales": np.concatenate([each.scales for each in rows]),
    }
    return {f"journal/{name}": [torch.from_numpy(array)] for name, array in joined.items()}


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
