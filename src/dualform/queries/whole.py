"""Products of bytes in whole numbers, several times as fast as in fp32 where a processor has instructions for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int8, Int32
from torch import Tensor

LEAST = 2  # queries and columns, below which torch's product was seen to be wrong
SLICE = 256  # rows that are compared at a time
MOST = 1 << 16  # columns, whose products stay in the range of 32 bits


@dataclass(frozen=True)
class Bytes:
    """Queries in bytes: each is its scale times whole numbers up to 127, but for `lost` (not below the norm of it)."""

    bytes: Int8[Tensor, "queries dim_in"]
    scales: Float32[Tensor, " queries"]
    lost: Float64[Tensor, " queries"]

    @classmethod
    def of(cls, queries: Float[Tensor, "queries dim_in"]) -> Bytes:
        """The nearest to queries that are finite and in the range of fp32."""
        wide = queries.double()
        scales = (wide.abs().amax(dim=1) / 127).float()
        nearest = (wide / scales.double().clamp_min(1e-300)[:, None]).round_().clamp_(-127, 127)
        lost = torch.linalg.vector_norm(wide - nearest * scales.double()[:, None], dim=1)
        return cls(nearest.to(torch.int8), scales, lost * (1 + 1e-9))


@functools.cache
def are_fast() -> bool:
    """Whether the processor has instructions for them, and torch uses these."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and supported() and hasattr(torch, "_int_mm")


@functools.lru_cache(maxsize=256)
def suits(rows: int, dim_in: int, queries: int) -> bool:
    """Whether torch's product of so many rows and queries in bytes is fast, and right.

    On some processors and for some shapes it was wrong without a word, so each shape is tried once on the largest
    numbers there are.
    """
    if not are_fast() or min(rows, queries) < LEAST or not LEAST <= dim_in <= MOST:
        return False
    keys = torch.full((rows, dim_in), 127, dtype=torch.int8)
    others = keys.view(-1)[::7]
    others.copy_(torch.arange(len(others)) % 255 - 127)
    keys[1::2] *= -1
    asked, result = keys[torch.arange(queries) * 3 % rows], torch.empty(rows, queries, dtype=torch.int32)
    try:
        multiply(keys, asked, result)
    except RuntimeError:
        return False
    wide, some = asked.double().T, SLICE
    return all(
        torch.equal(result[at : at + some].double(), keys[at : at + some].double() @ wide)
        for at in range(0, rows, some)
    )


def multiply(
    rows: Int8[Tensor, "rows dim_in"],
    queries: Int8[Tensor, "queries dim_in"],
    result: Int32[Tensor, "rows queries"],
) -> None:
    """Fill in the products of rows with queries, of a shape that suits."""
    torch._int_mm(rows, queries.T, out=result)
