"""What a search has found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dualform.queries.pairs import in_order

Scored = tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"], Float[Tensor, " pairs"]]


@dataclass
class Found:
    """Pairs that were scored exactly, and for every query a score that k rows surely have."""

    k: int
    queries: int
    thresholds: Float64[Tensor, " queries"] = field(init=False)
    scored: int = 0
    bounded: int = 0
    flat: bool = False
    _parts: list[Scored] = field(default_factory=list)
    _settled: int = 0  # parts that are in order

    def __post_init__(self) -> None:
        self.thresholds = torch.full((self.queries,), -torch.inf, dtype=torch.float64)

    def raise_to(self, scores: Float64[Tensor, " queries"]) -> None:
        """Take in scores that k rows surely have."""
        self.thresholds = torch.maximum(self.thresholds, scores)

    def add(self, at_query: Int64[Tensor, " pairs"], ids: Int64[Tensor, " pairs"], scores: Tensor) -> None:
        """Take in scored pairs, of which none comes twice in one call."""
        passed = scores.numpy() >= self.thresholds.numpy()[at_query.numpy()]
        if passed.all():
            self._parts.append((at_query, ids, scores))
            return
        kept = torch.from_numpy(passed)
        self._parts.append((at_query[kept], ids[kept], scores[kept]))

    @property
    def pending(self) -> int:
        """How many pairs were added since they were last put in order."""
        return sum(len(part[0]) for part in self._parts[self._settled :])

    def pairs(self) -> Scored:
        """Queries, ids and scores of what may be among the best; a pair of several calls comes several times."""
        nothing = torch.empty(0, dtype=torch.int64)
        parts = self._parts or [(nothing, nothing, torch.empty(0))]
        if len(parts) == 1:
            return parts[0]
        at_query, ids, scores = (torch.cat(part) for part in zip(*parts, strict=True))
        return at_query, ids, scores

    def settle(self) -> None:
        """Put what was added in order (query, score, id), each pair once, without what cannot be among the best."""
        if self._settled == len(self._parts):
            return
        at_query, ids, scores = (torch.cat(part) for part in zip(*self._parts, strict=True))
        order = self._order(at_query, ids, scores)
        at_query, ids, scores = at_query[order], ids[order], scores[order]
        once = torch.ones_like(at_query, dtype=torch.bool)
        once[1:] = (ids[1:] != ids[:-1]) | (at_query[1:] != at_query[:-1])
        at_query, ids, scores = at_query[once], ids[once], scores[once]
        self.raise_to(self._kth(at_query, scores))
        self._parts = []
        self.add(at_query, ids, scores)
        self._settled = 1

    def _order(self, at_query: Tensor, ids: Tensor, scores: Tensor) -> Int64[Tensor, " pairs"]:
        if scores.dtype == torch.float32:
            return in_order(at_query, scores, ids)
        order = ids.argsort()
        order = order[scores[order].argsort(descending=True, stable=True)]
        return order[at_query[order].argsort(stable=True)]

    def _kth(self, at_query: Tensor, scores: Tensor) -> Float64[Tensor, " queries"]:
        """The k-th best score of every query; −∞ where there are fewer. Pairs are sorted by query and score."""
        counts = torch.bincount(at_query, minlength=self.queries)
        last = counts.cumsum(0) - counts + self.k - 1
        enough = counts >= self.k
        result = torch.full((self.queries,), -torch.inf, dtype=torch.float64)
        result[enough] = scores[last[enough]].double()
        return result
