"""Plans for the best: the k best events, of all or of every group, and the k best groups by their sums."""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dualform.queries.best import best_events, suits, tame
from dualform.queries.examples import best_examples, suits_examples
from dualform.queries.focus import Focus
from dualform.queries.plan import GroupTotals, Plan, answer, group_totals
from dualform.queries.reducers import Top, TopWithin, rank_keys
from dualform.queries.results import Explanation, TopEvents, TopGroups
from dualform.queries.scorers import Scorer
from dualform.queries.selection import Grouping
from dualform.queries.shadow import row_norms


def top_events(focus: Focus, scorer: Scorer, k: int, order: str, grouping: Grouping | None) -> Plan[TopEvents]:
    """The k best events of every query; with a grouping, of every group. By the index, or else by a scan."""
    groups = None if grouping is None else grouping.groups
    if not suits(focus.memory, focus.weight, k) or not tame(norms := row_norms(scorer.queries)):
        return _scan(focus, scorer, k, order, grouping)

    def finish(rows: int) -> TopEvents:
        about = focus.memory, focus.weight, focus.until, focus.selection
        found = best_events(*about, scorer, norms, k, order, grouping)
        if found is None:
            return answer(_scan(focus, scorer, k, order, grouping))
        fields = dict(zip(Top.FIELDS, found.numbers.unbind(-1), strict=True))
        return TopEvents(scores=found.scores, explanation=found.explanation, groups=groups, **fields)

    return Plan(TopEvents, focus, (), finish)


def _scan(focus: Focus, scorer: Scorer, k: int, order: str, grouping: Grouping | None) -> Plan[TopEvents]:
    reducer = Top(scorer, k, order) if grouping is None else TopWithin(scorer, k, order, grouping)

    def finish(rows: int) -> TopEvents:
        scores, numbers = reducer.result()
        fields = dict(zip(Top.FIELDS, numbers.unbind(-1), strict=True))
        explanation = Explanation("full scan", rows, int(reducer.nan.sum()))
        groups = None if grouping is None else grouping.groups
        return TopEvents(scores=scores, explanation=explanation, groups=groups, **fields)

    return Plan(TopEvents, focus, (reducer,), finish)


def top_groups(focus: Focus, scorer: Scorer, k: int, order: str, grouping: Grouping, absolute: bool) -> Plan[TopGroups]:
    """The k best groups of every query by the sum over their events; one without events is never among them."""

    def ranked(totals: GroupTotals) -> TopGroups:
        at_once = max(focus.memory.resident // 32 // (8 * max(len(grouping.groups), 1)), 1)
        parts = []
        for some in torch.arange(len(focus.queries)).split(at_once):
            values = totals.of(some)
            best = _best(rank_keys(torch.where(totals.counts > 0, values, torch.nan), order), k)
            parts.append((best, values.gather(1, best)))
        width = min(k, len(grouping.groups))
        best = torch.cat([torch.empty(0, width, dtype=torch.int64), *(best for best, _ in parts)])
        scores = torch.cat([torch.empty(0, width, dtype=torch.float64), *(values for _, values in parts)])
        return _padded(best, scores, k, grouping, totals)

    summed = group_totals(focus, scorer, grouping, absolute, tiled=True).then(TopGroups, ranked)
    if absolute or grouping.names != ("example",) or not suits_examples(focus, scorer, k):
        return summed

    def finish(rows: int) -> TopGroups:
        found = best_examples(focus, k, order)
        if found is None:
            return answer(summed)
        named = [[example if example >= 0 else None for example in row] for row in found.examples.tolist()]
        return TopGroups(named, found.scores, found.counts, found.explanation)

    return Plan(TopGroups, focus, (), finish)


def _best(keys: Float64[Tensor, "queries groups"], k: int) -> Int64[Tensor, "queries best"]:
    """The numbers of the k largest of every row, the largest first, of equal ones those that come first."""
    if k >= keys.shape[1]:
        return keys.sort(dim=1, descending=True, stable=True).indices
    last = keys.topk(k, dim=1).values[:, -1:]
    above, equal = keys > last, keys == last
    chosen = above | (equal & (equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)))
    found = chosen.nonzero()[:, 1].reshape(len(keys), k)
    return found.gather(1, keys.gather(1, found).sort(dim=1, descending=True, stable=True).indices)


def _padded(best: Tensor, scores: Tensor, k: int, grouping: Grouping, totals: GroupTotals) -> TopGroups:
    counts = totals.counts[best]
    pad = max(k - best.shape[1], 0)
    named = [
        [grouping.groups[group] if count > 0 else None for group, count in zip(*row, strict=True)] + [None] * pad
        for row in zip(best.tolist(), counts.tolist(), strict=True)
    ]
    return TopGroups(
        groups=named,
        scores=torch.nn.functional.pad(torch.where(counts > 0, scores, torch.nan), (0, pad), value=torch.nan),
        counts=torch.nn.functional.pad(counts, (0, pad)),
        explanation=totals.explanation,
    )
