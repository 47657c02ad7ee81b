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
from dualform.queries.attend import DUAL, is_memorys, uses_of
from dualform.queries.focus import Focus
from dualform.queries.folds import Folds
from dualform.queries.kernels import Kernel, check_kernel
from dualform.queries.outputs import output_plan
from dualform.queries.plan import answer
from dualform.queries.selection import Selection
from dualform.queries.values import parameters_of, require_values

logger = logging.getLogger("dualform")


def rebuilt_weights(
    memory: StoredMemory, folds: Folds, until: int, where: Mapping[str, Any] | None, question: str
) -> dict[str, Tensor]:
    """Every recorded weight and bias at step `until` from the selected events, by its names in the state dict."""
    for weight in range(len(memory.manifest.weights)):
        require_values(memory, weight, question)
    rebuilt = folds.parameters(until, Selection().narrowed(memory, where))
    if not where:
        _check_sketches(memory, rebuilt, until)
    result: dict[str, Tensor] = {}
    for record in memory.manifest.parameters:
        for name in record.names:
            result[name] = rebuilt[record.name].to(getattr(torch, record.dtype), copy=True)
    return result


def _check_sketches(memory: StoredMemory, rebuilt: Mapping[str, Tensor], until: int) -> None:
    """Tell where a rebuilt parameter is not the one whose sketch was committed at that step."""
    for at, record in enumerate(memory.manifest.parameters):
        kept = memory.sketch(at, until)
        if kept is None or ("sketch", at, until) in memory.told:
            continue
        probe = memory.probe(at)
        sketch = rebuilt[record.name] if probe is None else rebuilt[record.name] @ probe
        eps = torch.finfo(getattr(torch, record.dtype)).eps
        distance, size = float((sketch - kept).norm()), float(kept.norm())
        if distance > 100 * eps * max(until, 1) ** 0.5 * max(size, float(sketch.norm())):
            memory.told.add(("sketch", at, until))
            away = distance / max(size, 1e-300)
            logger.warning("%s rebuilt for step %d is %.1g of its size off its sketch", record.name, until, away)


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
    if not isinstance(model, nn.Module):
        raise BadCall(f"dual takes the torch.nn.Module that was recorded, not {type(model).__name__}.")
    check_kernel(kernel)
    copied = _copy(model)
    notes = _load_others(memory, copied, until) + _not_exact(memory) + _patched(copied)
    for weight in range(len(memory.manifest.weights)):
        require_values(memory, weight, "dual()")
    # Folded or not, the weights are those of `until` and `where`: something may use them past their modules.
    if fold or where or until != memory.steps or not is_memorys(memory, model):
        rebuilt = rebuilt_weights(memory, folds, until, where, "dual()")
        _load(copied, rebuilt | _eventless(memory, until, notes))
    if not fold:
        _swap(memory, copied, where, until, kernel)
    for note in notes:
        logger.warning("%s", note)
    setattr(copied, DUAL, memory.manifest.id)
    copied.dualform_notes = tuple(notes)  # type: ignore[assignment]
    return copied


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy for inference, without any attending forward of an earlier dual()."""
    # Activations that a module keeps in an attribute cannot be copied as they are; their values can.
    kept = (value for module in model.modules() for value in vars(module).values())
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    copied = copy.deepcopy(model, memo).eval().requires_grad_(False)
    for module in copied.modules():
        if isinstance(vars(module).get("forward"), AttendingForward):
            del module.forward
    return copied


def _patched(model: nn.Module) -> list[str]:
    """Modules whose forward was replaced on the instance: a copied closure still holds the original's tensors."""
    names = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return [f"{name} has a forward patched on the instance: the copy may still use the given model" for name in names]


def _not_exact(memory: StoredMemory) -> list[str]:
    return [f"{found.parameter} is not exact: {found.reason}" for found in memory.manifest.findings]


def _eventless(memory: StoredMemory, until: int, notes: list[str]) -> dict[str, Tensor]:
    """Parameters that changed without a single event: their final value is nearer the truth than their first."""
    result: dict[str, Tensor] = {}
    for at in range(len(memory.manifest.weights)):
        names = parameters_of(memory, at)
        if memory.manifest.events(at) or not any(f.parameter in names for f in memory.manifest.findings):
            continue
        for name in names:
            final = memory.final(name)
            if final is not None and until > 0:
                result |= dict.fromkeys(memory.manifest.parameters[memory.manifest.parameter(name)].names, final)
                notes.append(f"{name} is that of the last step: it changed without any recorded event")
    return result


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
        output = answer(output_plan(focus, self.kernel, attend=True))
        return self.kind.outputs(output, self.kind.leading(input.shape)).to(input.dtype)

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
        module = modules.get(use.module)
        weight_of = None if module is None else dict(module.named_parameters()).get("weight")
        record = memory.manifest.weights[weight]
        fits = weight_of is not None and tuple(weight_of.shape) == (record.dim_out, record.dim_in)
        if kind is None or module is None or not kind.matches(module) or not fits:
            raise ModelMismatch(
                f"the model has no layer {name!r} of type {use.kind}, which the memory was recorded from."
            )
        # The forward is swapped, not the module: names, types and the state dict stay as they are.
        modules[use.module].forward = AttendingForward(memory, weight, at, kind, until, selection, kernel)
        # A hook keeps torch's transformer layers from using the weight without calling the layer.
        modules[use.module].register_forward_pre_hook(_no_shortcut)
