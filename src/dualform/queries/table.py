"""The numbers of every event of a weight, without keys and gradients: what conditions and groups look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.memory import StoredMemory
from dualform.memory.segment import read_numbers

BYTES = 48  # of every event


@dataclass(frozen=True)
class Table:
    """All events of a weight up to a step, a row each; `keys` are the numbers of their keys, None where these agree."""

    block: Block
    keys: Int64[Tensor, " events"] | None

    @classmethod
    def of(cls, memory: StoredMemory, weight: int) -> Table:
        """The events of a weight in all steps."""
        blocks: list[Block] = []
        keys: list[Tensor] = []
        for file, record in memory.segments:
            if record.events[weight]:
                block, numbers = read_numbers(file, record, weight)
                blocks.append(block)
                keys.append(numbers)
        fields = ("events", "steps", "backwards", "examples", "positions", "uses")
        joined = {name: torch.cat([getattr(block, name) for block in blocks]) for name in fields} if blocks else {}
        nothing = torch.empty(0, dtype=torch.int64)
        joined = joined or dict.fromkeys(fields, nothing)
        numbers = torch.cat([nothing, *keys])
        block = Block(keys=torch.empty(len(numbers), 0), gradients=None, **joined)
        return cls(block, None if numbers.equal(block.events) else numbers)

    def __len__(self) -> int:
        return len(self.block)

    @property
    def columns(self) -> tuple[Int64[Tensor, " events"], ...]:
        """What an answer says of an event, in the order of `Top.FIELDS`."""
        block = self.block
        return block.events, block.examples, block.steps, block.positions, block.uses

    @cached_property
    def arrays(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
        """The same columns as the compiled loops read them."""
        return tuple(column.numpy() for column in self.columns)

    @cached_property
    def _by_key(self) -> tuple[Int64[Tensor, " events"], Int64[Tensor, " keys_and_one"]]:
        """The events of every key, one key's after the other's, and where each key's begin."""
        assert self.keys is not None
        counts = torch.bincount(self.keys)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return self.keys.argsort(stable=True), starts

    def keys_of(self, events: Bool[Tensor, " events"], count: int) -> Bool[Tensor, " keys"]:
        """Which of so many keys have one of the chosen events."""
        if self.keys is None:
            return events
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[self.keys[events]] = True
        return chosen

    def events_of(self, numbers: Int64[Tensor, " keys"]) -> tuple[Int64[Tensor, " events"], Int64[Tensor, " events"]]:
        """The events of some keys, and for each event which of the keys it has; where several share one."""
        order, starts = self._by_key
        counts = starts[numbers + 1] - starts[numbers]
        which = torch.repeat_interleave(torch.arange(len(numbers)), counts)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])[:-1]
        return order[starts[numbers][which] + torch.arange(len(which)) - before[which]], which
