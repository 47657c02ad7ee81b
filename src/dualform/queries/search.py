"""Exact top-k by certified bounds: most rows are never looked at.

Thresholds come from the rows of the largest norm; the rest are bounded from above in descending order of what they
can reach, coarse and then fine; what survives is scored exactly, the best bounds first. A row is left out only where
its bound lies below a score that k rows surely have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.queries.pairs import above, by_query, pair_products
from dualform.queries.shadow import HEADS, TINY, Shadow, query_rows, widened

TILE = 1 << 19  # bounds that are computed at a time
SEED = 512  # rows that give the first thresholds
FINE = HEADS[1] + 2
FEW = 64  # pairs that are scored at once
FREE = 1 << 21  # numbers of a scan that are not worth a thought
LARGEST = 3.4028235677973366e38  # what fp32 rounds to infinity from here on

Pairs = tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]
Exact = Callable[[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]], Float[Tensor, " pairs"]]


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

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def ascending(self) -> Float32[Tensor, " rows"]:
        """The sizes negated, as a search for a threshold needs them."""
        return -self.sizes

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
        sizes = weights.abs() * shadow.norms[rows].double()
        sizes = sizes if offsets is None else torch.hypot(sizes, offsets / shadow.scale)
        largest = float(torch.cat([sizes, weights.abs()]).max()) if len(rows) else 1.0
        if not 1e-200 < largest < 1e200:
            return None
        order = sizes.argsort(descending=True, stable=True)
        scale = shadow.scale * largest
        added = None if offsets is None else (offsets[order] / scale).float()
        sizes, weights = widened(sizes[order] / largest), (weights[order] / largest).float()
        return cls(shadow, scale, sizes, rows[order], names[order], weights, added)

    def heads(self, level: int, at: slice | Int64[Tensor, " some"]) -> Float32[Tensor, "some width"]:
        """The rows of a level that some queries are multiplied with."""
        heads = self.shadow.heads[level]
        if self.rows is None:
            return heads[at]
        found = heads[self.rows[at]]
        if self.weights is None:
            return found
        weight = self.weights[at][:, None]
        rest = [weight.abs() * found[:, -2:-1], self.sizes[at][:, None]]
        rest += [] if self.offsets is None else [self.offsets[at][:, None]]
        return torch.cat([weight * found[:, :-2], *rest], dim=1)

    def ids(self, at: Int64[Tensor, " some"]) -> Int64[Tensor, " some"]:
        """What some rows are called: their names, or else the numbers of their keys."""
        if self.names is not None:
            return self.names[at]
        return self.shadow.numbers[at if self.rows is None else self.rows[at]]


@dataclass
class Found:
    """Pairs that were scored exactly, and the threshold that they give every query."""

    k: int
    queries: int
    at_query: Int64[Tensor, " pairs"] = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ids: Int64[Tensor, " pairs"] = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    scores: Float[Tensor, " pairs"] = field(default_factory=lambda: torch.empty(0))
    thresholds: Float[Tensor, " queries"] = field(init=False)
    scored: int = 0
    bounded: int = 0
    flat: bool = False

    def __post_init__(self) -> None:
        self.thresholds = torch.full((self.queries,), -torch.inf)

    def add(self, at_query: Tensor, ids: Tensor, scores: Tensor, fresh: bool = False) -> None:
        """Take in scored pairs, and let go of those that cannot be among the best any more.

        `fresh` says that none of them was taken in before.
        """
        self.scored += len(scores)
        if len(self.ids):
            at_query = torch.cat([self.at_query, at_query])
            ids, scores = torch.cat([self.ids, ids]), torch.cat([self.scores, scores])
        if fresh and scores.dtype == torch.float32:
            order = by_query(at_query, scores)
            self.at_query, self.ids, self.scores = at_query[order], ids[order], scores[order]
        else:
            order = ids.argsort()
            order = order[scores[order].argsort(descending=True, stable=True)]
            order = order[at_query[order].argsort(stable=True)]
            at_query, ids, scores = at_query[order], ids[order], scores[order]
            once = torch.ones_like(at_query, dtype=torch.bool)
            once[1:] = (ids[1:] != ids[:-1]) | (at_query[1:] != at_query[:-1])
            self.at_query, self.ids, self.scores = at_query[once], ids[once], scores[once]
        self.thresholds = self._kth()
        kept = self.scores >= self.thresholds[self.at_query]
        self.at_query, self.ids, self.scores = self.at_query[kept], self.ids[kept], self.scores[kept]

    def _kth(self) -> Float[Tensor, " queries"]:
        """The k-th best score of every query so far; −∞ where there are fewer. Pairs are sorted by query and score."""
        if self.queries == 1:
            last = self.scores[self.k - 1 : self.k]
            return last if len(last) else self.scores.new_full((1,), -torch.inf)
        counts = torch.bincount(self.at_query, minlength=self.queries)
        last = counts.cumsum(0) - counts + self.k - 1
        enough = counts >= self.k
        result = torch.full((self.queries,), -torch.inf, dtype=self.scores.dtype)
        result[enough] = self.scores[last[enough]]
        return result


class Search:
    """One search of some queries over views, of which each narrows what the next ones have to look at."""

    def __init__(
        self, queries: Float[Tensor, "queries dim_in"], found: Found, sign: float = 1.0, extended: bool = False
    ) -> None:
        exactly = queries.double() * sign
        norms = torch.linalg.vector_norm(exactly, dim=1)
        self._norms = torch.hypot(norms, torch.ones_like(norms)) if extended else norms
        self._units = exactly / self._norms[:, None]
        self._offsets = sign / self._norms if extended else None
        self.found = found
        self._fresh = len(found.ids) == 0  # else another sign has scored some of the pairs

    def run(self, view: View, exact: Exact) -> bool:
        """Search one view; False, with nothing done, where its bounds would not pay.

        `exact` gives the scores of (ids, queries) pairs, in the sign that is searched for.
        """
        k = self.found.k
        if k * 8 > len(view) > 2 * SEED:
            return False
        if len(view) <= max(k, 64):
            every = torch.arange(len(view)).repeat(len(self._units))
            self._score(view, every, torch.arange(len(self._units)).repeat_interleave(len(view)), exact)
            return True
        coarse, fine = query_rows(view.shadow, self._units, self._offsets)
        seeds = self._seed(view, coarse, exact)
        thresholds = self._scaled(view)
        stops = torch.searchsorted(view.ascending, -thresholds, right=True)
        pairs = self._survivors(view, coarse, thresholds, stops)
        if pairs is None:
            return False
        at_row, at_query = pairs
        bounds = self._bounds(view, 1, fine, at_row, at_query)
        left = (bounds >= thresholds[at_query]) & ~_among(seeds, at_row, at_query)
        if not self._pays(view, int(left.sum()), 8 * view.shadow.basis.shape[0]):
            return False
        self._rescore(view, at_row[left], at_query[left], bounds[left], exact)
        return True

    def _seed(
        self, view: View, coarse: Float32[Tensor, "queries width"], exact: Exact
    ) -> Int64[Tensor, "queries seeds"]:
        """First thresholds: the exact scores of the rows with the best bounds among the first; which rows they are."""
        k = self.found.k
        first = min(max(SEED, 8 * k), len(view))
        bounds = coarse @ view.heads(0, slice(0, first)).T
        best = bounds.topk(min(k + max(k // 4, 2), first), dim=1).indices
        at_query = torch.arange(len(best))[:, None].expand_as(best)
        self._score(view, best.reshape(-1), at_query.reshape(-1), exact)
        return best

    def _score(self, view: View, at_row: Tensor, at_query: Tensor, exact: Exact) -> None:
        ids = view.ids(at_row)
        self.found.add(at_query, ids, exact(ids, at_query), self._fresh)

    def _scaled(self, view: View) -> Float32[Tensor, " queries"]:
        """The thresholds in the units of a view, surely not too high: what fp32 rounds up to them passes."""
        exactly = self.found.thresholds.double().clamp(-LARGEST, LARGEST) - 1.5e-45
        scaled = exactly / view.scale / self._norms
        return (scaled - 1e-6 * scaled.abs() - TINY).float()

    def _pays(self, view: View, pairs: int, cost: int) -> bool:
        """Whether so many pairs, of which each costs as much as so many numbers of a plain scan, are few enough."""
        return pairs * cost <= max(0.5 * len(view) * len(self._units) * view.shadow.basis.shape[0], FREE)

    def _survivors(self, view: View, coarse: Tensor, thresholds: Tensor, stops: Tensor) -> Pairs | None:
        """The pairs whose coarse bound reaches the threshold; None as soon as they are too many to pay.

        Queries that reach far are bounded with fewer others.
        """
        order = stops.argsort(descending=True)
        reach, thresholds, coarse = stops[order], thresholds[order], coarse[order].contiguous()
        rows: list[Tensor] = []
        queries: list[Tensor] = []
        start, end, left, bounded = 0, int(reach[0]), 0, 0
        buffer = torch.empty(max(TILE, 256 * len(order)))  # one for all tiles, so that it stays in the cache
        while start < end:
            active = int((reach > start).sum())
            stop = min(start + max(TILE // active, 256), end)
            tile = view.heads(0, slice(start, stop))
            bounds = buffer[: len(tile) * active].view(len(tile), active)
            if active == 1:
                torch.mv(tile, coarse[0], out=bounds[:, 0])
            else:
                torch.mm(tile, coarse[:active].T, out=bounds)
            at_row, at_query = above(bounds, thresholds[:active])
            rows.append(at_row + start)
            queries.append(at_query)
            self.found.bounded += len(tile) * active
            left, bounded = left + len(at_row), bounded + len(tile) * active
            # What is left of the first tiles says how the rest will go, long before it fills the memory.
            if (bounded >= 4 * TILE and left > bounded // 4) or not self._pays(view, left, 6 * FINE):
                return None
            start = stop
        nothing = torch.empty(0, dtype=torch.int64)
        return torch.cat([nothing, *rows]), order[torch.cat([nothing, *queries])]

    def _bounds(self, view: View, level: int, queries: Tensor, at_row: Tensor, at_query: Tensor) -> Tensor:
        # In fp64 of fp32 numbers: the error is far inside the slack.
        if view.weights is None:
            at = at_row if view.rows is None else view.rows[at_row]
            return pair_products(view.shadow.heads[level], queries, at, at_query)
        rows, place = at_row.unique(return_inverse=True)
        return pair_products(view.heads(level, rows), queries, place, at_query)

    def _rescore(self, view: View, at_row: Tensor, at_query: Tensor, bounds: Tensor, exact: Exact) -> None:
        """Score what is left exactly: first the best bounds of every query, then what these do not rule out."""
        if len(at_row) <= FEW:
            return self._score(view, at_row, at_query, exact)
        order = by_query(at_query, bounds)
        at_row, at_query, bounds = at_row[order], at_query[order], bounds[order]
        counts = torch.bincount(at_query, minlength=self.found.queries)
        rank = torch.arange(len(at_query)) - (counts.cumsum(0) - counts)[at_query]
        now = rank < self.found.k + 4
        self._score(view, at_row[now], at_query[now], exact)
        later = ~now & (bounds >= self._scaled(view)[at_query])
        self._score(view, at_row[later], at_query[later], exact)


def _among(
    seeds: Int64[Tensor, "queries seeds"], at_row: Int64[Tensor, " pairs"], at_query: Int64[Tensor, " pairs"]
) -> Bool[Tensor, " pairs"]:
    """Which pairs are seeds of their query."""
    first = int(seeds.max()) + 1
    known = torch.zeros(len(seeds), first + 1, dtype=torch.bool).scatter_(1, seeds, True)
    return known[at_query, at_row.clamp_max(first)]
