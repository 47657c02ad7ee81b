"""What a memory says of the model and the optimisers it was recorded from."""

from __future__ import annotations

import importlib.metadata
import os
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
from torch import Tensor

from dualform.memory import Manifest
from dualform.memory.files import FileRecord
from dualform.memory.manifest import OptimizerRecord, ParameterRecord, UseRecord, WeightRecord
from dualform.optimizers import is_linear
from dualform.recording.stepping import Stepping
from dualform.recording.targets import Target, Targets


def describe(
    targets: Targets,
    stepping: Stepping,
    optimizers: Sequence[torch.optim.Optimizer],
    keep: str,
    recipe: str | None,
    initial: FileRecord,
) -> Manifest:
    """The manifest of a run that has not made a step yet."""
    return Manifest(
        id=uuid.UUID(bytes=os.urandom(16), version=4).hex,
        dualform=importlib.metadata.version("dualform"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        keep=keep,
        recipe=recipe,
        optimizers=tuple(OptimizerRecord(type(o).__name__, is_linear(o)) for o in optimizers),
        parameters=tuple(_parameter_record(target, stepping.owner(target)) for target in targets.parameters),
        weights=tuple(_weight_record(target, targets) for target in targets.weights),
        initial=initial,
        every_step=tuple(targets.every_step),
        at_commits=tuple(targets.at_commits),
    )


def _parameter_record(target: Target, owner: int) -> ParameterRecord:
    dtype = str(target.parameter.dtype).removeprefix("torch.")
    return ParameterRecord(target.name, tuple(target.names), tuple(target.parameter.shape), dtype, owner)


def _weight_record(target: Target, targets: Targets) -> WeightRecord:
    uses = [use for use in targets.uses if use.weight is target]
    dim_out, dim_in = target.parameter.shape
    records = (UseRecord(use.map, use.module_name, use.kind.name, use.bias.name if use.bias else None) for use in uses)
    return WeightRecord(target.name, dim_in, dim_out, tuple(records))


def initial_tensors(targets: Targets, stepping: Stepping) -> dict[str, Sequence[Tensor]]:
    """The model as it is when recording begins."""
    tensors: dict[str, Tensor] = {}
    for target in targets.parameters:
        tensors[f"parameter/{target.name}"] = target.parameter.detach()
        tensors[f"sketch/{target.index}"] = target.sketch(target.parameter)
        velocity = stepping.velocity(target)
        if velocity is not None:
            tensors[f"velocity/{target.name}"] = velocity
            tensors[f"velocity_sketch/{target.index}"] = target.sketch(velocity)
        if target.projection is not None:
            tensors[f"probe/{target.index}"] = target.projection
    for name, place in (targets.every_step | targets.at_commits).items():
        tensors[f"other/{name}"] = place.current()
    return {name: [tensor] for name, tensor in tensors.items()}


def final_tensors(targets: Targets) -> dict[str, Sequence[Tensor]]:
    """The recorded parameters as they are now."""
    return {f"parameter/{target.name}": [target.parameter.detach()] for target in targets.parameters}
