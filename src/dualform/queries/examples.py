"""The best examples: the certified search over their key sums, which scores of examples are products with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dualform.queries import best
from dualform.queries.best import AT_ONCE, tame
from dualform.queries.focus import Focus
from dualform.queries.found import Found
from dualform.queries.index import index_of
from dualform.queries.pairs import pair_products, ranks
from dualform.queries.results import Explanation
from dualform.queries.scorers import AttentionScorer, Scorer
from dualform.queries.search import Search
from dualform.queries.shadow import row_norms
from dualform.queries.sums import ExampleSums, example_sums
from dualform.queries.views import View


@dataclass(frozen=True)
class BestExamples:
    """The k best examples of every query by the sum over their events, padded with −1."""

    examples: Int64[Tensor, "queries k"]
    scores: Float64[Tensor, "queries k"]
    counts: Int64[Tensor, "queries k"]
    explanation: Explanation


def suits_examples(focus: Focus, scorer: Scorer, k: int) -> bool:
    """Whether the k best examples are a question for the key sums and their shadow."""
    memory = focus.memory
    whole = focus.until == memory.steps and focus.selection.by_example
    many = memory.manifest.examples >= max(best.FEW, 16 * k)
    return isinstance(scorer, AttentionScorer) and whole and many and tame(row_norms(focus.queries))


def best_examples(focus: Focus, k: int, order: str) -> BestExamples | None:
    """The k best examples; None where another way has to answer."""
    memory = focus.memory
    sums = example_sums(memory, focus.weight)
    if sums is None or not sums.finite:
        return None
    shadow = index_of(memory).of_examples(focus.weight, sums.sums[:-1])
    chosen = sums.chosen(focus.selection)
    views = View.of(shadow, chosen[shadow.numbers])
    parts: list[BestExamples] = []
    for some in torch.arange(len(focus.queries)).split(AT_ONCE):
        found = Found(k, len(some))
        if len(shadow.odd) or not _search(found, views, sums, focus.queries[some], order):
            return None
        parts.append(_sorted(found, sums, focus.queries[some], order))
    return BestExamples(
        torch.cat([part.examples for part in parts]),
        torch.cat([part.scores for part in parts]),
        torch.cat([part.counts for part in parts]),
        Explanation("certified shadow of the key sums per example", sum(part.explanation.rows for part in parts)),
    )


def _exact(sums: ExampleSums, queries: Tensor, ids: Tensor, at_query: Tensor) -> Float64[Tensor, " pairs"]:
    some, place = ids.unique(return_inverse=True)
    return pair_products(sums.sums[some], queries.double(), place, at_query)


def _search(found: Found, view: View, sums: ExampleSums, queries: Tensor, order: str) -> bool:
    norms = row_norms(queries)
    for sign in {"largest": (1.0,), "smallest": (-1.0,), "absolute": (1.0, -1.0)}[order]:

        def exact(ids: Tensor, at_query: Tensor, sign: float = sign) -> Tensor:
            scores = _exact(sums, queries, ids, at_query)
            return scores.abs() if order == "absolute" else scores * sign

        if not Search(queries, norms, found, sign).run(view, exact):
            return False
    return True


def _sorted(found: Found, sums: ExampleSums, queries: Tensor, order: str) -> BestExamples:
    """What was found, in order: score, then example."""
    found.settle()
    at, ids, scores = found.pairs()
    rank = ranks(at, found.queries)
    first = rank < found.k
    at, rank, ids, scores = at[first], rank[first], ids[first], scores[first].double()
    if order == "absolute":
        scores = _exact(sums, queries, ids, at)
    elif order == "smallest":
        scores = -scores
    shape = (found.queries, found.k)
    examples, values = torch.full(shape, -1), torch.full(shape, torch.nan, dtype=torch.float64)
    events = torch.zeros(shape, dtype=torch.int64)
    examples[at, rank], values[at, rank], events[at, rank] = ids, scores, sums.counts[ids]
    return BestExamples(examples, values, events, Explanation("", found.scored))
