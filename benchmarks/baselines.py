"""What dualform's queries are measured against: scans that read every key of a tensor in RAM for every question.

Each engine has build(…), which is not timed, and search(…). `TorchScan`, `WithinScan` and `TotalsScan` score in fp32 as
fast as plain torch can, `Fp64Scan` is the plain scan for contributions, `FaissFlat` is faiss-cpu's exact search.
`ExactScan` is slow and the reference: all exact scores, in the order that a memory promises.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.queries.score import scores

TILES = (2048, 8192, 32768, 131072)
LARGEST_BUFFER = 1 << 25
EXACT_TILE = 4096


@dataclass(frozen=True)
class Found:
    """The best events of every query."""

    scores: Float[Tensor, "queries *groups k"]
    events: Int64[Tensor, "queries *groups k"]


@dataclass(frozen=True)
class Plan:
    """How to scan: rows at a time, and whether a tile whose maximum is no better is passed over."""

    tile: int
    skip: bool


class Best:
    """The running best of every query over the tiles of a scan."""

    def __init__(self, queries: int, k: int, dtype: torch.dtype = torch.float32) -> None:
        self.scores = torch.full((queries, k), -torch.inf, dtype=dtype)
        self.events = torch.full((queries, k), -1)

    def take(self, tile: Float[Tensor, "queries rows"], start: int, some: Tensor | None = None) -> None:
        """Merge the scores of the events from `start`, of all queries or of `some`."""
        mine, events = (self.scores, self.events) if some is None else (self.scores[some], self.events[some])
        top = tile.topk(min(mine.shape[1], tile.shape[1]))
        best = torch.cat([mine, top.values], dim=1).topk(mine.shape[1])
        events = torch.cat([events, top.indices + start], dim=1).gather(1, best.indices)
        if some is None:
            self.scores, self.events = best.values, events
        else:
            self.scores[some], self.events[some] = best.values, events


def products(queries: Tensor, rows: Tensor, buffer: Float32[Tensor, " most"]) -> Float32[Tensor, "queries rows"]:
    """Scores in fp32, in a buffer that is there already."""
    result = buffer[: len(queries) * len(rows)].view(len(queries), len(rows))
    if len(queries) == 1:
        torch.mv(rows, queries[0], out=result[0])
    else:
        torch.mm(queries, rows.T, out=result)
    return result


@dataclass(frozen=True)
class TorchScan:
    """A tiled fp32 scan with a running top-k; how it tiles is tuned for every number of queries."""

    keys: Float32[Tensor, "events dim_in"]
    plans: dict[int, Plan]
    buffer: Float32[Tensor, " most"]

    @classmethod
    def build(cls, keys: Float32[Tensor, "events dim_in"]) -> TorchScan:
        return cls(keys.contiguous(), {}, torch.empty(LARGEST_BUFFER))

    def tune(self, queries: Float32[Tensor, "queries dim_in"], k: int) -> Plan:
        """Try the plans on a part of the keys and keep the fastest for this number of queries."""
        part = self.keys[: max(TILES)]
        fits = [tile for tile in TILES if tile * len(queries) <= LARGEST_BUFFER] or [LARGEST_BUFFER // len(queries)]
        seconds: dict[Plan, float] = {}
        for plan in [Plan(tile, skip) for tile in fits for skip in (False, True)] * 3:
            start = time.perf_counter()
            self._scan(part, queries, k, plan)
            seconds[plan] = min(seconds.get(plan, torch.inf), time.perf_counter() - start)
        self.plans[len(queries)] = min(seconds, key=seconds.__getitem__)
        return self.plans[len(queries)]

    def search(self, queries: Float32[Tensor, "queries dim_in"], k: int) -> Found:
        plan = self.plans.get(len(queries)) or self.tune(queries, k)
        return self._scan(self.keys, queries, k, plan)

    def first(self, events: int) -> TorchScan:
        """The same scan over the first events only."""
        return TorchScan(self.keys[:events], self.plans, self.buffer)

    def _scan(self, keys: Tensor, queries: Tensor, k: int, plan: Plan) -> Found:
        best = Best(len(queries), k)
        for start in range(0, len(keys), plan.tile):
            tile = products(queries, keys[start : start + plan.tile], self.buffer)
            if not plan.skip:
                best.take(tile, start)
                continue
            some = (tile.amax(dim=1) > best.scores[:, -1]).nonzero()[:, 0]
            if len(some) == len(queries):
                best.take(tile, start)
            elif len(some):
                best.take(tile[some], start, some)
        return Found(best.scores, best.events)


@dataclass(frozen=True)
class WithinScan:
    """The top k of every group by an fp32 scan over rows that were sorted by group beforehand."""

    keys: Float32[Tensor, "events dim_in"]
    events: Int64[Tensor, " events"]
    sizes: list[int]

    @classmethod
    def build(cls, keys: Float32[Tensor, "events dim_in"], codes: Int64[Tensor, " events"], groups: int) -> WithinScan:
        order = codes.argsort(stable=True)
        return cls(keys[order], order, codes.bincount(minlength=groups).tolist())

    def search(self, queries: Float32[Tensor, "queries dim_in"], k: int) -> Found:
        buffer = torch.empty(len(queries) * max(self.sizes))
        best = []
        for rows, events in zip(self.keys.split(self.sizes), self.events.split(self.sizes), strict=True):
            top = Best(len(queries), k)
            top.take(products(queries, rows, buffer), 0)
            best.append(Found(top.scores, torch.where(top.events < 0, -1, events[top.events])))
        return Found(torch.stack([b.scores for b in best], 1), torch.stack([b.events for b in best], 1))


@dataclass(frozen=True)
class TotalsScan:
    """Σ of fp32 scores over every group: a product with the keys, and one with the groups' indicators, tile by tile."""

    keys: Float32[Tensor, "events dim_in"]
    indicators: Float32[Tensor, "events groups"]
    tile: int = 8192

    @classmethod
    def build(cls, keys: Float32[Tensor, "events dim_in"], codes: Int64[Tensor, " events"], groups: int) -> TotalsScan:
        return cls(keys, torch.nn.functional.one_hot(codes, groups).float())

    def search(
        self, queries: Float32[Tensor, "queries dim_in"], absolute: bool = False
    ) -> Float64[Tensor, "queries groups"]:
        sums = torch.zeros(len(queries), self.indicators.shape[1], dtype=torch.float64)
        buffer = torch.empty(min(len(queries), 1024) * self.tile)
        for start in range(0, len(self.keys), self.tile):
            rows, indicators = (whole[start : start + self.tile] for whole in (self.keys, self.indicators))
            for at in range(0, len(queries), 1024):
                alphas = products(queries[at : at + 1024], rows, buffer)
                sums[at : at + 1024] += (alphas.abs_() if absolute else alphas) @ indicators
        return sums


