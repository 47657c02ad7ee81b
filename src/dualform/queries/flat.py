"""The flat scan: every key is read, and only what may be among the best is scored exactly.

For keys that no bound tells apart. The error of a product is inside the comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import alone, compiled, spread
from dualform.queries.found import Found
from dualform.queries.rescoring import best_first
from dualform.queries.search import Exact
from dualform.queries.sieve import Left, Sieve, Tile, Wanted, all_left

PIECE = 1 << 18  # products that a thread computes at a time, few enough to stay in its cache
WIDE = 1 << 23  # numbers of keys at a time
LEAST, MOST = 256, 8192  # keys at a time
MANY_LEFT = 1 << 20  # pairs that are held before those that are ruled out meanwhile are let go, and half of them left
RANGE = 1e36  # products up to here are far from overflow in fp32, and sums of them too

Keys = Iterator[tuple[int, Float[Tensor, "rows dim_in"]]]  # the number of the first key, and the keys from there on


def at_a_time(queries: int, dim_in: int) -> int:
    """How many keys a thread multiplies with so many queries at a time: a power of two."""
    most = min(PIECE // max(queries, 1), WIDE // max(dim_in, 1), MOST)
    return max(1 << max(most.bit_length() - 1, 0), LEAST)


def scan(
    found: Found,
    tiles: Callable[[Float64[Tensor, "queries dim_in"]], Iterable[Tile]],
    queries: Float[Tensor, "queries dim_in"],
    norms: Float32[Tensor, " keys"],
    groups: Int64[Tensor, " keys"] | None,
    order: str,
    exact: Exact,
) -> bool:
    """Search every key; False, with nothing found, where a product could overflow, or where too much is left to score.

    `norms` are not below those of the keys, and infinite for those that are set apart; these, and keys of no group, −1,
    do not count. What is found is, for every query, that of every group. `tiles` gives all keys for queries of norms
    up to 1.
    """
    several = found.queries // len(queries)
    sizes = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    if bool(norms.isinf().any()):
        groups = (torch.zeros(len(norms), dtype=torch.int64) if groups is None else groups).where(norms.isfinite(), -1)
    if groups is not None:
        norms = norms.where(groups >= 0, 0.0)
    largest = float(norms.max()) if len(norms) else 0.0
    if max(float(sizes.max()), 1.0) * largest > RANGE:
        return False
    # Over powers of two, so that no query leaves the range of fp32.
    units = torch.ldexp(torch.ones_like(sizes), -torch.frexp(sizes).exponent)
    signed = queries.double() * (-units if order == "smallest" else units)[:, None]
    # What underflow can lose in a product, and in a score that is rounded to fp32.
    tiny = queries.shape[1] * 1e-40 + 3e-45 * units
    scales = units.repeat_interleave(several)
    wanted = Wanted(signed, sizes * units, tiny, found.thresholds * scales, found.k, order == "absolute", groups)
    with alone():
        left = _left(wanted, tiles(signed), len(norms))
        found.bounded += len(norms) * len(queries)
        if left is None:
            return False
        asking, ids, bounds = left

        def score(some: Tensor) -> Tensor:
            found.scored += len(some)
            return exact(ids[some], asking[some] // several)

        scored = best_first(found, asking, bounds, score, lambda: (found.thresholds * scales).numpy())
        assert scored is not None
        some, scores = scored
        found.add(asking[some], ids[some], scores)
    return True


def _left(wanted: Wanted, tiles: Iterable[Tile], keys: int) -> Left | None:
    """The pairs that may be among the best; None where these are too many."""
    fast, most = compiled(keys * len(wanted)), MANY_LEFT + 2 * wanted.k * len(wanted.thresholds)
    rows = at_a_time(*wanted.queries.shape)
    sieves = [Sieve(wanted, most, fast)]
    idle, refused = list(sieves), threading.Event()
    for tile in tiles:

        def some(piece: slice, tile: Tile = tile) -> None:
            if refused.is_set():
                return
            try:
                sieve = idle.pop()
            except IndexError:
                sieves.append(sieve := Sieve(wanted, most, fast))
            if not sieve.take(tile, piece):
                refused.set()
            idle.append(sieve)

        pieces = [slice(at, min(at + rows, len(tile))) for at in range(0, len(tile), rows)]
        if fast is None:  # torch's own threads do the work
            for piece in pieces:
                some(piece)
        else:
            spread(some, pieces)
        if refused.is_set():
            return None
    return all_left(sieves)


def tiles_of(keys: Keys, queries: Float64[Tensor, "queries dim_in"], norms: Float32[Tensor, " keys"]) -> Iterator[Tile]:
    """Keys in their own precision; `norms` are not below those of all keys, which are finite where they count."""
    one, none = torch.ones(len(queries), dtype=torch.float64), torch.zeros(len(queries), dtype=torch.float64)
    for first, stored in keys:
        rows = stored if stored.dtype in (torch.float32, torch.float64) else stored.float()
        asked = queries.to(rows.dtype)

        def fill(piece: slice, values: Tensor, rows: Tensor = rows, asked: Tensor = asked) -> None:
            if len(asked) == 1:
                torch.mv(rows[piece], asked[0], out=values[:, 0])
            else:
                torch.mm(rows[piece], asked.T, out=values)

        # The last is for scores, which are rounded to fp32, and for products in fp64 that are.
        error = (queries.shape[1] + 8) * torch.finfo(rows.dtype).eps / 2 + 2.0**-21
        here = norms[first : first + len(rows)]
        yield Tile(first, fill, rows.dtype, torch.ones(len(rows)), one, error * here, here, none)
