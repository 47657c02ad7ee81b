"""The model in dual form: a copy whose recorded layers are rebuilt from, or really attend over, the memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import BadCall, ModelMismatch
from dualform.layers import LayerType, layer_type
from dualform.memory import StoredMemory
from dualform.queries.attend import DUAL, uses_of
from dualform.queries.kernels import Kernel
from dualform.queries.selection import Selection
from dualform.queries.spotlight import Attention, Focus
from dualform.queries.values import Folds, require_values

logger = logging.getLogger("dualform")


def rebuilt_weights(
    memory: StoredMemory, folds: Folds, until: int, where: Mapping[str, Any] | None, question: str
) -> dict[str, Tensor]:
    """Every recorded weight and bias at step `until` from the selected events, by its names in the state dict."""
    for weight in range(len(memory.manifest.weights)):
        require_values(memory, weight, question)
    rebuilt = folds.parameters(until, Selection().narrowed(memory, where))
    result: dict[str, Tensor] = {}
    for record in memory.manifest.parameters:
        tensor = rebuilt[record.name].to(getattr(torch, record.dtype))
        result |= dict.fromkeys(record.names, tensor)
    return result


def dual_model(
    memory: StoredMemory,
    folds: Folds,
    model: nn.Module,
    where: Mapping[str, Any] | None,
    until: int,
    fold: bool,
    kernel: Kernel | None,
) -> nn.Module:
    """A copy of the model for inference, in which the recorded layers are in dual form."""
    if fold and kernel is not None:
        raise BadCall("a kernel needs fold=False: folding the events into a weight is the identity kernel.")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    notes = _load_others(memory, copied, until)
    if fold:
        _load(copied, rebuilt_weights(memory, folds, until, where, "dual()"))
    else:
        for weight in range(len(memory.manifest.weights)):
            require_values(memory, weight, "dual()")
        _swap(memory, copied, where, until, kernel)
    for note in notes:
        logger.info("%s", note)
    setattr(copied, DUAL, memory.manifest.id)
    copied.dualform_notes = tuple(notes)  # type: ignore[assignment]
    return copied


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None or place.shape != tensor.shape:
            found = "nothing" if place is None else f"shape {list(place.shape)}"
            raise ModelMismatch(
                f"the model is not the memory's: {name} should have shape {list(tensor.shape)}, found {found}."
            )
        with torch.no_grad():
            place.copy_(tensor)


def _load_others(memory: StoredMemory, model: nn.Module, until: int) -> list[str]:
    """Load unrecorded parameters and buffers; what is not from step `until` itself is named."""
    values, steps = memory.others(until)
    _load(model, values)
    notes = [f"{name} is approximate: stored at step {s}, not {until}" for name, s in steps.items() if s != until]
    recorded = {name for record in memory.manifest.parameters for name in record.names}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return notes + [
        f"{name} is taken from the given model: it is not stored"
        for name in tensors
        if name not in recorded and name not in values
    ]


@dataclass(frozen=True)
class AttendingForward:
    """Stands in for a module's forward: the input attends over the memory (Eq. 13)."""

    memory: StoredMemory
    weight: int
    use: int
    kind: LayerType
    until: int
    selection: Selection
    kernel: Kernel | None

    def __call__(self, input: Tensor) -> Tensor:
        rows = self.kind.keys(input.detach())
        focus = Focus(self.memory, self.weight, self.use, rows, (len(rows),), self.until, self.selection)
        output = Attention(focus).output(self.kernel)
        return self.kind.outputs(output, self.kind.leading(input)).to(input.dtype)

    def __deepcopy__(self, memo: Any) -> AttendingForward:
        return self


def _no_shortcut(*_: Any) -> None:
    """Do nothing, as a hook."""


def _swap(
    memory: StoredMemory, model: nn.Module, where: Mapping[str, Any] | None, until: int, kernel: Kernel | None
) -> None:
    selection = Selection().narrowed(memory, where)
    modules = dict(model.named_modules())
    for name, (weight, at, use) in uses_of(memory).items():
        kind = layer_type(use.kind)
        if kind is None or use.module not in modules:
            raise ModelMismatch(
                f"the model has no layer {name!r} of type {use.kind}, which the memory was recorded from."
            )
        # The forward is swapped, not the module: names, types and the state dict stay as they are.
        modules[use.module].forward = AttendingForward(memory, weight, at, kind, until, selection, kernel)
        # A hook keeps torch's transformer layers from using the weight without calling the layer.
        modules[use.module].register_forward_pre_hook(_no_shortcut)