@dataclass(frozen=True)
class Fp64Scan:
    """The plain fp64 scan for contributions to units: α_t (c g_t)_u + (c^b g_t)_u, one unit u a query."""

    keys: Float32[Tensor, "events dim_in"]
    values: Float64[Tensor, "units events"]
    biases: Float64[Tensor, "units events"]
    tile: int = 8192

    @classmethod
    def build(cls, keys: Tensor, values: Tensor, biases: Tensor) -> Fp64Scan:
        return cls(keys, values, biases)

    def search(self, queries: Float32[Tensor, "queries dim_in"], k: int, units: Int64[Tensor, " queries"]) -> Found:
        best = Best(len(queries), k, torch.float64)
        wide = queries.double()
        for start in range(0, len(self.keys), self.tile):
            part = slice(start, start + self.tile)
            alphas = wide @ self.keys[part].double().T
            best.take(alphas.mul_(self.values[units, part]).add_(self.biases[units, part]), start)
        return Found(best.scores, best.events)


@dataclass(frozen=True)
class FaissFlat:
    """faiss-cpu's exact search by inner product, as it comes."""

    index: Any

    @classmethod
    def build(cls, keys: Float32[Tensor, "events dim_in"]) -> FaissFlat:
        import faiss

        index = faiss.IndexFlatIP(keys.shape[1])
        for part in keys.split(1 << 16):
            index.add(part.numpy())
        return cls(index)

    def search(self, queries: Float32[Tensor, "queries dim_in"], k: int) -> Found:
        found, events = self.index.search(queries.numpy(), k)
        return Found(torch.from_numpy(found), torch.from_numpy(events))


@dataclass(frozen=True)
class ExactScan:
    """The reference: every dot product, correctly rounded to fp32; score descending, event ascending."""

    keys: Float32[Tensor, "events dim_in"]

    @classmethod
    def build(cls, keys: Float32[Tensor, "events dim_in"]) -> ExactScan:
        return cls(keys)

    def search(self, queries: Float32[Tensor, "queries dim_in"], k: int) -> Found:
        best = torch.empty(len(queries), 0, dtype=torch.int64)
        for start in range(0, len(self.keys), EXACT_TILE):
            exact = scores(self.keys[start : start + EXACT_TILE], queries)
            ranks = _ranks(exact, torch.arange(start, start + exact.shape[1]))
            best = torch.cat([best, ranks], dim=1)
            best = best.topk(min(k, best.shape[1])).values
        return Found(*_of_ranks(best))


def _ranks(exact: Float32[Tensor, "queries rows"], events: Int64[Tensor, " rows"]) -> Int64[Tensor, "queries rows"]:
    """One whole number a score whose descending order is by score, then by event: no two are equal."""
    bits = exact.view(torch.int32).to(torch.int64)
    # The bits of negative numbers ascend with their magnitude.
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ordered << 32) + (0xFFFFFFFF - events)


def _of_ranks(ranks: Int64[Tensor, "queries k"]) -> tuple[Float32[Tensor, "queries k"], Int64[Tensor, "queries k"]]:
    ordered = ranks >> 32
    bits = torch.where(ordered < 0, -ordered - (1 << 31), ordered)
    return bits.to(torch.int32).view(torch.float32), 0xFFFFFFFF - (ranks & 0xFFFFFFFF)
