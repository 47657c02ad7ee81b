"""Sums of values weighted by the scores themselves (the dual form) or by another kernel of them (Remark 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.queries.score import products
from dualform.queries.values import Coefficients

Kernel = str | Callable[[Tensor], Tensor]


class KernelSum:
    """Σ k(α_t) e_t, plus the events' part of the bias; k is the identity in the dual form."""

    def __init__(
        self,
        queries: Float[Tensor, "queries dim_in"],
        coefficients: Coefficients,
        dim_out: int,
        kernel: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._queries, self._coefficients, self._kernel = queries, coefficients, kernel
        self._sum = torch.zeros(len(queries), dim_out, dtype=torch.float64)
        self._bias = torch.zeros(dim_out, dtype=torch.float64)

    def fresh(self) -> KernelSum:
        """One like this, of no events."""
        return type(self)(self._queries, self._coefficients, len(self._bias), self._kernel)

    def update(self, block: Block) -> None:
        """Add the events of a block."""
        weight, bias = self._coefficients.of_events(block)
        used = (weight != 0) | (bias != 0)
        block, weight, bias = block.select(used), weight[used], bias[used]
        assert block.gradients is not None
        if len(block) == 0:
            return
        gradients = block.gradients.double()
        self._add(products(block.keys, self._queries), gradients * weight[:, None])
        self._bias += bias @ gradients

    def _add(self, alphas: Float64[Tensor, "queries events"], values: Float64[Tensor, "events dim_out"]) -> None:
        weights = alphas if self._kernel is None else self._kernel(alphas)
        if not isinstance(weights, Tensor) or weights.shape != alphas.shape or weights.is_complex():
            found = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise BadQuery(f"a kernel must keep the shape of its scores {list(alphas.shape)}, not {found}.")
        self._sum += weights.double() @ values

    def merge(self, other: KernelSum) -> None:
        """Add the sums of later blocks."""
        self._sum += other._sum
        self._bias += other._bias

    def result(self) -> Float64[Tensor, "queries dim_out"]:
        """The sum for every query."""
        return self._sum + self._bias


class SoftmaxSum(KernelSum):
    """Σ softmax(α)_t e_t over all events, in one pass with a running maximum."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._largest = torch.full((len(self._queries), 1), -torch.inf, dtype=torch.float64)
        self._normaliser = torch.zeros(len(self._queries), 1, dtype=torch.float64)

    def _add(self, alphas: Float64[Tensor, "queries events"], values: Float64[Tensor, "events dim_out"]) -> None:
        largest = torch.maximum(self._largest, alphas.amax(dim=1, keepdim=True))
        weights = (alphas - largest).exp()
        self._rescale(largest)
        self._normaliser += weights.sum(dim=1, keepdim=True)
        self._sum += weights @ values

    def _rescale(self, largest: Tensor) -> None:
        shrink = torch.where(
            self._largest.isinf(), 0.0, (self._largest - largest).exp()
        )  # nothing yet: nothing to keep
        self._sum, self._normaliser, self._largest = self._sum * shrink, self._normaliser * shrink, largest

    def merge(self, other: KernelSum) -> None:
        """Add the sums of later blocks, on a common maximum."""
        assert isinstance(other, SoftmaxSum)
        largest = torch.maximum(self._largest, other._largest)
        self._rescale(largest)
        other._rescale(largest)
        self._normaliser += other._normaliser
        super().merge(other)

    def result(self) -> Float64[Tensor, "queries dim_out"]:
        """The weighted mean of the values, plus the bias."""
        return self._sum / self._normaliser.clamp_min(1e-300) + self._bias


def check_kernel(kernel: Kernel | None) -> None:
    """BadQuery for what is no kernel."""
    if kernel is not None and kernel != "softmax" and not callable(kernel):
        raise BadQuery(f"kernel must be 'softmax' or a function of a block of scores, not {kernel!r}.")


def output_reducer(kernel: Kernel | None, queries: Tensor, coefficients: Coefficients, dim_out: int) -> KernelSum:
    """The reducer for a kernel: None for the dual form itself, "softmax", or a function of blocks of scores."""
    check_kernel(kernel)
    if isinstance(kernel, str):
        return SoftmaxSum(queries, coefficients, dim_out)
    return KernelSum(queries, coefficients, dim_out, kernel)
