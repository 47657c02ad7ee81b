"""What a question ranks and sums: attention weights, or contributions to the output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.queries.score import products, scores, square_norms
from dualform.queries.values import Coefficients


@runtime_checkable
class Scorer(Protocol):
    """Gives every event of a block a number for every query."""

    @property
    def queries(self) -> Float[Tensor, "queries dim_in"]:
        """The queries, a row each."""

    def ranks(self, block: Block) -> Float32[Tensor, "queries events"]:
        """The score of each event, for the order: the same bits whatever the split into blocks."""

    def terms(self, block: Block) -> Float64[Tensor, "queries events"]:
        """The same quantity in fp64, for sums."""


@dataclass(frozen=True)
class AttentionScorer:
    """α_t = x_t · q."""

    queries: Float[Tensor, "queries dim_in"]

    def ranks(self, block: Block) -> Float32[Tensor, "queries events"]:
        return scores(block.keys, self.queries)

    def terms(self, block: Block) -> Float64[Tensor, "queries events"]:
        return products(block.keys, self.queries)


def _gradients(block: Block) -> Tensor:
    assert block.gradients is not None
    return block.gradients


@dataclass(frozen=True)
class DirectionScorer:
    """What an event adds to the output along v: α_t (e_t · v) + c^b (g_t · v); one v for all queries, or one each."""

    queries: Float[Tensor, "queries dim_in"]
    coefficients: Coefficients
    directions: Float64[Tensor, "one_or_queries dim_out"]

    def ranks(self, block: Block) -> Float32[Tensor, "queries events"]:
        # Rounding α and g·v first makes every step elementwise, hence independent of how the rows were split.
        along = self.of_gradients(block)
        return self._combine(scores(block.keys, self.queries).double(), along, block).float()

    def terms(self, block: Block) -> Float64[Tensor, "queries events"]:
        along = products(_gradients(block), self.directions)
        return self._combine(products(block.keys, self.queries), along, block)

    def _combine(self, alphas: Tensor, along: Tensor, block: Block) -> Tensor:
        return self.combined(alphas, along, *self.coefficients.of_events(block))

    @staticmethod
    def combined(alphas: Tensor, along: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """α (c (g·v)) + c^b (g·v), elementwise."""
        added = alphas * (weight * along) + bias * along
        # A dropped pass (coefficient 0) may hold infinities; it adds nothing.
        return torch.where((weight == 0) & (bias == 0), 0.0, added)

    def of_gradients(self, block: Block) -> Float64[Tensor, "one_or_queries events"]:
        """g·v of every event, rounded as its ranks are."""
        gradients = _gradients(block)
        if self._units is not None and bool(gradients.sum(dtype=torch.float32).isfinite()):
            return gradients[:, self._units].T.float().double() + 0.0
        return scores(gradients, self.directions).double()

    @cached_property
    def _units(self) -> Int64[Tensor, " one_or_queries"] | None:
        """The units whose outputs the directions are; None where one is not a unit's."""
        ones = (self.directions == 1.0).sum(dim=1) == 1
        return (
            self.directions.argmax(dim=1) if bool((ones & ((self.directions != 0.0).sum(dim=1) == 1)).all()) else None
        )


@dataclass(frozen=True)
class NormScorer:
    """|α_t| ‖e_t‖: how much an event moves the output as a whole (the paper's error-norm variant)."""

    queries: Float[Tensor, "queries dim_in"]
    coefficients: Coefficients

    def ranks(self, block: Block) -> Float32[Tensor, "queries events"]:
        norms = self.of_gradients(block)[0]
        return self._weighted(scores(block.keys, self.queries).double(), norms, block).float()

    def of_gradients(self, block: Block) -> Float64[Tensor, "one events"]:
        """‖g‖ of every event, rounded as its ranks are."""
        # Brought near 1 by a power of two first: squares of small or large gradients would leave the range of fp32.
        gradients = _gradients(block).double()
        exponents = gradients.abs().amax(dim=1, keepdim=True).frexp().exponent
        return square_norms(gradients.ldexp(-exponents)).double().sqrt().ldexp(exponents[:, 0])[None]

    def terms(self, block: Block) -> Float64[Tensor, "queries events"]:
        norms = torch.linalg.vector_norm(_gradients(block), dim=1, dtype=torch.float64)
        return self._weighted(products(block.keys, self.queries), norms, block)

    def _weighted(self, alphas: Tensor, norms: Tensor, block: Block) -> Tensor:
        return self.weighted(alphas, norms, self.coefficients.of_events(block)[0])

    @staticmethod
    def weighted(alphas: Tensor, norms: Tensor, coefficients: Tensor) -> Tensor:
        """|α| ‖g‖ |c|, elementwise."""
        # A dropped pass (coefficient 0) may hold infinities; it adds nothing.
        return torch.where(coefficients == 0, 0.0, alphas.abs() * norms * coefficients.abs())

    def alphas(self, block: Block) -> Float64[Tensor, "queries events"]:
        """α_t in fp64, for sums of whole contributions."""
        return products(block.keys, self.queries)
