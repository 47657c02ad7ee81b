"""Reducers: what is kept of a stream of blocks. Each has update(block), merge(other) and result()."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.queries.scorers import Scorer
from dualform.queries.selection import Grouping

ORDERS = ("largest", "smallest", "absolute")
NOTHING = -1
MOST = 20_000_000


@runtime_checkable
class Reducer(Protocol):
    """Any executor can map reducers over blocks and merge them in order."""

    def update(self, block: Block) -> None: ...

    def merge(self, other: Any) -> None: ...

    def result(self) -> Any: ...


@runtime_checkable
class Adding(Reducer, Protocol):
    """A reducer that adds: its bits depend on the order, so it adds by segment, and then in the order of segments."""

    def fresh(self) -> Adding:
        """One like this, of no events."""


def rank_keys(values: Tensor, order: str) -> Tensor:
    """Numbers whose descending order is the order asked for; NaN is set apart, below any infinity."""
    values = values.double()
    key = {"largest": values, "smallest": -values, "absolute": values.abs()}[order]
    return torch.where(values.isnan(), -torch.inf, key.clamp_min(-1e300))


def check_order(order: str) -> None:
    """BadQuery for an order that does not exist."""
    if order not in ORDERS:
        raise BadQuery(f"order must be one of {', '.join(map(repr, ORDERS))}, not {order!r}.")


def check_count(k: Any, queries: int, name: str = "k") -> int:
    """k as a number; BadQuery where it is not a positive whole one, or where the answer would not fit."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or k < 1:
        raise BadQuery(f"{name} must be a whole number of at least 1, not {k!r}.")
    if int(k) * max(queries, 1) > MOST:
        raise BadQuery(f"the top {int(k):,} of {queries:,} queries are more than fits; at most {MOST:,} in all.")
    return int(k)


class Top:
    """The k best events of every query: score descending, then event ascending; NaN scores never enter."""

    FIELDS = ("events", "examples", "steps", "positions", "uses")

    def __init__(self, scorer: Scorer, k: int, order: str = "largest") -> None:
        self._scorer, self._k, self._order = scorer, k, order
        queries = len(scorer.queries)
        self.scores: Float32[Tensor, "queries kept"] = torch.empty(queries, 0, dtype=torch.float32)
        self.numbers: Int64[Tensor, "queries kept fields"] = torch.empty(
            queries, 0, len(self.FIELDS), dtype=torch.int64
        )
        self.nan = torch.zeros(queries, dtype=torch.int64)

    def update(self, block: Block) -> None:
        ranks = self._scorer.ranks(block)
        self.nan += ranks.isnan().sum(dim=1)
        columns = [block.events, block.examples, block.steps, block.positions, block.uses]
        self._add(ranks, torch.stack(columns, dim=1).expand(len(ranks), -1, -1))

    def merge(self, other: Top) -> None:
        """Take in the result of later blocks."""
        self.nan += other.nan
        self._add(other.scores, other.numbers)

    def _add(self, scores: Tensor, numbers: Tensor) -> None:
        # Of every query all that is at least as good as the block's k-th best, so that ties are decided by event.
        keys = rank_keys(scores, self._order)
        if len(keys) and keys.shape[1] > 4 * self._k:
            worst = keys.topk(self._k, dim=1).values[:, -1:]
            most = int((keys >= worst).sum(dim=1).max())
            some = keys.topk(most, dim=1).indices.sort(dim=1).values
            scores = scores.gather(1, some)
            numbers = numbers.gather(1, some[:, :, None].expand(-1, -1, numbers.shape[2]))
        scores = torch.cat([self.scores, scores], dim=1)
        numbers = torch.cat([self.numbers, numbers], dim=1)
        # Events come in ascending order, so a stable sort leaves ties in that order.
        order = rank_keys(scores, self._order).sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.scores = scores.gather(1, order)
        self.numbers = numbers.gather(1, order[:, :, None].expand(-1, -1, numbers.shape[2]))

    def result(self) -> tuple[Float32[Tensor, "queries k"], Int64[Tensor, "queries k fields"]]:
        """Scores and numbers, padded with NaN and −1 where there are fewer than k events."""
        missing = self._k - self.scores.shape[1]
        scores = torch.nn.functional.pad(self.scores, (0, missing), value=torch.nan)
        numbers = torch.nn.functional.pad(self.numbers, (0, 0, 0, missing), value=NOTHING)
        return scores, numbers.where(~scores.isnan()[:, :, None], NOTHING)


