"""The flat scan: every key is read, and only what may be among the best is scored exactly.

For keys that no bound tells apart. The error of a product is inside the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import alone, compiled, spread
from dualform.queries.found import Found
from dualform.queries.pairs import above
from dualform.queries.search import Exact

TILE = 1 << 20  # products that are computed at a time, few enough to stay in the cache
JOINED = 1 << 22  # the same for few queries, whose products are little beside the keys
FEW = 16  # queries
PIECE = 512  # rows that a thread multiplies at a time
SAMPLE = 4096  # rows that give a first threshold
MANY_LEFT = 1 << 20  # pairs that are held before those that are ruled out meanwhile are let go, and half of them left
MANY = 16  # times k candidates of a query, above which a better threshold pays
RANGE = 1e36  # products up to here are far from overflow in fp32, and sums of them too

Tiles = Iterator[tuple[int, Float[Tensor, "rows dim_in"]]]  # the number of the first key, and the keys from there on


@dataclass(frozen=True)
class Products:
    """Products of keys from a number on with all queries, nearly.

    `errors` are not below those of a product with a query of norm 1.
    """

    first: int
    values: Float[Tensor, "rows queries"]
    errors: Float32[Tensor, " rows"]


def at_a_time(queries: int) -> int:
    """How many keys are multiplied with so many queries at a time."""
    return max((JOINED if queries <= FEW else TILE) // queries, 256)


def scan(
    found: Found,
    products: Callable[[Float[Tensor, "queries dim_in"]], Iterator[Products]],
    queries: Float[Tensor, "queries dim_in"],
    norms: Float32[Tensor, " keys"],
    chosen: Bool[Tensor, " keys"] | None,
    order: str,
    exact: Exact,
) -> bool:
    """Search every key; False, with nothing found, where a product could overflow, or where too much is left to score.

    `norms` are not below those of the keys, and infinite for those that are set apart; these, and keys that are not
    chosen, do not count. `products` gives those of all keys with queries of a norm up to 1.
    """
    sizes = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    if bool(norms.isinf().any()):
        sound = norms.isfinite()
        chosen = sound if chosen is None else chosen & sound
    if chosen is not None:
        norms = norms.where(chosen, 0.0)
    largest = float(norms.max()) if len(norms) else 0.0
    if max(float(sizes.max()), 1.0) * largest > RANGE:
        return False
    # Over powers of two, so that no query leaves the range of fp32.
    units = torch.ldexp(torch.ones_like(sizes), -torch.frexp(sizes).exponent)
    with alone():
        # What underflow can lose in a product, and in a score that is rounded to fp32.
        tiny = queries.shape[1] * 1e-40 + 3e-45 * units
        some = products(queries.double() * units[:, None])
        pairs = _left(found, some, found.thresholds * units, sizes * units, tiny, chosen, order)
    if pairs is None:
        return False
    at_query, ids = pairs
    found.scored += len(ids)
    found.add(at_query, ids, exact(ids, at_query))
    return True


def _left(
    found: Found,
    products: Iterator[Products],
    thresholds: Tensor,
    sizes: Tensor,
    tiny: Tensor,
    chosen: Tensor | None,
    order: str,
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]] | None:
    """The queries and ids of the pairs that may be among the best; None where these are too many."""
    near, left = Found(found.k, found.queries), Left(MANY_LEFT + 2 * found.k * found.queries)
    near.raise_to(thresholds)
    for some in products:
        here = slice(some.first, some.first + len(some.values))
        found.bounded += some.values.numel()
        values = some.values
        ranks = values if order == "largest" else values.neg_() if order == "smallest" else values.abs_()
        if chosen is not None:
            ranks[~chosen[here]] = -torch.inf
        rows, at_query = _candidates(ranks, near, float(some.errors.max()) * sizes + tiny)
        values, slack = ranks[rows, at_query].double(), some.errors[rows] * sizes[at_query] + tiny[at_query]
        near.add(at_query, rows + some.first, values - slack)
        if near.pending >= found.k * found.queries:
            near.settle()
        if not left.add(at_query, rows + some.first, values + slack, near.thresholds):
            return None
    near.settle()
    return left.result(near.thresholds)


class Left:
    """The pairs whose score may be among the best, each with what it cannot exceed."""

    def __init__(self, most: int) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._count, self._most = 0, most

    def add(self, at_query: Tensor, ids: Tensor, bounds: Tensor, thresholds: Float64[Tensor, " queries"]) -> bool:
        """Take in more of them; `thresholds` are what k rows surely have. False where they have become too many."""
        self._parts.append((at_query, ids, bounds))
        self._count += len(ids)
        if self._count > self._most:
            self._clear(thresholds)
            return 2 * self._count <= self._most  # or else most of the time would go into this
        return True

    def _clear(self, thresholds: Float64[Tensor, " queries"]) -> None:
        at_query, ids, bounds = (torch.cat(part) for part in zip(*self._parts, strict=True))
        kept = bounds >= thresholds[at_query]
        self._parts, self._count = [(at_query[kept], ids[kept], bounds[kept])], int(kept.sum())

    def result(
        self, thresholds: Float64[Tensor, " queries"]
    ) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
        """The queries and ids of those that thresholds do not rule out."""
        if not self._parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._clear(thresholds)
        at_query, ids, _ = self._parts[0]
        return at_query, ids


def multiply(
    rows: Callable[[slice], Float[Tensor, "rows dim_in"]],
    queries: Float[Tensor, "queries dim_in"],
    products: Float[Tensor, "rows queries"],
) -> None:
    """Fill in the products of some rows with all queries, piece by piece, over all threads."""

    def some(piece: slice) -> None:
        if len(queries) == 1:
            torch.mv(rows(piece), queries[0], out=products[piece, 0])
        else:
            torch.mm(rows(piece), queries.T, out=products[piece])

    pieces = [slice(at, at + PIECE) for at in range(0, len(products), PIECE)]
    if compiled(0) is None:
        some(slice(0, len(products)))
    else:
        spread(some, pieces)


def products_of(
    tiles: Tiles, queries: Float[Tensor, "queries dim_in"], norms: Float32[Tensor, " keys"]
) -> Iterator[Products]:
    """All products, those of many keys at a time; each is there until the next ones are asked for.

    `norms` are not below those of the keys, which are finite.
    """
    buffer, first, filled = torch.empty(0, len(queries)), 0, 0

    def some() -> Products:
        here = norms[first : first + filled]
        # The last is for scores, which are rounded to fp32: rows that stay below have a smaller one.
        units = (queries.shape[1] + 8) * torch.finfo(buffer.dtype).eps / 2 + 2.0**-22
        return Products(first, buffer[:filled], units * here.where(here.isfinite(), 0.0))

    for number, stored in tiles:
        keys = stored if stored.dtype in (torch.float32, torch.float64) else stored.float()
        asked = queries.to(keys.dtype)
        at = 0
        while at < len(keys):
            if filled == len(buffer) or keys.dtype != buffer.dtype or number + at != first + filled:
                if filled:
                    yield some()
                if keys.dtype != buffer.dtype or len(buffer) == 0:
                    buffer = torch.empty(at_a_time(len(queries)), len(queries), dtype=keys.dtype)
                first, filled = number + at, 0
            tile = keys[at : at + len(buffer) - filled]
            products = buffer[filled : filled + len(tile)]
            multiply(tile.__getitem__, asked, products)
            at, filled = at + len(tile), filled + len(tile)
            if len(queries) > FEW:
                yield some()
                first, filled = number + at, 0
    if filled:
        yield some()


def _candidates(
    ranks: Float[Tensor, "rows queries"], near: Found, slack: Float64[Tensor, " queries"]
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
    """The pairs whose exact score may reach the threshold; a better one is looked for where there would be many."""
    if bool(near.thresholds.isinf().any()) and len(ranks) > near.k:
        near.raise_to(_lowest(ranks[: max(SAMPLE, 8 * near.k)], near.k, slack))
    rows, which = above(ranks, _not_above(near.thresholds - slack, ranks.dtype))
    if len(rows) > MANY * near.k * near.queries and len(ranks) > near.k:
        near.raise_to(_lowest(ranks, near.k, slack))
        return above(ranks, _not_above(near.thresholds - slack, ranks.dtype))
    return rows, which


def _lowest(ranks: Float[Tensor, "rows queries"], k: int, slack: Float64[Tensor, " queries"]) -> Tensor:
    """The k-th best of some rows, less the error: a score that k rows surely have."""
    return ranks.topk(k, dim=0).values[-1].double() - slack


def _not_above(thresholds: Tensor, dtype: torch.dtype) -> Tensor:
    """Thresholds in another precision, surely not higher."""
    return torch.nextafter(thresholds.clamp(-3e38, 3e38).to(dtype), torch.tensor(-torch.inf, dtype=dtype))
