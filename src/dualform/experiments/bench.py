"""How fast this machine answers from a memory, against scanning every key of it in RAM."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dualform.api import Memory
from dualform.errors import BadCall
from dualform.queries.attend import find_map, uses_of

TILE = 1 << 24  # scores at a time


@dataclass(frozen=True)
class Row:
    """The median milliseconds of one number of queries, ours and the scan's, and how the answers compare."""

    layer: str
    queries: int
    ours: float
    scan: float
    same: float
    way: str

    @property
    def ratio(self) -> float:
        """How much faster we are."""
        return self.scan / self.ours


def bench(memory: Memory, layers: tuple[str, ...], counts: tuple[int, ...], k: int, rounds: int) -> list[Row]:
    """Top k of every layer by both ways in turn; the queries are stored keys with a little noise."""
    if not counts or min(counts) < 1 or rounds < 1:
        raise BadCall("bench takes at least one round and numbers of queries of at least 1.")
    memory.require_events()
    names = [find_map(memory, layer) for layer in layers] or list(uses_of(memory))
    return [row for name in names for row in _layer(memory, name, counts, k, rounds)]


def _layer(memory: Memory, name: str, counts: tuple[int, ...], k: int, rounds: int) -> list[Row]:
    weight = uses_of(memory)[name][0]
    keys = torch.cat([block.keys.float() for block in memory.blocks(weight, memory.steps)])
    if len(keys) < k:
        raise BadCall(f"{name} has {len(keys):,} events, fewer than the top {k}.")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for count in counts:
        some = keys[torch.randint(len(keys), (count,), generator=generator)]
        queries = some + 0.1 * some.std() * torch.randn(some.shape, generator=generator)
        attention = memory.attend(None, {name: queries})[name]
        answer = attention.top(k)  # once untimed: the first question may build the index
        times: dict[str, list[float]] = {"ours": [], "scan": []}
        ways: dict[str, Callable[[], object]] = {
            "ours": partial(attention.top, k),
            "scan": partial(scan, keys, queries, k),
        }
        for turn in range(rounds):
            for way in sorted(ways, reverse=bool(turn % 2)):
                start = time.perf_counter()
                ways[way]()
                times[way].append(1e3 * (time.perf_counter() - start))
        same = torch.isclose(answer.scores, scan(keys, queries, k)[0], rtol=1e-5).double().mean()
        ours, theirs = (statistics.median(times[way]) for way in ("ours", "scan"))
        rows.append(Row(name, count, ours, theirs, float(same), answer.explanation.way))
    return rows


def scan(
    keys: Float32[Tensor, "events dim_in"], queries: Float32[Tensor, "queries dim_in"], k: int
) -> tuple[Float32[Tensor, "queries k"], Int64[Tensor, "queries k"]]:
    """The k best of every query by products in fp32, tile by tile."""
    best = torch.full((len(queries), k), -torch.inf)
    events = torch.full((len(queries), k), -1)
    step = max(TILE // len(queries), 4 * k)
    for at in range(0, len(keys), step):
        found = (queries @ keys[at : at + step].T).topk(min(k, len(keys) - at), dim=1)
        both = torch.cat([best, found.values], dim=1).topk(k, dim=1)
        best = both.values
        events = torch.cat([events, found.indices + at], dim=1).gather(1, both.indices)
    return best, events
