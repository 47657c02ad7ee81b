"""The pairs of rows and queries whose bounds reach a threshold: coarse bounds of all, finer ones of what they leave."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor

from dualform.fast import CUTS, LANES, compiled, in_parts, threads
from dualform.queries.pairs import pair_products
from dualform.queries.shadow import SLACK, Asked
from dualform.queries.views import View

TILE = 1 << 19  # bounds that are computed at a time where nothing is compiled
SPARE = 1 << 12  # fine bounds that are not worth a thought
PART = 1 << 18  # bounds for which a thread of its own pays
FEW = 8  # queries for which none does
NO_OFFSETS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Survivors:
    """Pairs that no bound rules out, each with its last bound; `paid` is False where that was given up.

    `bounded` rows were bounded and `scored` products formed for all of them.
    """

    at_row: Int64[Tensor, " pairs"]
    at_query: Int64[Tensor, " pairs"]
    bounds: Float[Tensor, " pairs"]
    bounded: int
    scored: int
    paid: bool


@dataclass(frozen=True, eq=False)
class Near:
    """Keys that are at hand, the queries they are multiplied with, and the units of a view.

    A score is a product times `sign`, over `key_scale` and the query's norm; the view's own is over `scale`.
    """

    keys: Float32[np.ndarray, "some dim_in"]
    slots: Int32[np.ndarray, " keys"]
    queries: Float32[np.ndarray, "queries dim_in"]
    norms: Float64[np.ndarray, " queries"]
    sign: float = 1.0
    scale: float = 1.0
    key_scale: float = 1.0

    @classmethod
    def none(cls) -> Near:
        """Nothing at hand."""
        nothing = np.empty((0, 0), np.float32)
        return cls(nothing, np.empty(0, np.int32), nothing, np.empty(0))

    def __len__(self) -> int:
        return len(self.keys)


def has_loop() -> bool:
    """Whether the cascade is compiled."""
    return compiled(0) is not None


def survivors(
    view: View,
    asked: Asked,
    thresholds: Float32[np.ndarray, " queries"],
    k: int,
    most: int,
    near: Near,
    seeds: int = 0,
    begin: int = 0,
    end: int | None = None,
) -> Survivors:
    """The pairs of some rows (whole blocks) that no bound rules out; given up where they do not pay, above `most`.

    With `seeds`, the first rows, which are at hand, give thresholds first.
    """
    end = len(view) if end is None else end
    spare = SPARE + (len(view) // 128 + 128 * k) * len(thresholds)
    if seeds:
        work = len(thresholds) * (len(view) // 8)  # as much as bounds leave of some real memories
        return _compiled(view, asked, thresholds, k, most, near, seeds, begin, end, len(view), work, spare)
    reach = np.minimum(np.searchsorted(view.ascending.numpy(), -thresholds, side="right"), end)
    work = int(np.maximum(reach - begin, 0).sum())
    if work == 0:
        nothing = torch.empty(0, dtype=torch.int64)
        return Survivors(nothing, nothing, torch.empty(0), 0, 0, True)
    if compiled(work * CUTS[0]) is not None:
        far = int(reach.max())
        return _compiled(view, asked, thresholds, k, most, near, 0, begin, end, far, work, spare)
    order = np.argsort(-reach)
    reordered = torch.from_numpy(thresholds[order]), torch.from_numpy(reach[order])
    found = _uncompiled(view, asked[order], *reordered, begin, spare)
    return replace(found, at_query=torch.from_numpy(order)[found.at_query])


def _compiled(
    view: View, asked: Asked, thresholds: np.ndarray, k: int, most: int, near: Near, seeds: int, begin: int, end: int,
    far: int, work: int, spare: int,
) -> Survivors:  # fmt: skip
    """By the compiled loop, of which every thread takes some of the queries."""
    fast = compiled(0)
    assert fast is not None
    added = NO_OFFSETS if asked.offsets is None else asked.offsets
    parts = in_parts(
        fast.cascade, min(work // PART, len(thresholds) // FEW, threads()), view.level_arrays(far),
        view.arrays, asked.levels, asked.fine, added, (near.keys, near.slots, near.queries, near.norms),
        (near.sign, near.scale, near.key_scale), thresholds, k, seeds, begin, end, SLACK, spare, most,
    )  # fmt: skip
    paid, bounded, scored, *pairs = zip(*parts, strict=True)
    rows, queries, bounds = (torch.from_numpy(part[0] if len(part) == 1 else np.concatenate(part)) for part in pairs)
    return Survivors(rows, queries, bounds, sum(bounded), sum(scored), all(paid))


def _uncompiled(view: View, asked: Asked, thresholds: Tensor, reach: Tensor, start: int, spare: int) -> Survivors:
    """The same by torch: one coarse bound instead of three."""
    levels, with_ = view.levels(int(reach[0])), [torch.from_numpy(level) for level in asked.levels]
    # The tail that counts is the last one.
    coarse = [torch.nn.functional.pad(level[:, :-1], (0, 1)) for level in with_[:-1]]
    coarse.append(with_[-1])
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
            return Survivors(rows[0][:0], rows[0][:0], torch.empty(0), bounded, 0, False)
        start = at.stop * LANES
    at_row, at_query = torch.cat(rows), torch.cat(queries)
    last = _fine(view, asked, at_row, at_query)
    kept = last >= thresholds[at_query]
    return Survivors(at_row[kept], at_query[kept], last[kept], bounded, 0, True)


def _fine(view: View, asked: Asked, at_row: Tensor, at_query: Tensor) -> Tensor:
    # In fp64 of fp32 numbers: the error is far inside the slack.
    finely = torch.from_numpy(asked.fine)
    if view.weights is None:
        at = at_row if view.rows is None else view.rows[at_row]
        return pair_products(view.shadow.fine, finely, at, at_query)
    rows, place = at_row.unique(return_inverse=True)
    bounds = pair_products(view.fine(rows), finely, place, at_query)
    if view.offsets is not None and asked.offsets is not None:
        bounds += view.offsets[at_row] * torch.from_numpy(asked.offsets)[at_query]
    return bounds
