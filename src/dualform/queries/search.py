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

from dualform.queries.pairs import above, pair_products
from dualform.queries.shadow import TINY, Shadow, query_rows, widened

TILE = 1 << 21  # bounds that are computed at a time
SEED = 512  # rows that give the first thresholds
PROBED_ROWS, PROBED_QUERIES = 512, 32
LARGEST = 3.4028235677973366e38  # what fp32 rounds to infinity from here on

Pairs = tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]
Exact = Callable[[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]], Float32[Tensor, " pairs"]]


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
    scores: Float32[Tensor, " pairs"] = field(default_factory=lambda: torch.empty(0))
    scored: int = 0
    bounded: int = 0

    def add(self, at_query: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Take in scored pairs, and let go of those that cannot be among the best any more."""
        self.scored += len(scores)
        at_query = torch.cat([self.at_query, at_query])
        ids, scores = torch.cat([self.ids, ids]), torch.cat([self.scores, scores])
        order = ids.argsort()
        order = order[scores[order].argsort(descending=True, stable=True)]
        order = order[at_query[order].argsort(stable=True)] if self.queries > 1 else order
        at_query, ids, scores = at_query[order], ids[order], scores[order]
        once = torch.ones_like(at_query, dtype=torch.bool)  # some pairs may be scored twice
        once[1:] = (ids[1:] != ids[:-1]) | (at_query[1:] != at_query[:-1])
        self.at_query, self.ids, self.scores = at_query[once], ids[once], scores[once]
        kept = self.scores >= self.thresholds()[self.at_query]
        self.at_query, self.ids, self.scores = self.at_query[kept], self.ids[kept], self.scores[kept]

    def thresholds(self) -> Float32[Tensor, " queries"]:
        """The k-th best score of every query so far; −∞ where there are fewer. Pairs are sorted by query and score."""
        counts = torch.bincount(self.at_query, minlength=self.queries)
        last = counts.cumsum(0) - counts + self.k - 1
        enough = counts >= self.k
        result = torch.full((self.queries,), -torch.inf)
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
        coarse, fine = (query_rows(view.shadow, level, self._units, self._offsets) for level in (0, 1))
        self._seed(view, coarse, exact)
        thresholds = self._scaled(view)
        stops = torch.searchsorted(view.ascending, -thresholds, right=True)
        if len(view) > 4 * SEED and not self._pays(view, coarse, fine, thresholds, stops):
            return False
        at_row, at_query = self._survivors(view, coarse, thresholds, stops)
        bounds = self._bounds(view, 1, fine, at_row, at_query)
        self._rescore(view, at_row, at_query, bounds, exact)
        return True

    def _seed(self, view: View, coarse: Float32[Tensor, "queries width"], exact: Exact) -> None:
        """First thresholds: the exact scores of the rows with the best bounds among the first."""
        k = self.found.k
        first = min(max(SEED, 8 * k), len(view))
        bounds = coarse @ view.heads(0, slice(0, first)).T
        best = bounds.topk(min(k + max(k // 4, 2), first), dim=1).indices
        at_query = torch.arange(len(best))[:, None].expand_as(best)
        self._score(view, best.reshape(-1), at_query.reshape(-1), exact)

    def _score(self, view: View, at_row: Tensor, at_query: Tensor, exact: Exact) -> None:
        ids = view.ids(at_row)
        self.found.add(at_query, ids, exact(ids, at_query))

    def _scaled(self, view: View) -> Float32[Tensor, " queries"]:
        """The thresholds in the units of a view, surely not too high: what fp32 rounds up to them passes."""
        exactly = self.found.thresholds().double().clamp(-LARGEST, LARGEST) - 1.5e-45
        scaled = exactly / view.scale / self._norms
        return (scaled - 1e-6 * scaled.abs() - TINY).float()

    def _pays(
        self, view: View, coarse: Tensor, fine: Tensor, thresholds: Tensor, stops: Int64[Tensor, " queries"]
    ) -> bool:
        """Whether the bounds leave little enough: measured on a strided block of what has to be bounded."""
        some = torch.arange(0, len(stops), max(len(stops) // PROBED_QUERIES, 1))
        reach = int(stops[some].max())
        rows = torch.arange(0, reach, max(reach // PROBED_ROWS, 1))
        if len(rows) == 0:
            return True
        left = (view.heads(0, rows) @ coarse[some].T >= thresholds[some]) & (rows[:, None] < stops[some])
        asked = max(len(rows) * len(some), 1)
        at_row, at_query = left.nonzero(as_tuple=True)
        first = len(at_row) / asked
        second = 0.0
        if len(at_row):
            part = slice(None, None, max(len(at_row) // 2048, 1))
            bounds = self._bounds(view, 1, fine, rows[at_row[part]], some[at_query[part]])
            second = first * float((bounds >= thresholds[some][at_query[part]]).double().mean())
        reading = float(stops.double().mean()) / len(view)
        width = view.shadow.basis.shape[0]
        # In units of one number of a plain scan; what is gathered row by row costs several times as much.
        cost = reading * coarse.shape[1] + (reach / len(view)) * (first * 6 * fine.shape[1] + second * 8 * width)
        return cost < 0.7 * width

    def _survivors(self, view: View, coarse: Tensor, thresholds: Tensor, stops: Tensor) -> Pairs:
        """The pairs whose coarse bound reaches the threshold. Queries that reach far are bounded with fewer others."""
        order = stops.argsort(descending=True)
        reach, thresholds, coarse = stops[order], thresholds[order], coarse[order].contiguous()
        rows: list[Tensor] = []
        queries: list[Tensor] = []
        start, end = 0, int(reach[0])
        while start < end:
            active = int((reach > start).sum())
            stop = min(start + max(TILE // active, 256), end)
            tile = view.heads(0, slice(start, stop))
            bounds = tile @ coarse[0][:, None] if active == 1 else tile @ coarse[:active].T
            at_row, at_query = above(bounds, thresholds[:active])
            rows.append(at_row + start)
            queries.append(at_query)
            self.found.bounded += len(tile) * active
            start = stop
        nothing = torch.empty(0, dtype=torch.int64)
        return torch.cat([nothing, *rows]), order[torch.cat([nothing, *queries])]

    def _bounds(self, view: View, level: int, queries: Tensor, at_row: Tensor, at_query: Tensor) -> Tensor:
        rows, place = at_row.unique(return_inverse=True) if len(queries) > 1 else (at_row, torch.arange(len(at_row)))
        # In fp64 of fp32 numbers: the error is far inside the slack.
        return pair_products(view.heads(level, rows), queries, place, at_query)

    def _rescore(self, view: View, at_row: Tensor, at_query: Tensor, bounds: Tensor, exact: Exact) -> None:
        """Score what is left exactly: first the best bounds of every query, then what these do not rule out."""
        left = bounds >= self._scaled(view)[at_query]
        at_row, at_query, bounds = at_row[left], at_query[left], bounds[left]
        order = bounds.argsort(descending=True)
        order = order[at_query[order].argsort(stable=True)]
        at_row, at_query, bounds = at_row[order], at_query[order], bounds[order]
        counts = torch.bincount(at_query, minlength=self.found.queries)
        rank = torch.arange(len(at_query)) - (counts.cumsum(0) - counts)[at_query]
        now = rank < self.found.k + 4
        self._score(view, at_row[now], at_query[now], exact)
        later = ~now & (bounds >= self._scaled(view)[at_query])
        self._score(view, at_row[later], at_query[later], exact)
