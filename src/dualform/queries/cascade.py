"""The pairs of rows and queries whose bounds reach a threshold: coarse bounds of all, finer ones of what they leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from dualform.fast import CUTS, LANES, compiled, in_parts
from dualform.queries.pairs import pair_products
from dualform.queries.shadow import SLACK, Asked
from dualform.queries.views import View

TILE = 1 << 19  # bounds that are computed at a time where nothing is compiled
SPARE = 1 << 12  # fine bounds that are not worth a thought
PART = 1 << 18  # bounds for which a thread of its own pays


@dataclass(frozen=True)
class Survivors:
    """Pairs that no bound rules out, each with its last bound; `paid` is False where that was given up."""

    at_row: Int64[Tensor, " pairs"]
    at_query: Int64[Tensor, " pairs"]
    bounds: Float[Tensor, " pairs"]
    bounded: int
    paid: bool


def survivors(
    view: View, asked: Asked, thresholds: Float32[Tensor, " queries"], k: int, most: int, begin: int, end: int
) -> Survivors:
    """The pairs of some rows (whole blocks) that no bound rules out; given up where they do not pay, above `most`."""
    reach = torch.searchsorted(view.ascending, -thresholds, right=True).clamp_max(end)
    order = None
    if len(reach) > 1:
        # Queries that reach far come first, so that those that are done are left out together.
        order = reach.argsort(descending=True)
        reach, thresholds, asked = reach[order], thresholds[order], asked[order]
    work = int((reach - begin).clamp_min(0).sum())
    spare = SPARE + (len(view) // 64 + 16 * k) * len(reach)
    fast = compiled(work * CUTS[0])
    if work == 0:
        nothing = torch.empty(0, dtype=torch.int64)
        return Survivors(nothing, nothing, torch.empty(0), 0, True)
    if fast is None:
        found = _uncompiled(view, asked, thresholds, reach, begin, spare)
    else:
        arguments = (
            *view.levels(int(reach[0])), view.shadow.fine, _or(view.rows, torch.int64), view.sizes,
            _or(view.weights), _or(view.offsets), *asked.levels, asked.fine, _or(asked.offsets), thresholds, reach,
        )  # fmt: skip
        parts = in_parts(fast.cascade, work // PART, *(part.numpy() for part in arguments), begin, SLACK, spare, most)
        paid, bounded, *pairs = zip(*parts, strict=True)
        rows, queries, bounds = (
            torch.from_numpy(part[0] if len(part) == 1 else np.concatenate(part)) for part in pairs
        )
        found = Survivors(rows, queries, bounds, sum(bounded), all(paid))
    at_query = found.at_query if order is None else order[found.at_query]
    return Survivors(found.at_row, at_query, found.bounds, found.bounded, found.paid)


def _or(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype) if tensor is None else tensor


def _uncompiled(view: View, asked: Asked, thresholds: Tensor, reach: Tensor, start: int, spare: int) -> Survivors:
    """The same by torch: one coarse bound instead of three."""
    levels = view.levels(int(reach[0]))
    # The tail that counts is the last one.
    coarse = [torch.nn.functional.pad(level[:, :-1], (0, 1)) for level in asked.levels[:-1]]
    coarse.append(asked.levels[-1])
    rows: list[Tensor] = []
    queries: list[Tensor] = []
    end, left, bounded = int(reach[0]), 0, 0
    while start < end:
        active = int((reach > start).sum())
        at = slice(start // LANES, min(start // LANES + max(TILE // active // LANES, 8), -(-end // LANES)))
        bounds = sum(part[:active] @ level[at] for part, level in zip(coarse, levels, strict=True))
        enough = thresholds[:active] - SLACK * view.sizes[start]
        at_block, at_query, lane = (bounds >= enough[:, None]).nonzero(as_tuple=True)
        at_row = at_block * LANES + lane + start
        inside = at_row < len(view)
        rows.append(at_row[inside])
        queries.append(at_query[inside])
        left, bounded = left + len(at_row), bounded + (at.stop - at.start) * LANES * active
        if left > spare + bounded // 8:
            return Survivors(rows[0][:0], rows[0][:0], torch.empty(0), bounded, False)
        start = at.stop * LANES
    at_row, at_query = torch.cat(rows), torch.cat(queries)
    last = _fine(view, asked, at_row, at_query)
    kept = last >= thresholds[at_query]
    return Survivors(at_row[kept], at_query[kept], last[kept], bounded, True)


def _fine(view: View, asked: Asked, at_row: Tensor, at_query: Tensor) -> Tensor:
    # In fp64 of fp32 numbers: the error is far inside the slack.
    if view.weights is None:
        at = at_row if view.rows is None else view.rows[at_row]
        return pair_products(view.shadow.fine, asked.fine, at, at_query)
    rows, place = at_row.unique(return_inverse=True)
    bounds = pair_products(view.fine(rows), asked.fine, place, at_query)
    if view.offsets is not None and asked.offsets is not None:
        bounds += view.offsets[at_row] * asked.offsets[at_query]
    return bounds
