"""What can be summed before it is multiplied: sums of keys, of values times keys, of rank-one terms.

Each is a reducer, and its sums serve any number of queries: Σ_{t∈g} x_t·q = (Σ_{t∈g} x_t)·q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.queries.score import products
from dualform.queries.selection import Grouping
from dualform.queries.values import Coefficients


class Rows:
    """A sum of rows for every group that has any, in fp64; at most `most` of the groups have."""

    def __init__(self, groups: int, width: int, most: int) -> None:
        self._place = torch.full((groups,), -1, dtype=torch.int64)
        # Room for all, of which the system gives only what is touched: rows are taken one after the other.
        self._sums = torch.empty(min(groups, most), width, dtype=torch.float64)
        self.groups: Int64[Tensor, " some"] = torch.empty(0, dtype=torch.int64)

    @property
    def sums(self) -> Float64[Tensor, "some width"]:
        """The sums, a row for each of `groups`."""
        return self._sums[: len(self.groups)]

    def add(self, groups: Int64[Tensor, " rows"], rows: Float64[Tensor, "rows width"]) -> None:
        """Add every row to its group, one after the other."""
        new = groups[self._place[groups] < 0].unique()
        if len(new):
            start, stop = len(self.groups), len(self.groups) + len(new)
            self._place[new] = torch.arange(start, stop)
            self._sums[start:stop] = 0.0
            self.groups = torch.cat([self.groups, new])
        self._sums.index_add_(0, self._place[groups], rows)


@dataclass(frozen=True)
class Summed:
    """Σ x_t of the groups that have events, every group's number of events, and what is known of the keys."""

    groups: Int64[Tensor, " some"]
    sums: Float64[Tensor, "some dim_in"]
    counts: Int64[Tensor, " groups"]
    finite: bool
    nonnegative: bool

    def times(self, queries: Float[Tensor, "queries dim_in"]) -> Float64[Tensor, "queries groups"]:
        """Σ x_t·q of every group; 0 for one without events."""
        values = products(self.sums, queries)
        if len(self.groups) == len(self.counts) and bool((self.groups.diff() == 1).all()):
            return values
        result = torch.zeros(len(queries), len(self.counts), dtype=torch.float64)
        result[:, self.groups] = values
        return result


class KeySums:
    """Σ x_t over the events of every group; there are at most `events`."""

    def __init__(self, grouping: Grouping, dim_in: int, events: int) -> None:
        self._arguments = (grouping, dim_in, events)
        self._grouping = grouping
        self.rows = Rows(len(grouping.groups), dim_in, events)
        self.counts = torch.zeros(len(grouping.groups), dtype=torch.int64)
        self.nonnegative = True

    def fresh(self) -> KeySums:
        """One like this, of no events."""
        return KeySums(*self._arguments)

    def update(self, block: Block) -> None:
        codes = self._grouping.codes(block)
        block, codes = block.select(codes >= 0), codes[codes >= 0]
        if len(block) == 0:
            return
        self.rows.add(codes, block.keys.double())
        self.counts.index_add_(0, codes, torch.ones_like(codes))
        # NaN is not at least 0 either.
        self.nonnegative = self.nonnegative and bool(block.keys.amin() >= 0)

    def merge(self, other: KeySums) -> None:
        """Take in the sums of later blocks."""
        self.rows.add(other.rows.groups, other.rows.sums)
        self.counts += other.counts
        self.nonnegative &= other.nonnegative

    def result(self) -> Summed:
        """The sums, and the number of events of every group."""
        finite = bool(self.rows.sums.isfinite().all())
        return Summed(self.rows.groups, self.rows.sums, self.counts, finite, self.nonnegative and finite)


