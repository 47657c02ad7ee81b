"""nn.Linear: every row of the input is an event, and the row itself is the key."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dualform.layers.registry import LinearMap, register


@register
class Linear:
    """y = W x + b, row by row over all leading dimensions."""

    name = "linear"

    def matches(self, module: nn.Module) -> bool:
        # A forward of its own (of a subclass, or patched on the instance) may compute anything. The output
        # projection of nn.MultiheadAttention is never called: torch uses its weight directly.
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        return plain and "forward" not in vars(module) and not isinstance(module, NonDynamicallyQuantizableLinear)

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        # A parametrised weight is a computed tensor, not a parameter of the module: nothing accumulates in it.
        if module._parameters.get("weight") is None:
            return ()
        if module._parameters.get("bias") is not None:
            return (LinearMap("", "weight", "bias"),)
        return (LinearMap("", "weight", None),) if getattr(module, "bias", None) is None else ()

    def leading(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[:-1])

    def keys(self, stored: Tensor) -> Float[Tensor, "events dim_in"]:
        return stored if stored.ndim == 2 else stored.reshape(-1, stored.shape[-1])

    def gradients(self, gradient: Tensor) -> Float[Tensor, "events dim_out"]:
        return gradient if gradient.ndim == 2 else gradient.reshape(-1, gradient.shape[-1])

    def outputs(self, rows: Float[Tensor, "events dim_out"], leading: tuple[int, ...]) -> Tensor:
        return rows.reshape(*leading, rows.shape[-1])
