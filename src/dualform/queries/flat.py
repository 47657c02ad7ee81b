"""The flat scan: every key is read, in its own precision, and only what may be among the best is scored exactly.

For keys that no bound tells apart. The error of a product in the keys' own precision is inside the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.queries.found import Found
from dualform.queries.pairs import above
from dualform.queries.score import pair_scores

TILE = 1 << 19  # products that are computed at a time, few enough to stay in the cache
MANY = 4  # times k candidates of a query, above which a better threshold pays
RANGE = 1e36  # products up to here are far from overflow in fp32, and sums of them too

Tiles = Iterator[tuple[Int64[Tensor, " rows"], Float[Tensor, "rows dim_in"]]]


def scan(
    found: Found,
    tiles: Tiles,
    queries: Float[Tensor, "queries dim_in"],
    norms: Float32[Tensor, " keys"],
    chosen: Bool[Tensor, " keys"],
    order: str,
) -> bool:
    """Search every key; False, with nothing done, where a product could overflow.

    `norms` are not below those of the keys; keys that are not chosen do not count.
    """
    sizes = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    if float(sizes.max()) * float(norms[chosen].max() if bool(chosen.any()) else 0.0) > RANGE:
        return False
    everything = bool(chosen.all())
    for numbers, stored in tiles:
        keys = stored if stored.dtype in (torch.float32, torch.float64) else stored.float()
        asked = queries.to(keys.dtype).contiguous()
        unit = torch.finfo(keys.dtype).eps / 2
        largest = float(norms[int(numbers[0]) : int(numbers[-1]) + 1].where(chosen[numbers], 0.0).max())
        slack = (keys.shape[1] + 8) * unit * largest * sizes + keys.shape[1] * 1e-40
        step = max(TILE // len(queries), 256)
        for at in range(0, len(keys), step):
            tile, here = keys[at : at + step], numbers[at : at + step]
            products = torch.mv(tile, asked[0])[:, None] if len(asked) == 1 else tile @ asked.T
            found.bounded += len(tile) * len(queries)
            ranks = products if order == "largest" else products.neg_() if order == "smallest" else products.abs_()
            if not everything:
                ranks[~chosen[here]] = -torch.inf
            rows, which = _candidates(ranks, found, slack)
            if len(rows):
                scores = pair_scores(tile, queries, rows, which, norms[here].double())
                exact = {"largest": scores, "smallest": -scores, "absolute": scores.abs()}[order]
                found.scored += len(scores)
                found.add(which, here[rows], exact)
                found.settle()
    return True


def _candidates(
    ranks: Float[Tensor, "rows queries"], found: Found, slack: Float64[Tensor, " queries"]
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
    """The pairs whose exact score may reach the threshold: that of what was found, or of this tile."""
    rows, which = above(ranks, _not_above(found.thresholds - slack, ranks.dtype))
    if len(rows) > MANY * found.k * found.queries and len(ranks) > found.k:
        # The k-th best here, less the error, is a score that k rows surely have.
        lowest = ranks.topk(found.k, dim=0).values[-1].double() - 2 * slack
        return above(ranks, _not_above(torch.maximum(lowest, found.thresholds - slack), ranks.dtype))
    return rows, which


def _not_above(thresholds: Tensor, dtype: torch.dtype) -> Tensor:
    """Thresholds in another precision, surely not higher."""
    return torch.nextafter(thresholds.clamp(-3e38, 3e38).to(dtype), torch.tensor(-torch.inf, dtype=dtype))