class TopWithin:
    """The k best events of every group, for every query."""

    def __init__(self, scorer: Scorer, k: int, order: str, grouping: Grouping) -> None:
        self._grouping = grouping
        self._tops = [Top(scorer, k, order) for _ in grouping.groups]
        self._empty = Top(scorer, k, order)

    @property
    def nan(self) -> Int64[Tensor, " queries"]:
        """How many scores of every query were NaN."""
        return sum((top.nan for top in self._tops), self._empty.nan)

    def update(self, block: Block) -> None:
        codes = self._grouping.codes(block)
        for code in codes.unique().tolist():
            if code >= 0:
                self._tops[code].update(block.select(codes == code))

    def merge(self, other: TopWithin) -> None:
        """Take in the result of later blocks."""
        for mine, theirs in zip(self._tops, other._tops, strict=True):
            mine.merge(theirs)

    def result(self) -> tuple[Float32[Tensor, "queries groups k"], Int64[Tensor, "queries groups k fields"]]:
        """As for Top, with the groups as the second dimension."""
        results = [top.result() for top in self._tops]
        if not results:
            scores, numbers = self._empty.result()
            return scores[:, None][:, :0], numbers[:, None][:, :0]
        return torch.stack([s for s, _ in results], dim=1), torch.stack([n for _, n in results], dim=1)


class GroupSums:
    """Σ over the events of every group, in fp64; with `absolute` the sum of magnitudes."""

    def __init__(self, scorer: Scorer, grouping: Grouping, absolute: bool) -> None:
        self._scorer, self._grouping, self._absolute = scorer, grouping, absolute
        self.sums = torch.zeros(len(scorer.queries), len(grouping.groups), dtype=torch.float64)
        self.counts = torch.zeros(len(grouping.groups), dtype=torch.int64)

    def fresh(self) -> GroupSums:
        """One like this, of no events."""
        return GroupSums(self._scorer, self._grouping, self._absolute)

    def update(self, block: Block) -> None:
        codes = self._grouping.codes(block)
        block, codes = block.select(codes >= 0), codes[codes >= 0]
        terms = self._scorer.terms(block)
        self.sums.index_add_(1, codes, terms.abs() if self._absolute else terms)
        self.counts.index_add_(0, codes, torch.ones_like(codes))

    def merge(self, other: GroupSums) -> None:
        """Take in the sums of later blocks."""
        self.sums += other.sums
        self.counts += other.counts

    def result(self) -> tuple[Float64[Tensor, "queries groups"], Int64[Tensor, " groups"]]:
        """The sums and the number of events of every group."""
        return self.sums, self.counts


class VectorSums:
    """Σ of whole contributions of every group: a vector of dim_out for each query and group."""

    def __init__(self, scorer: Any, grouping: Grouping, dim_out: int) -> None:
        self._scorer, self._grouping, self._dim_out = scorer, grouping, dim_out
        shape = (len(scorer.queries), len(grouping.groups), dim_out)
        self.sums = torch.zeros(shape, dtype=torch.float64)

    def fresh(self) -> VectorSums:
        """One like this, of no events."""
        return VectorSums(self._scorer, self._grouping, self._dim_out)

    def update(self, block: Block) -> None:
        codes = self._grouping.codes(block)
        weight, bias = self._scorer.coefficients.of_events(block)
        used = (codes >= 0) & ((weight != 0) | (bias != 0))
        block, codes, weight, bias = block.select(used), codes[used], weight[used], bias[used]
        assert block.gradients is not None
        # Σ α_t e_t + c^b g_t = Σ (α_t c + c^b) g_t
        factors = self._scorer.alphas(block) * weight + bias
        gradients = block.gradients.double()
        order = codes.argsort(stable=True)
        found, counts = codes[order].unique_consecutive(return_counts=True)
        for code, chosen in zip(found.tolist(), order.split(counts.tolist()), strict=True):
            self.sums[:, code] += factors[:, chosen] @ gradients[chosen]

    def merge(self, other: VectorSums) -> None:
        """Take in the sums of later blocks."""
        self.sums += other.sums

    def result(self) -> Float64[Tensor, "queries groups dim_out"]:
        """The summed contributions."""
        return self.sums


class AllScores:
    """Every score of every query, in the order of the events."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts: list[Tensor] = []

    def update(self, block: Block) -> None:
        self._parts.append(self._scorer.ranks(block))

    def merge(self, other: AllScores) -> None:
        """Append the scores of later blocks."""
        self._parts += other._parts

    def result(self) -> Float32[Tensor, "queries events"]:
        """All scores."""
        nothing = torch.empty(len(self._scorer.queries), 0, dtype=torch.float32)
        return torch.cat([nothing, *self._parts], dim=1)