class DirectionSums:
    """Σ c (g_t·v) x_t and Σ c^b (g_t·v) over the (at most `events`) events of every group, for some directions v.

    A contribution along v is α_t (e_t·v) + c^b (g_t·v), so its sum is the first times the query, plus the second.
    """

    def __init__(
        self,
        grouping: Grouping,
        coefficients: Coefficients,
        directions: Float64[Tensor, "directions dim_out"],
        dim_in: int,
        events: int,
    ) -> None:
        self._arguments = (grouping, coefficients, directions, dim_in, events)
        self._grouping, self._coefficients, self._directions = grouping, coefficients, directions
        self.rows = [Rows(len(grouping.groups), dim_in, events) for _ in directions]
        self.biases = torch.zeros(len(directions), len(grouping.groups), dtype=torch.float64)
        self.counts = torch.zeros(len(grouping.groups), dtype=torch.int64)

    def fresh(self) -> DirectionSums:
        """One like this, of no events."""
        return DirectionSums(*self._arguments)

    def update(self, block: Block) -> None:
        codes = self._grouping.codes(block)
        self.counts.index_add_(0, codes[codes >= 0], torch.ones_like(codes[codes >= 0]))
        weight, bias = self._coefficients.of_events(block)
        # A dropped pass (coefficient 0) may hold infinities; it adds nothing.
        used = (codes >= 0) & ((weight != 0) | (bias != 0))
        block, codes, weight, bias = block.select(used), codes[used], weight[used], bias[used]
        assert block.gradients is not None
        along = products(block.gradients, self._directions)
        keys = block.keys.double()
        for rows, factors in zip(self.rows, along * weight, strict=True):
            rows.add(codes, keys * factors[:, None])
        self.biases.index_add_(1, codes, along * bias)

    def merge(self, other: DirectionSums) -> None:
        """Take in the sums of later blocks."""
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            mine.add(theirs.groups, theirs.sums)
        self.biases += other.biases
        self.counts += other.counts

    def result(self) -> tuple[list[Summed], Float64[Tensor, "directions groups"]]:
        """For every direction the sums of weighted keys, and those of the bias's part."""
        biases = bool(self.biases.isfinite().all())
        return [
            Summed(rows.groups, rows.sums, self.counts, biases and bool(rows.sums.isfinite().all()), False)
            for rows in self.rows
        ], self.biases


class FoldSums:
    """Σ e_t ⊗ x_t and Σ c^b g_t over the events of every group: what each group made of the weight and the bias."""

    def __init__(self, grouping: Grouping | None, coefficients: Coefficients, dim_out: int, dim_in: int) -> None:
        self._arguments = (grouping, coefficients, dim_out, dim_in)
        self._grouping, self._coefficients = grouping, coefficients
        groups = 1 if grouping is None else len(grouping.groups)
        self.weights = torch.zeros(groups, dim_out, dim_in, dtype=torch.float64)
        self.biases = torch.zeros(groups, dim_out, dtype=torch.float64)

    def fresh(self) -> FoldSums:
        """One like this, of no events."""
        return FoldSums(*self._arguments)

    def update(self, block: Block) -> None:
        codes = torch.zeros_like(block.events) if self._grouping is None else self._grouping.codes(block)
        weight, bias = self._coefficients.of_events(block)
        # A dropped pass (coefficient 0) may hold infinities; it adds nothing.
        used = (codes >= 0) & ((weight != 0) | (bias != 0))
        block, codes, weight, bias = block.select(used), codes[used], weight[used], bias[used]
        assert block.gradients is not None
        keys, gradients = block.keys.double(), block.gradients.double()
        values = gradients * weight[:, None]
        if len(self.weights) == 1:
            self.weights[0].addmm_(values.T, keys)
        else:
            order = codes.argsort(stable=True)
            found, counts = codes[order].unique_consecutive(return_counts=True)
            for code, chosen in zip(found.tolist(), order.split(counts.tolist()), strict=True):
                self.weights[code].addmm_(values[chosen].T, keys[chosen])
        self.biases.index_add_(0, codes, gradients * bias[:, None])

    def merge(self, other: FoldSums) -> None:
        """Take in the sums of later blocks."""
        self.weights += other.weights
        self.biases += other.biases

    def result(self) -> tuple[Float64[Tensor, "groups dim_out dim_in"], Float64[Tensor, "groups dim_out"]]:
        """The summed weights and biases."""
        return self.weights, self.biases
