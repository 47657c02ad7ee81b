"""What a search ranks: keys by their scores, or events by what they contribute to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.memory import StoredMemory
from dualform.queries import whole
from dualform.queries.flat import scan, tiles_of
from dualform.queries.found import Found
from dualform.queries.hot import HotKeys
from dualform.queries.index import Index
from dualform.queries.score import pair_scores, scores
from dualform.queries.scorers import DirectionScorer, NormScorer
from dualform.queries.search import Exact
from dualform.queries.shadow import Shadow
from dualform.queries.views import View

WHOLE = 0.4  # what a product of whole numbers costs, in those in fp32
CHUNK = 1 << 23  # numbers of keys that are read at a time
READ = 4  # queries for which a scan does so little that reading keys is better than mapping them

Ids = Int64[Tensor, " pairs"]
Events = Bool[Tensor, " events"] | None


@runtime_checkable
class Weighing(Protocol):
    """Rows to search, called by ids (of keys or of events), and their exact scores."""

    extended: bool  # whether the rows are [w x, b] and the queries [q, 1]
    magnitude: bool  # whether scores are magnitudes
    hot: HotKeys  # of which the scores are made
    norms: Float64[Tensor, " queries"]  # of the queries
    flat: float  # what a pair of `scan` costs, in those of one in fp32

    def views(self, events: Events) -> Iterator[View | None]:
        """The rows of the chosen events, all by default; None for those of which no bound can be trusted."""

    def scan(self, found: Found, queries: Ids, events: Events, order: str, exact: Exact) -> bool:
        """Search every row for some of the queries; False, with nothing done, where that is not possible."""

    def odd(self, events: Events) -> Int64[Tensor, " odd"]:
        """The ids that are in no view: something about them is not finite."""

    def scores(self, ids: Ids, at_query: Ids) -> Float32[Tensor, " pairs"]:
        """The exact scores of some pairs."""

    def odd_scores(self, ids: Int64[Tensor, " odd"], queries: Ids) -> Float32[Tensor, "queries odd"]:
        """The exact scores of odd ids with some queries."""

    def events_of(self, ids: Ids) -> tuple[Int64[Tensor, " events"], Int64[Tensor, " events"] | None]:
        """The events that ids stand for, and which of the ids each belongs to; None where they are the same."""


class ByScore:
    """Keys by x · q: events with the same key have the same score."""

    extended = magnitude = False

    def __init__(
        self,
        memory: StoredMemory,
        index: Index,
        weight: int,
        queries: Float[Tensor, "queries dim_in"],
        norms: Float64[Tensor, " queries"],
    ) -> None:
        self._memory, self._index, self._weight, self._queries = memory, index, weight, queries
        self._table = index.table(weight)
        self.norms, self.hot = norms, index.hot(weight)
        self.flat = WHOLE if whole.are_fast() and index.has_coarse(weight) else 1.0

    def _keys(self, events: Events) -> Bool[Tensor, " keys"] | None:
        return None if events is None else self._table.keys_of(events, self._index.keys(self._weight))

    def views(self, events: Events) -> Iterator[View | None]:
        chosen = self._keys(events)
        return (self._index.view(self._weight, span, chosen) for span in self._index.spans(self._weight))

    def scan(self, found: Found, queries: Ids, events: Events, order: str, exact: Exact) -> bool:
        """Search every key for some of the queries, in one pass over all of them."""
        chosen = self._keys(events)
        return self.scan_groups(found, queries, None if chosen is None else chosen.long() - 1, order, exact)

    def scan_groups(
        self, found: Found, queries: Ids, groups: Int64[Tensor, " keys"] | None, order: str, exact: Exact
    ) -> bool:
        """The same for every group of keys; keys of no group, −1, do not count."""
        index, asked = self._index, self._queries[queries]
        norms = index.norms(self._weight)
        if int(norms.isinf().sum()) > len(index.odd(self._weight)):
            return False  # a norm that is out of the range of fp32
        question = asked, norms, groups, order, exact
        if index.has_coarse(self._weight):
            keys = list(index.coarse(self._weight))
            if scan(found, lambda units: (one.tile(units, norms) for one in keys), *question):
                return True
        tiles = index.tiles(self._weight, read=len(asked) <= READ)
        return scan(found, lambda units: tiles_of(tiles, units, norms), *question)

    def odd(self, events: Events) -> Int64[Tensor, " odd"]:
        odd, chosen = self._index.odd(self._weight), self._keys(events)
        return odd if chosen is None else odd[chosen[odd]]

    def scores(self, ids: Ids, at_query: Ids) -> Float32[Tensor, " pairs"]:
        found = self.hot.get(ids)
        if found is not None:
            keys, place, norms = found
            return pair_scores(keys, self._queries, place, at_query, norms, self.norms)
        return self._some_at_a_time(ids, at_query)

    def _some_at_a_time(self, ids: Ids, at_query: Ids) -> Float32[Tensor, " pairs"]:
        """The exact scores of pairs with many keys, of which none is held longer than it is needed."""
        result, norms, at = torch.empty(len(ids)), self._index.norms(self._weight), 0
        ids, order = ids.sort()
        numbers, places = torch.unique_consecutive(ids, return_inverse=True)
        step = max(CHUNK // max(self._queries.shape[1], 1), 1)
        for first in range(0, len(numbers), step):
            some = numbers[first : first + step]
            end = int(torch.searchsorted(places, first + len(some)))
            here, at = slice(at, end), end
            keys, pairs = self._memory.keys(self._weight, some), (places[here] - first, at_query[order[here]])
            result[order[here]] = pair_scores(keys, self._queries, *pairs, norms[some].double(), self.norms)
        return result

    def odd_scores(self, ids: Int64[Tensor, " odd"], queries: Ids) -> Float32[Tensor, "queries odd"]:
        return scores(self._memory.keys(self._weight, ids), self._queries[queries])

    def events_of(self, ids: Ids) -> tuple[Int64[Tensor, " events"], Int64[Tensor, " events"] | None]:
        return (ids, None) if self._table.keys is None else self._table.events_of(ids)


class ByContribution:
    """Events by w (x · q) + b: what they add to the output along one direction, or |x · q| ‖e‖."""

    flat = 1.0

    def __init__(
        self,
        index: Index,
        question: tuple[object, ...],
        by_score: ByScore,
        weight: int,
        weights: Float64[Tensor, " events"],
        offsets: Float64[Tensor, " events"],
        combine: Callable[[Float64[Tensor, "..."], Ids], Float64[Tensor, "..."]],
        magnitude: bool,
    ) -> None:
        self.extended, self.magnitude = not magnitude, magnitude
        self._by_score, self._combine = by_score, combine
        self.hot, self.norms = by_score.hot, by_score.norms
        self._index, self._question, self._weight = index, question, weight
        table = index.table(weight)
        self._weights, self._offsets = weights, offsets
        self._keys = table.block.events if table.keys is None else table.keys
        self._sound = weights.isfinite() & offsets.isfinite()
        if len(index.odd(weight)):
            self._sound &= ~torch.isin(self._keys, index.odd(weight))

    def views(self, events: Events) -> Iterator[View | None]:
        spans = self._index.spans(self._weight)
        return (
            self._index.weighted(self._question, span, events, lambda shadow: self._weighted(shadow, events))
            for span in spans
        )

    def _weighted(self, shadow: Shadow, events: Events) -> View | None:
        places = torch.full((self._index.keys(self._weight),), -1)
        places[shadow.numbers] = torch.arange(len(shadow))
        rows = places[self._keys]
        chosen = self._sound if events is None else self._sound & events
        ids = (chosen & (rows >= 0)).nonzero()[:, 0]
        offsets = self._offsets[ids] if self.extended else None
        return View.weighted(shadow, rows[ids], ids, self._weights[ids], offsets)

    def odd(self, events: Events) -> Int64[Tensor, " odd"]:
        return (~self._sound if events is None else ~self._sound & events).nonzero()[:, 0]

    def scores(self, ids: Ids, at_query: Ids) -> Float32[Tensor, " pairs"]:
        alphas = self._by_score.scores(self._keys[ids], at_query)
        return self._combine(alphas.double(), ids).float()

    def odd_scores(self, ids: Int64[Tensor, " odd"], queries: Ids) -> Float32[Tensor, "queries odd"]:
        alphas = self._by_score.odd_scores(self._keys[ids], queries)
        return self._combine(alphas.double(), ids).float()

    def scan(self, found: Found, queries: Ids, events: Events, order: str, exact: Exact) -> bool:
        return False

    def events_of(self, ids: Ids) -> tuple[Int64[Tensor, " events"], Int64[Tensor, " events"] | None]:
        return ids, None


def by_direction(keys: ByScore, index: Index, weight: int, until: int, scorer: DirectionScorer) -> ByContribution:
    """Events by what they add along one direction, the same for all queries."""
    (along,), weight_of, bias_of = index.values(weight, until, scorer)
    unused = (weight_of == 0) & (bias_of == 0)

    def combine(alphas: Tensor, ids: Ids) -> Tensor:
        return scorer.combined(alphas, along[ids], weight_of[ids], bias_of[ids])

    weights, offsets = (torch.where(unused, 0.0, part * along) for part in (weight_of, bias_of))
    return ByContribution(index, index.question(weight, until, scorer), keys, weight, weights, offsets, combine, False)


def by_norm(keys: ByScore, index: Index, weight: int, until: int, scorer: NormScorer) -> ByContribution:
    """Events by |x · q| ‖e‖."""
    (norms,), weight_of, _ = index.values(weight, until, scorer)

    def combine(alphas: Tensor, ids: Ids) -> Tensor:
        return scorer.weighted(alphas, norms[ids], weight_of[ids])

    weights = torch.where(weight_of == 0, 0.0, norms * weight_of.abs())
    zeros = torch.zeros_like(weights)
    return ByContribution(index, index.question(weight, until, scorer), keys, weight, weights, zeros, combine, True)
