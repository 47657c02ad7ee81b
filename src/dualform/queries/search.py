"""Exact top-k by certified bounds: most rows are never looked at.

Thresholds come from the rows of the largest norm; the rest are bounded from above in descending order of what they
can reach, coarsely and then ever more finely; what survives is scored exactly, the best bounds first. A row is left
out only where its bound lies below a score that k rows surely have.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import LANES, alone
from dualform.queries.cascade import Near, Survivors, has_loop, survivors
from dualform.queries.found import Found
from dualform.queries.hot import HotKeys
from dualform.queries.rescoring import best_first
from dualform.queries.shadow import TINY, Asked, some_at_a_time
from dualform.queries.views import View

SEED = 1024  # rows that give the first thresholds
FIRST = 8192  # rows that many queries meet before the others; whole blocks
MANY = 32  # queries
FEW = 64  # pairs that are scored at once
# What things cost, in pairs of a flat scan for many queries: an exact score, a key that is read for it, a key of the
# flat scan beside its pairs.
SCORE, READ, SCANNED = 10, 150, 20
FREE = 1 << 18  # pairs of a flat scan that are not worth a thought
HELD = 1 << 21  # scores that are held while thresholds rise
LARGEST = 3.4028235677973366e38  # what fp32 rounds to infinity from here on

Exact = Callable[[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]], Float[Tensor, " pairs"]]


class Search:
    """One search of some queries over views, of which each narrows what the next ones have to look at."""

    def __init__(
        self,
        queries: Float[Tensor, "queries dim_in"],
        norms: Float64[Tensor, " queries"],
        found: Found,
        sign: float = 1.0,
        extended: bool = False,
        flat: float = 1.0,
    ) -> None:
        """`flat` is what a pair of the flat scan costs that would have to answer, in those of one in fp32."""
        self._queries, self._sign, self._extended = queries, sign, extended
        self._norms = torch.hypot(norms, torch.ones_like(norms)) if extended else norms
        self._scales, self._sizes = sign / self._norms, norms / self._norms
        self._flat, self.found = flat, found

    def run(self, view: View, exact: Exact, hot: HotKeys | None = None) -> bool:
        """Search one view; False where its bounds do not pay: what was found so far still holds.

        `exact` gives the scores of (ids, queries) pairs, in the sign that is searched for; `hot` are the keys of
        which scores are made.
        """
        with alone():
            return self._run(view, exact, hot)

    def _run(self, view: View, exact: Exact, hot: HotKeys | None) -> bool:
        k = self.found.k
        if k * 8 > len(view) > 2 * SEED:
            return False
        if view.weights is not None and view.shadow.scale * float(self._norms.max()) > 1e38:
            return False  # what is weighted may be infinite in fp32
        if len(view) <= max(k, FEW):
            every = torch.arange(len(view)).repeat(len(self._queries))
            at_query = torch.arange(len(self._queries)).repeat_interleave(len(view))
            self._score(view, every, at_query, exact)
            return True
        self.found.settle()
        asked = Asked.of(view.shadow, self._queries, self._scales, self._sizes, self._extended)
        near = self._near(view, hot)
        seeds = min(max(SEED, 8 * k), len(view)) // LANES * LANES
        whole = hot is not None and hot.complete and seeds <= len(view.shadow.front)
        if not (whole and len(near) and view.rows is None and seeds >= 2 * k):
            seeds = 0
            self.found.raise_to(self._seed(view, asked, exact))
        # Many queries meet the first rows alone: what is found there spares most of the work on the others.
        apart = not len(near) and len(self._queries) >= MANY and len(view) > 2 * FIRST
        for begin, end in ((0, FIRST), (FIRST, len(view))) if apart else ((0, len(view)),):
            most = self._worth(view) // SCORE
            pairs = survivors(view, asked, self._scaled(view), k, most, near, seeds, begin, end)
            self.found.bounded += pairs.bounded
            self.found.scored += pairs.scored
            if not pairs.paid or not self._rescore(view, pairs, exact):
                return False
            if end < len(view):
                self.found.settle()
        return True

    def _near(self, view: View, hot: HotKeys | None) -> Near:
        """What is at hand for the compiled loop: products of fp32 numbers that cannot leave their range."""
        usual = self._queries.dtype == torch.float32 and self._queries.is_contiguous()
        if hot is None or not usual or not has_loop() or self.found.k * len(self._queries) > HELD:
            return Near.none()
        keys, slots = hot.at_hand()
        asked = self._queries.numpy(), self._norms.numpy()
        return Near(keys, slots, *asked, self._sign, view.scale, view.shadow.scale)

    def _seed(self, view: View, asked: Asked, exact: Exact) -> Float64[Tensor, " queries"]:
        """Scores that k rows surely have: the exact ones of the rows with the best bounds among the first."""
        k = self.found.k
        first = min(max(SEED, 8 * k), len(view))
        rows, some = view.first(first).T, min(k + max(k // 4, 2), first)
        finely = torch.from_numpy(asked.fine)

        def best_of(part: slice) -> Tensor:
            bounds = finely[part] @ rows
            if view.offsets is not None and asked.offsets is not None:
                bounds.addr_(torch.from_numpy(asked.offsets[part]), view.offsets[:first])
            return bounds.topk(some, dim=1).indices

        best = some_at_a_time(best_of, len(asked.fine))
        at_query = torch.arange(len(best)).repeat_interleave(some)
        scores = self._scores(view.ids(best.reshape(-1)), at_query, exact)
        lowest = scores.view_as(best).double().topk(k, dim=1).values[:, -1]
        if scores.dtype == torch.float32:
            return lowest
        # Sums in fp64 depend on the order in which they were formed, and these rows will be scored once more.
        return lowest - (view.shadow.basis.shape[0] + 4) * 2.0**-51 * view.scale * self._norms

    def _scores(self, ids: Tensor, at_query: Tensor, exact: Exact) -> Tensor:
        self.found.scored += len(ids)
        return exact(ids, at_query)

    def _score(self, view: View, at_row: Tensor, at_query: Tensor, exact: Exact) -> None:
        ids = view.ids(at_row)
        self.found.add(at_query, ids, self._scores(ids, at_query, exact))

    def _scaled(self, view: View) -> Float32[np.ndarray, " queries"]:
        """The thresholds in the units of a view, surely not too high: what fp32 rounds up to them passes."""
        thresholds = self.found.thresholds.numpy()
        if len(thresholds) and thresholds.max() == -np.inf:
            return np.full(len(thresholds), -1e38, np.float32)  # nothing is known yet
        # A weighted score is made of one that was rounded before.
        least = 1.5e-45 * (1 + view.scale / view.shadow.scale)
        exactly = np.clip(thresholds, -LARGEST, LARGEST) - least
        with np.errstate(over="ignore"):
            scaled = np.clip(exactly / view.scale / self._norms.numpy(), -1e38, 1e38)
        narrow: np.ndarray = (scaled - 1e-6 * np.abs(scaled) - TINY).astype(np.float32)
        return narrow

    def _worth(self, view: View) -> int:
        """What scoring one by one may cost: half of a flat scan."""
        return max(int(self._flat * len(view.shadow) * (len(self._queries) + SCANNED)) // 2, FREE)

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
        if len(at_row) <= max(FEW, (self.found.k + 4) * self.found.queries):
            self._score(view, at_row, at_query, exact)
            return True

        def score(some: Tensor) -> Tensor:
            return self._scores(view.ids(at_row[some]), at_query[some], exact)

        def pays(some: Tensor) -> bool:
            return self._pays(view, at_row[some])

        scored = best_first(self.found, at_query, bounds, score, lambda: self._scaled(view), pays)
        if scored is None:
            return False
        some, scores = scored
        self.found.add(at_query[some], view.ids(at_row[some]), scores)
        return True
