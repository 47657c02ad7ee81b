"""Exact top-k by certified bounds: most rows are never looked at.

Thresholds come from the rows of the largest norm; the rest are bounded from above in descending order of what they
can reach, coarsely and then ever more finely; what survives is scored exactly, the best bounds first. A row is left
out only where its bound lies below a score that k rows surely have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.queries.cascade import Survivors, survivors
from dualform.queries.found import Found
from dualform.queries.pairs import by_query, ranks
from dualform.queries.shadow import TINY, Asked
from dualform.queries.views import View

SEED = 1024  # rows that give the first thresholds
FIRST = 8192  # rows that many queries meet before the others; whole blocks
MANY = 32  # queries
FEW = 64  # pairs that are scored at once
# What things cost, in pairs of a flat scan for many queries: an exact score, a key that is read for it, a key of the
# flat scan beside its pairs.
SCORE, READ, SCANNED = 10, 150, 20
FREE = 1 << 18  # pairs of a flat scan that are not worth a thought
LARGEST = 3.4028235677973366e38  # what fp32 rounds to infinity from here on

Exact = Callable[[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]], Float[Tensor, " pairs"]]


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
        """Search one view; False where its bounds do not pay: what was found so far still holds.

        `exact` gives the scores of (ids, queries) pairs, in the sign that is searched for.
        """
        k = self.found.k
        if k * 8 > len(view) > 2 * SEED:
            return False
        if len(view) <= max(k, FEW):
            every = torch.arange(len(view)).repeat(len(self._units))
            at_query = torch.arange(len(self._units)).repeat_interleave(len(view))
            self._score(view, every, at_query, exact)
            return True
        self.found.settle()
        asked = Asked.of(view.shadow, self._units, self._offsets)
        self.found.raise_to(self._seed(view, asked, exact))
        # Many queries meet the first rows alone: what is found there spares most of the work on the others.
        border = FIRST if len(self._units) >= MANY and len(view) > 2 * FIRST else 0
        for begin, end in ((0, border), (border, len(view))) if border else ((0, len(view)),):
            pairs = survivors(view, asked, self._scaled(view), k, self._worth(view) // SCORE, begin, end)
            self.found.bounded += pairs.bounded
            if not pairs.paid or not self._rescore(view, pairs, exact):
                return False
        return True

    def _seed(self, view: View, asked: Asked, exact: Exact) -> Float64[Tensor, " queries"]:
        """Scores that k rows surely have: the exact ones of the rows with the best bounds among the first."""
        k = self.found.k
        first = min(max(SEED, 8 * k), len(view))
        bounds = asked.fine @ view.first(first).T
        if view.offsets is not None and asked.offsets is not None:
            bounds.addr_(asked.offsets, view.offsets[:first])
        best = bounds.topk(min(k + max(k // 4, 2), first), dim=1).indices
        at_query = torch.arange(len(best))[:, None].expand_as(best)
        scores = self._scores(view, best.reshape(-1), at_query.reshape(-1), exact)
        lowest = scores.view_as(best).double().topk(k, dim=1).values[:, -1]
        if scores.dtype == torch.float32:
            return lowest
        # Sums in fp64 depend on the order in which they were formed, and these rows will be scored once more.
        return lowest - (view.shadow.basis.shape[0] + 4) * 2.0**-51 * view.scale * self._norms

    def _scores(self, view: View, at_row: Tensor, at_query: Tensor, exact: Exact) -> Tensor:
        self.found.scored += len(at_row)
        return exact(view.ids(at_row), at_query)

    def _score(self, view: View, at_row: Tensor, at_query: Tensor, exact: Exact) -> None:
        self.found.add(at_query, view.ids(at_row), self._scores(view, at_row, at_query, exact))

    def _scaled(self, view: View) -> Float32[Tensor, " queries"]:
        """The thresholds in the units of a view, surely not too high: what fp32 rounds up to them passes."""
        exactly = self.found.thresholds.clamp(-LARGEST, LARGEST) - 1.5e-45
        scaled = exactly / view.scale / self._norms
        return (scaled - 1e-6 * scaled.abs() - TINY).float()

    def _worth(self, view: View) -> int:
        """What scoring one by one may cost: half of a flat scan."""
        return max(len(view.shadow) * (len(self._units) + SCANNED) // 2, FREE)

    def _pays(self, view: View, at_row: Int64[Tensor, " pairs"]) -> bool:
        """Whether pairs are so few that scoring them costs less than a flat scan."""
        worth = self._worth(view)
        if (SCORE + READ) * len(at_row) <= worth:
            return True
        return SCORE * len(at_row) + READ * len(at_row.unique()) <= worth

    def _rescore(self, view: View, pairs: Survivors, exact: Exact) -> bool:
        """Score what is left exactly: first the best bounds of every query, then what these do not rule out.

        False where that is still too much.
        """
        at_row, at_query, bounds = pairs.at_row, pairs.at_query, pairs.bounds
        if len(at_row) <= FEW:
            self._score(view, at_row, at_query, exact)
            return True
        order = by_query(at_query, bounds)
        at_row, at_query, bounds = at_row[order], at_query[order], bounds[order]
        rank = ranks(at_query, self.found.queries)
        most = self.found.k + 4
        taken = (rank < most).nonzero()[:, 0]
        scores = self._scores(view, at_row[taken], at_query[taken], exact)
        first = torch.full((self.found.queries, most), -torch.inf, dtype=torch.float64)
        first[at_query[taken], rank[taken]] = scores.double()
        self.found.raise_to(first.topk(self.found.k, dim=1).values[:, -1])
        later = ((rank >= most) & (bounds >= self._scaled(view)[at_query])).nonzero()[:, 0]
        if not self._pays(view, at_row[later]):
            return False
        if len(later):
            scores = torch.cat([scores, self._scores(view, at_row[later], at_query[later], exact)])
            taken = torch.cat([taken, later])
        self.found.add(at_query[taken], view.ids(at_row[taken]), scores)
        return True
