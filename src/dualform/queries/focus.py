"""Focus: which events a question is about, and by which queries they are looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.blocks import Block
from dualform.memory import StoredMemory
from dualform.memory.manifest import WeightRecord
from dualform.queries.reducers import Reducer
from dualform.queries.selection import Selection
from dualform.queries.values import Coefficients


@dataclass(frozen=True)
class Focus:
    """Which events of which weight are looked at, by which queries, at which end step."""

    memory: StoredMemory
    weight: int
    use: int
    queries: Float[Tensor, "queries dim_in"]
    query_shape: tuple[int, ...]
    until: int
    selection: Selection = field(default_factory=Selection)

    @property
    def record(self) -> WeightRecord:
        """What the manifest says of the weight."""
        return self.memory.manifest.weights[self.weight]

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of the events at the end step, and those of the bias of this use."""
        return Coefficients.of(self.memory, self.weight, self.record.uses[self.use].bias, self.until)

    def blocks(self) -> Iterator[Block]:
        """The selected events, block by block."""
        for block in self.memory.blocks(self.weight, self.until):
            yield self.selection.apply(block)

    def segments(self) -> Iterator[Iterator[Block]]:
        """The events of every segment, selected or not, block by block."""
        for segment in self.memory.manifest.segments:
            if segment.first_step <= self.until and segment.events[self.weight]:
                last = min(segment.last_step, self.until)
                yield self.memory.blocks(self.weight, last, since=segment.first_step - 1)

    def reduce(self, reducer: Reducer) -> int:
        """Run a reducer over all selected events; how many rows were read."""
        rows = 0
        for block in self.blocks():
            rows += len(block)
            if len(block):
                reducer.update(block)
        return rows

    def narrowed(self, where: dict[str, Any]) -> Focus:
        """The same queries over fewer events."""
        return dataclasses.replace(self, selection=self.selection.narrowed(self.memory, where))

    def without(self, columns: dict[str, Any]) -> Focus:
        """The same queries over all other events."""
        return dataclasses.replace(self, selection=self.selection.without(self.memory, columns))

    def picked(self, index: Any) -> Focus:
        """Fewer queries over the same events; `index` is an index into the query shape."""
        numbers = torch.arange(len(self.queries)).reshape(self.query_shape)[index]
        return dataclasses.replace(self, queries=self.queries[numbers.reshape(-1)], query_shape=tuple(numbers.shape))
