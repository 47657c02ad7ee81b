"""What a layer type must tell the recorder, and the registry of the types there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearMap:
    """One linear map inside a module: output = weight · key + bias.

    `suffix` addresses the map within its module ("" where there is one only); `weight` and `bias` are the
    names of the module's own parameters.
    """

    suffix: str
    weight: str
    bias: str | None


@runtime_checkable
class LayerType(Protocol):
    """How one type of module is a linear map, and how its keys come out of what flows through it."""

    name: str

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` computes exactly this type's map."""

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """The linear maps of the module whose weights are its own parameters."""

    def leading(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The leading dimensions of a stored input of this shape: one event for each of their elements."""

    def keys(self, stored: Tensor) -> Float[Tensor, "events dim_in"]:
        """The keys, a row an event, from the stored input."""

    def gradients(self, gradient: Tensor) -> Float[Tensor, "events dim_out"]:
        """The gradients at the output, a row an event."""

    def outputs(self, rows: Float[Tensor, "events dim_out"], leading: tuple[int, ...]) -> Tensor:
        """The module's output from the map's output rows: the inverse of `gradients`."""


_types: dict[str, LayerType] = {}


K = TypeVar("K", bound=type)


def register(kind: K) -> K:
    """Make a layer type known to the recorder; a class decorator."""
    instance = kind()
    _types[instance.name] = instance
    return kind


def layer_type(name: str) -> LayerType | None:
    """The registered layer type of that name."""
    return _types.get(name)


def find_layer_type(module: nn.Module) -> LayerType | None:
    """The registered type that `module` is, or None."""
    return next((kind for kind in _types.values() if kind.matches(module)), None)
