"""Pairs of a row and a query: which of them lie above a threshold, and their products.

With numba (the extra `fast`) each is one pass over the data; without it, torch does the same in several.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

MANY = 1 << 18  # numbers for which a compiled loop pays
CHUNK = 1 << 22  # numbers that the uncompiled way holds at a time


@functools.cache
def _compiled() -> ModuleType | None:
    """The compiled loops; None without numba."""
    try:
        from dualform.queries import compiled
    except ImportError:
        return None
    return compiled


def above(
    bounds: Float[Tensor, "rows queries"], thresholds: Float[Tensor, " queries"]
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
    """The rows and queries whose bound is not below the query's threshold."""
    fast = _compiled() if bounds.shape[1] > 1 and bounds.numel() >= MANY else None
    if fast is None:
        rows, queries = (bounds >= thresholds).nonzero(as_tuple=True)
        return rows, queries
    found = fast.above(bounds.numpy(), thresholds.numpy())
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def pair_products(
    rows: Float[Tensor, "rows width"],
    queries: Float[Tensor, "queries width"],
    at_row: Int64[Tensor, " pairs"],
    at_query: Int64[Tensor, " pairs"],
) -> Float64[Tensor, " pairs"]:
    """The product of some rows with some queries, in fp64."""
    fast = _compiled() if len(at_row) * rows.shape[1] >= MANY else None
    if fast is not None and _plain(rows) and _plain(queries):
        result: np.ndarray[Any, Any] = fast.products(rows.numpy(), queries.numpy(), at_row.numpy(), at_query.numpy())
        return torch.from_numpy(result)
    if len(queries) == 1:
        return rows[at_row].double() @ queries[0].double()
    step = max(CHUNK // max(rows.shape[1], 1), 1)
    parts = [
        torch.linalg.vecdot(rows[at_row[at : at + step]].double(), queries[at_query[at : at + step]].double())
        for at in range(0, len(at_row), step)
    ]
    return torch.cat([torch.empty(0, dtype=torch.float64), *parts])


def by_query(at_query: Int64[Tensor, " pairs"], values: Float[Tensor, " pairs"]) -> Int64[Tensor, " pairs"]:
    """The order of pairs by query, and then by descending value as far as fp32 tells them apart."""
    if not bool(at_query.any()):
        return values.argsort(descending=True)
    bits = values.float().view(torch.int32)
    # As whole numbers the bits of floats are in order; of negative ones, in reverse.
    rank = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    return torch.from_numpy(((at_query << 32) - rank).numpy().argsort())


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
