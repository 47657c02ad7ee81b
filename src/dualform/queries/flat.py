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
from dualform.queries.search import Exact

TILE = 1 << 19  # products that are computed at a time, few enough to stay in the cache
JOINED = 1 << 22  # the same for few queries, whose products are little beside the keys
FEW = 16  # queries
SAMPLE = 4096  # rows that give a first threshold
MANY = 16  # times k candidates of a query, above which a better threshold pays
RANGE = 1e36  # products up to here are far from overflow in fp32, and sums of them too

Tiles = Iterator[tuple[int, Float[Tensor, "rows dim_in"]]]  # the number of the first key, and the keys from there on


def scan(
    found: Found,
    tiles: Tiles,
    queries: Float[Tensor, "queries dim_in"],
    norms: Float32[Tensor, " keys"],
    chosen: Bool[Tensor, " keys"] | None,
    order: str,
    exact: Exact,
) -> bool:
    """Search every key; False, with nothing done, where a product could overflow.

    `norms` are not below those of the keys, and infinite for those that are set apart; these, and keys that are not
    chosen, do not count.
    """
    sizes = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    if bool(norms.isinf().any()):
        sound = norms.isfinite()
        chosen = sound if chosen is None else chosen & sound
    if chosen is not None:
        norms = norms.where(chosen, 0.0)
    if float(sizes.max()) * float(norms.max() if len(norms) else 0.0) > RANGE:
        return False
    for first, products, keys in _products(tiles, queries):
        here = slice(first, first + len(products))
        found.bounded += products.numel()
        ranks = products if order == "largest" else products.neg_() if order == "smallest" else products.abs_()
        if chosen is not None:
            ranks[~chosen[here]] = -torch.inf
        error = (queries.shape[1] + 8) * torch.finfo(ranks.dtype).eps / 2
        slack = error * float(norms[here].max()) * sizes + queries.shape[1] * 1e-40
        rows, at_query = _candidates(ranks, found, slack, new=first == 0 or keys is None)
        if len(rows):
            found.scored += len(rows)
            if keys is None:
                scores = exact(rows + first, at_query)
            else:
                scores = pair_scores(keys, queries, rows, at_query, norms[here].double(), sizes)
                scores = {"largest": scores, "smallest": -scores, "absolute": scores.abs()}[order]
            found.add(at_query, rows + first, scores)
            if found.pending >= found.k * found.queries:
                found.settle()
    return True


def _products(
    tiles: Tiles, queries: Float[Tensor, "queries dim_in"]
) -> Iterator[tuple[int, Float[Tensor, "rows queries"], Float[Tensor, "rows dim_in"] | None]]:
    """All products, those of many keys at a time, and the keys where they are at hand.

    Each is there until the next ones are asked for.
    """
    most = max((JOINED if len(queries) <= FEW else TILE) // len(queries), 256)
    buffer, first, filled = torch.empty(0, len(queries)), 0, 0
    for number, stored in tiles:
        keys = stored if stored.dtype in (torch.float32, torch.float64) else stored.float()
        asked = queries.to(keys.dtype).contiguous()
        at = 0
        while at < len(keys):
            if filled == len(buffer) or keys.dtype != buffer.dtype or number + at != first + filled:
                if filled:
                    yield first, buffer[:filled], None
                if keys.dtype != buffer.dtype or len(buffer) == 0:
                    buffer = torch.empty(most, len(queries), dtype=keys.dtype)
                first, filled = number + at, 0
            tile = keys[at : at + len(buffer) - filled]
            products = buffer[filled : filled + len(tile)]
            if len(asked) == 1:
                torch.mv(tile, asked[0], out=products[:, 0])
            else:
                torch.mm(tile, asked.T, out=products)
            at, filled = at + len(tile), filled + len(tile)
            if len(queries) > FEW:
                yield first, buffer[:filled], tile  # as long as the keys are there
                first, filled = number + at, 0
    if filled:
        yield first, buffer[:filled], None


def _candidates(
    ranks: Float[Tensor, "rows queries"], found: Found, slack: Float64[Tensor, " queries"], new: bool
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
    """The pairs whose exact score may reach the threshold: that of what was found, or of some of these rows.

    The latter where the rows are `new`, the first ones or very many, or where else there would be too many pairs.
    """
    thresholds = found.thresholds - slack
    if new and len(ranks) > found.k:
        thresholds = torch.maximum(thresholds, _lowest(ranks[: max(SAMPLE, 8 * found.k)], found.k, slack))
    rows, which = above(ranks, _not_above(thresholds, ranks.dtype))
    if len(rows) > MANY * found.k * found.queries and len(ranks) > found.k:
        thresholds = torch.maximum(thresholds, _lowest(ranks, found.k, slack))
        return above(ranks, _not_above(thresholds, ranks.dtype))
    return rows, which


def _lowest(ranks: Float[Tensor, "rows queries"], k: int, slack: Float64[Tensor, " queries"]) -> Tensor:
    """The k-th best of some rows, less the error: a score that k rows surely have."""
    return ranks.topk(k, dim=0).values[-1].double() - 2 * slack


def _not_above(thresholds: Tensor, dtype: torch.dtype) -> Tensor:
    """Thresholds in another precision, surely not higher."""
    return torch.nextafter(thresholds.clamp(-3e38, 3e38).to(dtype), torch.tensor(-torch.inf, dtype=dtype))
