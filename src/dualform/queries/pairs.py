"""Pairs of a row and a query: their products, and their order.

With numba (the extra `fast`) each is one pass over the data; without it, torch does the same in several.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import compiled, in_parts

MANY = 1 << 16  # numbers for which a compiled loop pays
PART = 1 << 18  # numbers for which a thread of its own pays
CHUNK = 1 << 22  # numbers that the uncompiled way holds at a time


def pair_products(
    rows: Float[Tensor, "rows width"],
    queries: Float[Tensor, "queries width"],
    at_row: Int64[Tensor, " pairs"],
    at_query: Int64[Tensor, " pairs"],
) -> Float64[Tensor, " pairs"]:
    """The product of some rows with some queries, in fp64."""
    fast, parts = _loops(rows, queries, at_row)
    if fast is not None:
        result = np.empty(len(at_row))
        pairs = rows.numpy(), queries.numpy(), at_row.numpy(), at_query.numpy()
        in_parts(fast.products, parts, *pairs, result)
        return torch.from_numpy(result)
    return _by_torch(rows, queries, at_row, at_query)


def _by_torch(rows: Tensor, queries: Tensor, at_row: Tensor, at_query: Tensor) -> Float64[Tensor, " pairs"]:
    if len(queries) == 1:
        return rows[at_row].double() @ queries[0].double()
    step = max(CHUNK // max(rows.shape[1], 1), 1)
    some = [
        torch.linalg.vecdot(rows[at_row[at : at + step]].double(), queries[at_query[at : at + step]].double())
        for at in range(0, len(at_row), step)
    ]
    return torch.cat([torch.empty(0, dtype=torch.float64), *some])


def rounded_products(
    rows: Float[Tensor, "rows width"],
    queries: Float[Tensor, "queries width"],
    at_row: Int64[Tensor, " pairs"],
    at_query: Int64[Tensor, " pairs"],
    row_norms: Float64[Tensor, " rows"],
    query_norms: Float64[Tensor, " queries"],
    error: float,
    tiny: float,
) -> tuple[Float32[Tensor, " pairs"], Bool[Tensor, " pairs"] | None]:
    """The same in fp32, and which of them an error of error·‖x‖‖q‖ + tiny could round otherwise, if any."""
    fast, parts = _loops(rows, queries, at_row)
    if fast is not None:
        result, unsure = np.empty(len(at_row), np.float32), np.empty(len(at_row), np.bool_)
        pairs = rows.numpy(), queries.numpy(), at_row.numpy(), at_query.numpy(), row_norms.numpy(), query_norms.numpy()
        count = sum(in_parts(fast.rounded, parts, *pairs, error, tiny, result, unsure))
        return torch.from_numpy(result), torch.from_numpy(unsure) if count else None
    near = _by_torch(rows, queries, at_row, at_query) + 0.0  # a sum of zeros is +0, however it was formed
    wide = error * query_norms[at_query] * row_norms[at_row] + tiny
    other = ((near - wide).float() != (near + wide).float()) | ~near.isfinite()
    return near.float(), other if bool(other.any()) else None


def _loops(rows: Tensor, queries: Tensor, at_row: Tensor) -> tuple[ModuleType | None, int]:
    """The compiled loops for some pairs, None where they do not suit, and in how many parts they pay."""
    work = len(at_row) * rows.shape[1]
    # Other kinds of numbers are compiled for at their first use, which pays for much work only.
    usual = rows.dtype == queries.dtype == torch.float32
    suited = (usual or work >= MANY) and _plain(rows) and _plain(queries)
    return compiled(work) if suited else None, work // PART


def by_query(at_query: Int64[Tensor, " pairs"], values: Float[Tensor, " pairs"]) -> Int64[Tensor, " pairs"]:
    """The order of pairs by query, and then by descending value as far as fp32 tells them apart."""
    return torch.from_numpy(_keys(at_query, values).argsort())


def in_order(
    at_query: Int64[Tensor, " pairs"], scores: Float32[Tensor, " pairs"], events: Int64[Tensor, " pairs"]
) -> Int64[Tensor, " pairs"]:
    """The order of pairs by query, then descending score, then event."""
    keys = _keys(at_query, scores)
    order = keys.argsort()
    ascending = keys[order]
    if bool((ascending[1:] == ascending[:-1]).any()):
        order = events.numpy().argsort()
        order = order[keys[order].argsort(kind="stable")]
    return torch.from_numpy(order)


def _keys(at_query: Tensor, values: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Whole numbers in the order of queries, and then of descending values."""
    bits = (values.float() + 0.0).numpy().view(np.int32)  # one zero, not two
    # As whole numbers the bits of floats are in order; of negative ones, in reverse.
    return (at_query.numpy() << 32) - np.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).astype(np.int64)


def ranks(at_query: Int64[Tensor, " pairs"], queries: int) -> Int64[Tensor, " pairs"]:
    """The place of every pair among those of its query; pairs are sorted by query."""
    asked = at_query.numpy()
    counts = np.bincount(asked, minlength=queries)
    return torch.from_numpy(np.arange(len(asked)) - (counts.cumsum() - counts)[asked])


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
