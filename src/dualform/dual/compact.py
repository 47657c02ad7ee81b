"""Remark 3.4: the dual form is not unique; a smaller equivalent attention system."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dualform.errors import BadCall
from dualform.memory import StoredMemory
from dualform.queries.attend import find_map, uses_of
from dualform.queries.folds import Folds
from dualform.queries.selection import Selection
from dualform.queries.values import require_values


@dataclass(frozen=True)
class Compact:
    """`rank` key/value pairs that stand for all events of a layer; `error` is what they leave out of Σ e_t ⊗ x_t."""

    layer: str
    keys: Float64[Tensor, "rank dim_in"]
    values: Float64[Tensor, "rank dim_out"]
    error: float
    initial_weight: Float64[Tensor, "dim_out dim_in"]
    bias: Float64[Tensor, " dim_out"] | None

    @property
    def rank(self) -> int:
        """The number of key/value pairs."""
        return len(self.keys)

    def output(self, queries: Float[Tensor, "*queries dim_in"]) -> Float64[Tensor, "*queries dim_out"]:
        """W0 q + Attention(keys, values, q) + b."""
        queries = queries.double()
        result = queries @ self.initial_weight.T + (queries @ self.keys.T) @ self.values
        return result if self.bias is None else result + self.bias

    def __repr__(self) -> str:
        return f"Compact({self.layer!r}: {self.rank} key/value pairs, error {self.error:.1e})"


def compact(memory: StoredMemory, folds: Folds, layer: str, rank: int | None) -> Compact:
    """The best `rank` key/value pairs for a layer, by singular value decomposition of what was learned."""
    name = find_map(memory, layer)
    weight, _, use = uses_of(memory)[name]
    require_values(memory, weight, "compact()")
    record = memory.manifest.weights[weight]
    full = min(record.dim_in, record.dim_out)
    rank = full if rank is None else rank
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 1 <= rank <= full:
        raise BadCall(f"rank must be a whole number from 1 to {full}, the smaller side of {record.name}, not {rank!r}.")
    parameters = folds.parameters(memory.steps, Selection())
    initial = folds.untouched(record.name, memory.steps)
    left, sizes, right = torch.linalg.svd(parameters[record.name] - initial, full_matrices=False)
    whole = float(sizes.norm())
    return Compact(
        layer=name,
        keys=right[:rank],
        values=(left[:, :rank] * sizes[:rank]).T,
        error=float(sizes[rank:].norm()) / whole if whole else 0.0,
        initial_weight=initial,
        bias=parameters[use.bias].clone() if use.bias else None,
    )
