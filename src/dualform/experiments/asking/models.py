"""The model of a memory, built anew with the memory's weights: by its recipe, or by a function of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform
from dualform.errors import BadCall, ModelMismatch, NotExact, NotKept
from dualform.experiments.recipes import RECIPES, Recipe, recipe


def recipe_of(memory: dualform.Memory) -> Recipe | None:
    """The recipe that a memory names, if this dualform has it."""
    name = memory.manifest.recipe
    return recipe(name) if name in RECIPES else None


def require_recipe(memory: dualform.Memory) -> Recipe:
    """The recipe that a memory names; BadCall, saying what to do, where there is none."""
    found = recipe_of(memory)
    if found is None:
        name = memory.manifest.recipe
        lacks = "names no recipe" if name is None else f"names the recipe {name!r}, which this dualform does not have"
        raise BadCall(
            f"{memory.path} {lacks}, so its model is not known here. Give it with --model package.module:factory "
            "(a function that returns it) and what to ask about with --inputs FILE.safetensors, or ask in Python: "
            "dualform.open(RUN).attend(model, inputs)."
        )
    return found


def factory(name: str) -> Callable[[], nn.Module]:
    """The function or model that `package.module:factory` names, found on the Python path or in this directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise BadCall(f"--model must have the form package.module:factory, not {name!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # the command does not run from the user's directory, as python -m does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # Whatever the user's module raises while it is imported.
        raise BadCall(
            f"--model {name}: {module_name} cannot be imported ({_told(error)}). It is looked for in {here} and on the "
            "Python path (PYTHONPATH)."
        ) from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadCall(f"--model {name}: the module {module_name} ({module.__file__}) has no {attribute!r}.")
        found = getattr(found, part)
    return lambda: _made(name, found)


def rebuilt_model(memory: dualform.Memory, build: Callable[[], nn.Module], until: int | None) -> nn.Module:
    """A new model with the memory's weights: those stored at the end, or those rebuilt for step `until`."""
    model = build().cpu().eval()
    if memory.end(until) == memory.steps and memory.manifest.final is not None:
        _load(model, _final(memory) | memory.others(memory.steps)[0])
        return model
    try:
        return memory.dual(model, until=until)
    except (NotKept, NotExact) as error:
        if memory.end(until) < memory.steps:
            raise
        raise type(error)(
            f"{memory.path} was not closed, so its last weights are not stored, and they cannot be rebuilt: {error} "
            "Ask in Python, with the model itself: dualform.open(RUN).attend(model, inputs)."
        ) from error


def _made(name: str, found: Any) -> nn.Module:
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise BadCall(f"--model {name} is no function that returns a model, but {type(found).__name__}.")
    try:
        made = found()
    except Exception as error:
        raise BadCall(f"--model {name}: calling it without arguments failed ({_told(error)}).") from error
    if not isinstance(made, nn.Module):
        raise BadCall(f"--model {name} must return a torch.nn.Module, not {type(made).__name__}.")
    return made


def _final(memory: dualform.Memory) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for record in memory.manifest.parameters:
        stored = memory.final(record.name)
        assert stored is not None
        tensors |= dict.fromkeys(record.names, stored)
    return tensors


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            found = "nothing" if place is None else _described(place)
            raise ModelMismatch(f"the model is not the memory's: {name} should be {_described(tensor)}, found {found}.")
        with torch.no_grad():
            place.copy_(tensor)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
