"""What a flat scan leaves of the products of keys and queries: pairs whose score may be among the best."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from dualform.queries.pairs import by_query, ranks

ROOM = 1 << 14  # pairs that are found at once
# Of pairs: the query with its group (query · groups + group), the key, and what the score cannot exceed.
Left = tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"], Float64[Tensor, " pairs"]]


@dataclass(frozen=True)
class Wanted:
    """The k best products with queries of norms up to 1, or the k of the largest magnitude, in every group of keys.

    `thresholds` are what k keys surely have, for every query those of its groups, and `tiny` is what is lost to
    underflow. `groups` are those of all keys, −1 for a key that does not count; None where there is one of all.
    """

    queries: Float64[Tensor, "queries dim_in"]
    norms: Float64[Tensor, " queries"]
    tiny: Float64[Tensor, " queries"]
    thresholds: Float64[Tensor, " queries_groups"]
    k: int
    absolute: bool
    groups: Int64[Tensor, " keys"] | None = None

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def several(self) -> int:
        """How many groups there are."""
        return len(self.thresholds) // max(len(self), 1)


@dataclass(frozen=True)
class Tile:
    """Keys from a number on, and how their products with all queries are had, nearly.

    `fill` puts numbers of some rows into a tensor; times the row's scale and the query's unit, these are the products.
    They are off by no more than `errors` for a query of norm 1, and more where a query is not quite the one that was
    asked: `lost` are not below the norms of the differences, `norms` not below those of the keys that count.
    """

    first: int
    fill: Callable[[slice, Tensor], None]
    dtype: torch.dtype
    scales: Float32[Tensor, " rows"]
    units: Float64[Tensor, " queries"]
    errors: Float32[Tensor, " rows"]
    norms: Float32[Tensor, " rows"]
    lost: Float64[Tensor, " queries"]

    def __len__(self) -> int:
        return len(self.scales)

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Scales, errors and norms."""
        return self.scales.numpy(), self.errors.numpy(), self.norms.numpy()


class Sieve:
    """The pairs that passed so far, each with what its score cannot exceed; for one thread."""

    def __init__(self, wanted: Wanted, most: int, fast: ModuleType | None) -> None:
        self._wanted, self._most, self._fast = wanted, most, fast
        self.heaps = wanted.thresholds[:, None].repeat(1, wanted.k)  # the largest lower bounds, the least of them first
        self._buffer, self._every = torch.empty(0), torch.zeros(0, dtype=torch.int64)
        room = max(ROOM, len(wanted))
        self._found = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
        self._parts: list[Left] = []
        self._count = 0

    def take(self, tile: Tile, piece: slice) -> bool:
        """Take in the products of some rows; False where too many pairs are left."""
        shape = piece.stop - piece.start, len(self._wanted)
        if self._buffer.dtype != tile.dtype or len(self._buffer) < shape[0]:
            self._buffer, self._every = torch.empty(shape, dtype=tile.dtype), torch.zeros(shape[0], dtype=torch.int64)
        values = self._buffer[: shape[0]]
        tile.fill(piece, values)
        number = tile.first + piece.start
        every = self._wanted.groups
        groups = self._every[: shape[0]] if every is None else every[number : number + shape[0]]
        rows, asking, bounds = (self._sifted if self._fast else self._by_torch)(tile, piece, values, groups)
        self._parts.append((asking, rows + number, bounds))
        self._count += len(rows)
        if self._count > self._most:
            self._parts = [self.left(self.heaps[:, 0])]
            self._count = len(self._parts[0][0])
            return 2 * self._count <= self._most  # or else most of the time would go into this
        return True

    def left(self, thresholds: Float64[Tensor, " queries_groups"]) -> Left:
        """What thresholds do not rule out: queries with their groups, ids, and bounds."""
        nothing = torch.empty(0, dtype=torch.int64)
        parts = self._parts or [(nothing, nothing, torch.empty(0, dtype=torch.float64))]
        asking, ids, bounds = (torch.cat(part) for part in zip(*parts, strict=True))
        kept = bounds >= thresholds[asking]
        return asking[kept], ids[kept], bounds[kept]

    def _sifted(self, tile: Tile, piece: slice, values: Tensor, groups: Tensor) -> Left:
        assert self._fast is not None
        wanted = self._wanted
        scales, errors, norms = (part[piece] for part in tile.arrays)
        queries = (part.numpy() for part in (wanted.norms, tile.lost, wanted.tiny))
        arrays = values.numpy(), scales, tile.units.numpy(), errors, norms, *queries, groups.numpy()
        row, parts = 0, []
        while row < len(values):
            row, count = self._fast.sift(*arrays, wanted.absolute, self.heaps.numpy(), row, *self._found)
            parts.append([torch.from_numpy(part[:count].copy()) for part in self._found])
        at_row, asking, bounds = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return at_row, asking, bounds

    def _by_torch(self, tile: Tile, piece: slice, values: Tensor, groups: Tensor) -> Left:
        """The same in several passes."""
        wanted, counts = self._wanted, groups >= 0
        errors = tile.errors[piece].double().where(counts, 0.0)
        sizes = tile.norms[piece].where(counts, 0.0) + errors  # of the keys as multiplied
        scores = (values.float() * tile.scales[piece, None]).double() * tile.units
        scores = scores.abs_() if wanted.absolute else scores
        scores[~counts] = -torch.inf
        most = errors.max() * wanted.norms + sizes.max() * tile.lost + wanted.tiny
        least = self.heaps[:, 0].view(len(wanted), -1)[:, groups.clamp_min(0)].T - most
        rows, at_query = ((scores >= least) & counts[:, None]).nonzero(as_tuple=True)
        scores, asking = scores[rows, at_query], at_query * wanted.several + groups[rows]
        off = errors[rows] * wanted.norms[at_query] + sizes[rows] * tile.lost[at_query] + wanted.tiny[at_query]
        order = by_query(asking, scores - off)
        rank = ranks(asking[order], len(self.heaps))
        surely = torch.full_like(self.heaps, -torch.inf)
        first = order[rank < wanted.k]
        surely[asking[first], rank[rank < wanted.k]] = (scores - off)[first]
        self.heaps = torch.cat([self.heaps, surely], dim=1).topk(wanted.k).values.flip(1)
        return rows, asking, scores + off


def all_left(sieves: list[Sieve]) -> Left:
    """What several sieves leave together, each of other keys."""
    heaps = torch.cat([sieve.heaps for sieve in sieves], dim=1)
    thresholds = heaps.topk(sieves[0].heaps.shape[1]).values[:, -1]
    parts = [sieve.left(thresholds) for sieve in sieves]
    asking, ids, bounds = (torch.cat(part) for part in zip(*parts, strict=True))
    return asking, ids, bounds
