"""What a search looks at: rows of a shadow, in descending order of the largest score they can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import LANES
from dualform.queries.shadow import Arrays, Levels, Shadow, leveled, widened

STEP = 4096  # rows that are made at a time


@dataclass(frozen=True, eq=False)
class View:
    """Rows of a shadow in descending order of the largest score they can have: all, some, or some that are weighted.

    With weights w and offsets b a row stands for [w x, b], and its score with [q, 1] is a contribution to an output;
    it then has a name of its own, since several may share a key. All is divided by `scale`.
    """

    shadow: Shadow
    scale: float
    sizes: Float32[Tensor, " rows"]
    rows: Int64[Tensor, " rows"] | None = None
    names: Int64[Tensor, " rows"] | None = None
    weights: Float32[Tensor, " rows"] | None = None
    offsets: Float32[Tensor, " rows"] | None = None
    _made: list[Levels] = field(default_factory=list)
    _first: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return self.sizes.shape[0]

    def size(self) -> int:
        """The bytes of what is its own, as far as it is made."""
        own = [self.sizes, self.sizes, self.rows, self.names, self.weights, self.offsets, *self._first]
        own += [level for levels in self._made for level in levels]
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    @cached_property
    def ascending(self) -> Float32[Tensor, " rows"]:
        """The sizes negated, as a search for a threshold needs them."""
        return -self.sizes

    @cached_property
    def arrays(self) -> tuple[np.ndarray[Any, np.dtype[Any]], ...]:
        """What the compiled loop reads beside the levels; empty where there is nothing of that kind."""
        rows = torch.empty(0, dtype=torch.int64) if self.rows is None else self.rows
        weights, offsets = (self.sizes[:0] if part is None else part for part in (self.weights, self.offsets))
        parts = self.shadow.fine, self.shadow.numbers, rows, self.sizes, self.ascending, weights, offsets
        return tuple(part.numpy() for part in parts)

    def level_arrays(self, rows: int) -> Arrays:
        """The same levels as the compiled loop reads them."""
        if self.rows is None:
            return self.shadow.level_arrays
        return tuple(level.numpy() for level in self.levels(rows))

    @classmethod
    def of(cls, shadow: Shadow, chosen: Bool[Tensor, " rows"] | None = None) -> View:
        """All rows of a shadow, or those that are chosen."""
        if chosen is None:
            return cls(shadow, shadow.scale, shadow.norms)
        rows = chosen.nonzero()[:, 0]
        return cls(shadow, shadow.scale, shadow.norms[rows], rows)

    @classmethod
    def weighted(
        cls,
        shadow: Shadow,
        rows: Int64[Tensor, " rows"],
        names: Int64[Tensor, " rows"],
        weights: Float64[Tensor, " rows"],
        offsets: Float64[Tensor, " rows"] | None,
    ) -> View | None:
        """Rows as [w x, b]; None where the numbers are out of the range in which bounds can be trusted."""
        sizes = weights.abs() * shadow.fine[rows, -1].double()
        sizes = sizes if offsets is None else torch.hypot(sizes, offsets / shadow.scale)
        largest = float(torch.cat([sizes, weights.abs()]).max()) if len(rows) else 1.0
        if not 1e-200 < largest < 1e200:
            return None
        order = sizes.argsort(descending=True, stable=True)
        scale = shadow.scale * largest
        added = None if offsets is None else (offsets[order] / scale).float()
        sizes, weights = widened(sizes[order] / largest), (weights[order] / largest).float()
        return cls(shadow, scale, sizes, rows[order], names[order], weights, added)

    def levels(self, rows: int) -> Levels:
        """At least the first rows in blocks; made as far as they are asked for, and kept."""
        if self.rows is None:
            return self.shadow.levels
        # What is returned is what was looked at or made here: another thread may put something shorter in its place.
        levels = self._made[0] if self._made else None
        made = 0 if levels is None else len(levels[0]) * LANES
        if levels is None or made < min(rows, len(self)):
            at = slice(0, -(-max(rows, 2 * made) // STEP) * STEP)
            weights, offsets = (None if part is None else part[at] for part in (self.weights, self.offsets))
            levels = leveled(self.shadow.fine[self.rows[at]], weights, offsets)
            self._made[:] = [levels]
        return levels

    def fine(self, at: slice | Int64[Tensor, " some"]) -> Float32[Tensor, "some fine"]:
        """The fine rows of some keys, as the queries are multiplied with them."""
        if self.rows is None:
            return self.shadow.fine[at]
        fine = self.shadow.fine[self.rows[at]]
        if self.weights is None:
            return fine
        weight = self.weights[at][:, None]
        return torch.cat([weight * fine[:, :-2], weight.abs() * fine[:, -2:-1], self.sizes[at][:, None]], dim=1)

    def first(self, rows: int) -> Float32[Tensor, "rows fine"]:
        """The fine rows of the first keys; kept, where they had to be picked out."""
        if self.rows is None:
            return self.fine(slice(0, rows))
        first = self._first[0] if self._first else None
        if first is None or len(first) < rows:
            first = self.fine(slice(0, rows))
            self._first[:] = [first]
        return first[:rows]

    def ids(self, at: Int64[Tensor, " some"]) -> Int64[Tensor, " some"]:
        """What some rows are called: their names, or else the numbers of their keys."""
        if self.names is not None:
            return self.names[at]
        at = at if self.rows is None else self.rows[at]
        return torch.from_numpy(self.shadow.numbers.numpy()[at.numpy()])  # for some dozen, a fraction of torch's time
