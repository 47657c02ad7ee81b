"""Sums of repeated keys: how often each occurs in a group is counted first, so that every stored key is read once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dualform.memory.segment import read_numbers
from dualform.queries.focus import Focus
from dualform.queries.linear import Rows, Summed
from dualform.queries.pairs import pair_products
from dualform.queries.score import products
from dualform.queries.selection import Grouping

EVENT_BYTES = 64  # of the numbers of an event while they are counted
ROW = 64  # adding one row costs about as much as a matrix product for so many groups
MOST = 2048  # groups in such a product
FEW = 4  # queries


def are_repeated(focus: Focus) -> bool:
    """Whether a weight's keys are stored so much less often than they were used that counting pays."""
    events, keys = focus.memory.manifest.events(focus.weight), stored(focus)
    return 2 * keys <= events and EVENT_BYTES * events <= focus.memory.resident // 4


def stored(focus: Focus) -> int:
    """How many keys of the weight are stored."""
    return sum(record.keys[focus.weight] for record in focus.memory.manifest.segments)


@dataclass(frozen=True)
class _Occurrences:
    """Pairs of a key and a group that has events with it, in ascending order of the keys, and how many events."""

    keys: Int64[Tensor, " pairs"]
    groups: Int64[Tensor, " pairs"]
    events: Int64[Tensor, " pairs"]


def counted_sums(focus: Focus, grouping: Grouping) -> Summed:
    """Σ x_t over the selected events of every group, key by key in the order in which they are stored."""
    pairs = _occurrences(focus, grouping)
    count = len(grouping.groups)
    rows = Rows(count, focus.record.dim_in, len(pairs.keys))
    nonnegative, start = True, 0
    for first, keys in focus.memory.stored_tiles(focus.weight):
        stop = int(torch.searchsorted(pairs.keys, first + len(keys)))
        at, groups = pairs.keys[start:stop] - first, pairs.groups[start:stop]
        times = pairs.events[start:stop].double()
        start = stop
        used = at.unique_consecutive()
        if len(used) == 0:
            continue
        wide = keys.double()
        nonnegative = nonnegative and bool(keys[used].amin() >= 0)
        if count < min(ROW * len(at) // len(used), MOST) and bool(keys.isfinite().all()):
            often = torch.zeros(count, len(keys), dtype=torch.float64)
            often[groups, at] = times
            there = groups.unique()
            rows.add(there, often[there] @ wide)
        else:
            rows.add(groups, wide[at] * times[:, None])
    counts = torch.zeros(count, dtype=torch.int64).index_add_(0, pairs.groups, pairs.events)
    finite = bool(rows.sums.isfinite().all())
    return Summed(rows.groups, rows.sums, counts, finite, nonnegative and finite)


def counted_magnitudes(
    focus: Focus, grouping: Grouping
) -> tuple[Float64[Tensor, "queries groups"], Int64[Tensor, " groups"]]:
    """Σ |x_t · q| over the selected events of every group, each stored key's score once; and their numbers."""
    pairs = _occurrences(focus, grouping)
    count = len(grouping.groups)
    queries = focus.queries.double()
    sums = torch.zeros(len(queries), count, dtype=torch.float64)
    rows = max(focus.memory.resident // 8 // (16 * max(len(queries), 1)), 1)
    for first, keys in focus.memory.stored_tiles(focus.weight, rows):
        start, stop = (int(torch.searchsorted(pairs.keys, at)) for at in (first, first + len(keys)))
        if start == stop:
            continue
        at, groups = pairs.keys[start:stop] - first, pairs.groups[start:stop]
        times = pairs.events[start:stop].double()
        magnitudes = _products(keys, queries).abs_()
        if count < MOST and bool(magnitudes.sum().isfinite()):
            often = torch.zeros(len(keys), count, dtype=torch.float64)
            often[at, groups] = times
            sums.addmm_(magnitudes, often)
        else:
            sums.index_add_(1, groups, magnitudes[:, at] * times)
    counts = torch.zeros(count, dtype=torch.int64).index_add_(0, pairs.groups, pairs.events)
    return sums, counts


def _products(
    keys: Float[Tensor, "keys dim_in"], queries: Float64[Tensor, "queries dim_in"]
) -> Float64[Tensor, "queries keys"]:
    """x · q in fp64; for few queries pair by pair, which spares the keys in fp64."""
    if len(queries) > FEW:
        return products(keys, queries)
    at_query, at_row = torch.meshgrid(torch.arange(len(queries)), torch.arange(len(keys)), indexing="ij")
    found: Tensor = pair_products(keys, queries, at_row.reshape(-1), at_query.reshape(-1))
    return found.reshape(len(queries), len(keys))


def _occurrences(focus: Focus, grouping: Grouping) -> _Occurrences:
    """The occurrences of all keys; without a selection they are kept for the next question."""
    if focus.selection:
        return _counted(focus, grouping)
    key = ("occurrences", focus.weight, focus.until, grouping.key)
    return focus.memory.room.get(key, lambda: _counted(focus, grouping), lambda made: 3 * made.keys.nbytes)


def _counted(focus: Focus, grouping: Grouping) -> _Occurrences:
    found = [torch.empty(0, dtype=torch.int64)]
    for file, record in focus.memory.segments:
        if record.first_step <= focus.until and record.events[focus.weight]:
            block, numbers = read_numbers(file, record, focus.weight)
            codes = grouping.codes(block)
            chosen = (codes >= 0) & (block.steps <= focus.until) & focus.selection.holds(block)
            found.append(numbers[chosen] * len(grouping.groups) + codes[chosen])
    pairs, events = torch.cat(found).unique(return_counts=True)
    count = max(len(grouping.groups), 1)
    return _Occurrences(pairs // count, pairs % count, events)
