"""The k best events by the index: the certified search over what a question is about, and the events it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import alone, compiled, in_full_precision
from dualform.memory import StoredMemory
from dualform.queries.found import Found
from dualform.queries.index import Index, index_of
from dualform.queries.pairs import in_order, ranks
from dualform.queries.reducers import NOTHING, ORDERS, Top
from dualform.queries.results import Explanation
from dualform.queries.scorers import AttentionScorer, DirectionScorer, NormScorer, Scorer
from dualform.queries.search import Exact, Search
from dualform.queries.selection import Grouping, Selection
from dualform.queries.table import BYTES, Table
from dualform.queries.weighing import ByScore, Events, Weighing, by_direction, by_norm

FEW = 4096  # keys below which a plain scan is as good
ODD = 1024  # ids with NaN or infinity that are scored for every query
AT_ONCE = 1024  # queries
SORTED = 1024  # of the best, above which sorting is better than putting each in its place
HELD = 1 << 22  # of the best, of all groups and queries of one scan
MANY = 256  # times that of what is asked for, a scan of all keys is as good as bounds
NO_IDS = torch.empty(0, dtype=torch.int64)
DIRECTIONS = 16  # different ones, above which a scan answers


@dataclass(frozen=True)
class Best:
    """The k best events of every query (of every group): scores, numbers as in Top.FIELDS, and how they were found."""

    scores: Float32[Tensor, "queries *groups k"]
    numbers: Int64[Tensor, "queries *groups k fields"]
    scored: int
    bounded: int
    nan: int
    flat: int

    @property
    def explanation(self) -> Explanation:
        """Which way this was found."""
        each = max(len(self.scores), 1)
        name = "flat scan" if self.flat else "certified shadow"
        way = f"{name}, {self.bounded / each:,.0f} rows bounded and {self.scored / each:,.0f} scored for each query"
        return Explanation(way, self.scored, self.nan)


@in_full_precision()
def best_events(
    memory: StoredMemory,
    weight: int,
    until: int,
    selection: Selection,
    scorer: Scorer,
    norms: Float64[Tensor, " queries"],
    k: int,
    order: str,
    grouping: Grouping | None = None,
) -> Best | None:
    """The k best events, of every group where there is a grouping; None where a scan has to answer.

    `norms` are those of the scorer's queries, and tame.
    """
    index = index_of(memory)
    table = index.table(weight)
    chosen = _chosen(memory, table, until, selection)
    parts: list[Events] = [chosen]
    if grouping is not None:
        codes = grouping.codes(table.block)
        codes = codes if chosen is None else torch.where(chosen, codes, -1)
        parts = [codes == group for group in range(len(grouping.groups))]
    if isinstance(scorer, DirectionScorer) and len(scorer.directions) > 1:
        return _each_direction(memory, index, weight, until, scorer, norms, parts, k, order, grouping is not None)
    weighing = _weighing(memory, index, weight, until, scorer, norms, order)
    if weighing is None:
        return None
    if grouping is not None and isinstance(weighing, ByScore):
        found = _groups_at_once(weighing, table, codes, len(grouping.groups), scorer.queries, k, order)
        if found is not None:
            return found
    return _all_parts(weighing, table, parts, scorer.queries, k, order, grouping is not None)


def suits(memory: StoredMemory, weight: int, k: int) -> bool:
    """Whether a question is one for the index."""
    keys = index_of(memory).keys(weight)
    fits = memory.manifest.events(weight) * BYTES <= memory.resident // 4
    return fits and keys >= FEW and 16 * k <= keys


def tame(norms: Float64[Tensor, " queries"]) -> bool:
    """Whether there are queries, none of them zero, which ties everywhere, or out of the range of bounds."""
    sizes = norms.numpy()
    return len(sizes) > 0 and bool(sizes.min() > 1e-100 and sizes.max() < 1e100)


def _chosen(memory: StoredMemory, table: Table, until: int, selection: Selection) -> Events:
    """The events that a question is about; None for all."""
    chosen: Bool[Tensor, " events"] | None = table.block.steps <= until if until < memory.steps else None
    if selection:
        holds = selection.holds(table.block)
        chosen = holds if chosen is None else chosen & holds
    return chosen


def _weighing(
    memory: StoredMemory, index: Index, weight: int, until: int, scorer: Scorer, norms: Tensor, order: str
) -> Weighing | None:
    if isinstance(scorer, NormScorer) and order == "smallest":
        return None
    by_score = ByScore(memory, index, weight, scorer.queries, norms)
    if isinstance(scorer, AttentionScorer):
        return by_score
    if isinstance(scorer, DirectionScorer):
        return by_direction(by_score, index, weight, until, scorer)
    if isinstance(scorer, NormScorer):
        return by_norm(by_score, index, weight, until, scorer)
    return None


def _each_direction(
    memory: StoredMemory,
    index: Index,
    weight: int,
    until: int,
    scorer: DirectionScorer,
    norms: Float64[Tensor, " queries"],
    parts: list[Events],
    k: int,
    order: str,
    grouped: bool,
) -> Best | None:
    """Queries with the same direction together."""
    directions, which = scorer.directions.unique(dim=0, return_inverse=True)
    if len(directions) > DIRECTIONS:
        return None
    table = index.table(weight)
    index.values(weight, until, replace(scorer, directions=directions))  # all in one pass
    found: list[Best] = []
    for at, direction in enumerate(directions):
        queries = scorer.queries[which == at]
        one = DirectionScorer(queries, scorer.coefficients, direction[None])
        by_score = ByScore(memory, index, weight, queries, norms[which == at])
        weighing = by_direction(by_score, index, weight, until, one)
        best = _all_parts(weighing, table, parts, queries, k, order, grouped)
        if best is None:
            return None
        found.append(best)
    back = torch.cat([(which == at).nonzero()[:, 0] for at in range(len(directions))]).argsort()
    return _joined(found, back)


def _joined(found: list[Best], order: Int64[Tensor, " queries"] | None = None) -> Best:
    """The answers of some queries after those of others."""
    if len(found) == 1 and order is None:
        return found[0]
    scores, numbers = torch.cat([one.scores for one in found]), torch.cat([one.numbers for one in found])
    if order is not None:
        scores, numbers = scores[order], numbers[order]
    counts = (sum(getattr(one, name) for one in found) for name in ("scored", "bounded", "nan", "flat"))
    return Best(scores, numbers, *counts)


def _all_parts(
    weighing: Weighing,
    table: Table,
    parts: list[Events],
    queries: Float[Tensor, "queries dim_in"],
    k: int,
    order: str,
    grouped: bool,
) -> Best | None:
    """The best of every part, as a dimension of its own where they are groups."""
    found: list[Best] = []
    for events in parts:
        best = _best_of(weighing, table, events, queries, k, order)
        if best is None:
            return None
        found.append(best)
    if not grouped:
        return found[0]
    if not found:
        empty = torch.full((len(queries), 0, k), torch.nan)
        return Best(empty, torch.full((*empty.shape, len(Top.FIELDS)), NOTHING), 0, 0, 0, 0)
    scores = torch.stack([one.scores for one in found], dim=1)
    numbers = torch.stack([one.numbers for one in found], dim=1)
    counts = (sum(getattr(one, name) for one in found) for name in ("scored", "bounded", "nan", "flat"))
    return Best(scores, numbers, *counts)


def _groups_at_once(
    weighing: ByScore,
    table: Table,
    codes: Int64[Tensor, " events"],
    groups: int,
    queries: Float[Tensor, "queries dim_in"],
    k: int,
    order: str,
) -> Best | None:
    """The best of every group by one flat scan, where so much is asked for that each group's bounds would not pay."""
    if (
        table.keys is not None
        or not MANY * k * groups > len(codes)
        or not 0 < k * groups <= HELD
        or len(weighing.odd(None))
    ):
        return None
    answers, step = [], min(max(HELD // (k * groups), 1), AT_ONCE)
    for at in range(0, len(queries), step):
        which = torch.arange(at, min(at + step, len(queries)))
        found = Found(k, len(which) * groups)
        found.flat = True
        if not weighing.scan_groups(found, which, codes, order, _exact(weighing, at, order)):
            return None
        with alone():
            picked = _picked(weighing, table, None, found, NO_IDS, which.repeat_interleave(groups), order)
        shape = len(which), groups, k
        numbers = picked.numbers.view(*shape, -1)
        answers.append(replace(picked, scores=picked.scores.view(shape), numbers=numbers))
    return _joined(answers)


def _best_of(weighing: Weighing, table: Table, events: Events, queries: Tensor, k: int, order: str) -> Best | None:
    """The best of some events; None where bounds do not pay."""
    odd = weighing.odd(events)
    if len(odd) > ODD:
        return None
    answers: list[Best] = []
    for at in range(0, len(queries), AT_ONCE):
        which = torch.arange(at, min(at + AT_ONCE, len(queries)))
        found = Found(k, len(which))
        if not _searched(weighing, events, found, queries, at, order):
            found.flat = True
            if not weighing.scan(found, which, events, order, _exact(weighing, at, order)):
                return None
        with alone():
            answers.append(_picked(weighing, table, events, found, odd, which, order))
    return _joined(answers)


def _searched(weighing: Weighing, events: Events, found: Found, queries: Tensor, first: int, order: str) -> bool:
    """Search by bounds for some queries from a number on; False where they do not pay."""
    some = slice(first, first + found.queries)
    for sign in _signs(order, weighing.magnitude):
        search = Search(queries[some], weighing.norms[some], found, sign, weighing.extended, weighing.flat)
        exact = _exact(weighing, first, order)
        if not all(view is not None and search.run(view, exact, weighing.hot) for view in weighing.views(events)):
            return False
    return True


def _exact(weighing: Weighing, first: int, order: str) -> Exact:
    """Exact scores of the queries from a number on, the larger the better."""

    def exact(ids: Tensor, at_query: Tensor) -> Tensor:
        scores = weighing.scores(ids, at_query + first if first else at_query)
        return scores.abs() if order == "absolute" or weighing.magnitude else -scores if order == "smallest" else scores

    return exact


def _signs(order: str, magnitude: bool) -> tuple[float, ...]:
    return (1.0, -1.0) if order == "absolute" or magnitude else (1.0,) if order == "largest" else (-1.0,)


def _picked(
    weighing: Weighing,
    table: Table,
    chosen: Events,
    found: Found,
    odd: Int64[Tensor, " odd"],
    which: Int64[Tensor, " queries"],
    order: str,
) -> Best:
    """The events behind what was found, in order: score, then event."""
    at_query, ids, scores = found.pairs()
    if order == "absolute":
        scores = weighing.scores(ids, which[at_query])
    elif order == "smallest":
        scores = -scores
    if len(odd):
        ids = torch.cat([ids, odd.repeat(len(which))])
        at_query = torch.cat([at_query, torch.arange(len(which)).repeat_interleave(len(odd))])
        scores = torch.cat([scores, weighing.odd_scores(odd, which).reshape(-1)])
    events, of = weighing.events_of(ids)
    if of is not None:
        at_query, scores = at_query[of], scores[of]
    if chosen is not None:
        kept = chosen[events]
        events, at_query, scores = events[kept], at_query[kept], scores[kept]
    shape = len(which), found.k
    filled, named = np.full(shape, np.nan, np.float32), np.full((*shape, len(Top.FIELDS)), NOTHING, np.int64)
    result, numbers = torch.from_numpy(filled), torch.from_numpy(named)
    fast = compiled(len(events)) if found.k <= SORTED else None
    if fast is None:
        nan = _pick(at_query, events, scores, order, table.columns, result, numbers)
    else:
        pairs = at_query.numpy(), events.numpy(), scores.numpy(), ORDERS.index(order)
        nan = fast.pick(*pairs, table.arrays, filled, named)
    return Best(result, numbers, found.scored, found.bounded, nan, int(found.flat))


def _pick(
    at_query: Tensor, events: Tensor, scores: Tensor, order: str, columns: Sequence[Tensor], result: Tensor,
    numbers: Tensor,
) -> int:  # fmt: skip
    """Fill in the best of every query: by score, then event, each event once; how many scores are NaN."""
    nan = int(scores.isnan().sum())
    if nan:
        kept = ~scores.isnan()
        events, at_query, scores = events[kept], at_query[kept], scores[kept]
    by = in_order(at_query, {"largest": scores, "smallest": -scores, "absolute": scores.abs()}[order], events)
    once = torch.ones_like(by, dtype=torch.bool)
    once[1:] = (at_query[by].diff() != 0) | (events[by].diff() != 0)
    by = by[once]
    rank = ranks(at_query[by], len(result))
    best, rank = by[rank < result.shape[1]], rank[rank < result.shape[1]]
    result[at_query[best], rank] = scores[best]
    numbers[at_query[best], rank] = torch.stack([column[events[best]] for column in columns], dim=1)
    return nan
