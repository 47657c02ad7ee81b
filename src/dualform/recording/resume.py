"""Going on with a run: is the model that was loaded the one the memory has at that step?"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from dualform.errors import BadCall, ModelMismatch
from dualform.memory import Manifest, StoredMemory
from dualform.memory.prefix import drop_after, prefix
from dualform.optimizers import LINEAR
from dualform.recording.description import final_tensors
from dualform.recording.stepping import Stepping
from dualform.recording.targets import Target, Targets

logger = logging.getLogger("dualform")


def resumed_memory(path: Path, step: int, blank: Manifest, targets: Targets, stepping: Stepping) -> StoredMemory:
    """The memory at `path`, cut after `step`; an error where it cannot be gone on with from this model."""
    memory = StoredMemory(path)
    if step > memory.steps:
        raise BadCall(
            f"resume_at={step} is beyond the last committed step, {memory.steps}: load a checkpoint of step "
            f"{memory.steps} or earlier (recorder.commit() before saving a checkpoint makes its step durable)."
        )
    _require_same_run(memory.manifest, blank)
    _require_same_probe(memory, targets)
    _require_same_state(memory, targets, stepping, step)
    return drop_after(memory, step, final_tensors(targets))


def _require_same_run(kept: Manifest, blank: Manifest) -> None:
    for what in ("keep", "parameters", "weights", "optimizers", "every_step", "at_commits"):
        before, now = getattr(kept, what), getattr(blank, what)
        if before != now:
            pairs = [] if isinstance(before, str) else zip(before, now, strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (before, now))
            raise ModelMismatch(
                f"this is not the run that the memory was recorded from: its {what.replace('_', ' ')} is not the same. "
                f"The memory has {first[0]!r}, this call {first[1]!r}."
            )


def _require_same_probe(memory: StoredMemory, targets: Targets) -> None:
    for target in targets.weights:
        probe = memory.probe(target.index)
        assert probe is not None and target.projection is not None
        if not torch.equal(probe, target.projection):
            raise ModelMismatch(
                f"{target.name}: the memory was recorded with another probe; it cannot be gone on with."
            )


def _require_same_state(memory: StoredMemory, targets: Targets, stepping: Stepping, step: int) -> None:
    """Compare weights and velocities with their sketches at that step, kept at a commit or folded from the events."""
    exact = memory.committed(step)
    if not exact and memory.manifest.keep != "all":
        logger.warning("no commit ended at step %d, so the loaded weights cannot be compared with the memory", step)
        return
    findings = {finding.parameter for finding in prefix(memory, step).findings}
    for target in targets.parameters:
        if not exact and (target.name in findings or not _is_linear(memory, target, step)):
            continue  # its events do not add up to it
        kept = memory.sketch(target.index, step) if exact else _folded(memory, target, step, velocity=False)
        assert kept is not None
        if not _near(target, target.sketch(target.parameter), kept, step, exact):
            raise ModelMismatch(
                f"{target.name} is not what it was after step {step} of the recorded run. Load model and optimiser "
                f"from a checkpoint of step {step}, or pass the step of the checkpoint as resume_at."
            )
        velocity = stepping.velocity(target)
        if velocity is None or not _is_linear(memory, target, step):
            continue  # a fresh optimiser begins without, and the journal says so
        kept_too = exact and memory.manifest.format > 1  # format 1 has no sketches of velocities
        if not kept_too and memory.manifest.keep != "all":
            continue
        kept = memory.velocity_sketch(target.index, step) if kept_too else _folded(memory, target, step, velocity=True)
        if kept is None or not _near(target, target.sketch(velocity), kept, step, kept_too):
            raise ModelMismatch(
                f"the optimiser's momentum of {target.name} is not what it was after step {step} of the recorded run. "
                "Load the optimiser's state from the same checkpoint as the model's."
            )


def _is_linear(memory: StoredMemory, target: Target, step: int) -> bool:
    flags = memory.journal.flags[:step, target.index]
    return bool(((flags == 0) | (flags & LINEAR > 0)).all())


def _near(target: Target, sketch: Tensor, kept: Tensor, step: int, exact: bool) -> bool:
    """Whether two sketches are of the same parameter: to the bit but for the order of their sums, or rebuilt."""
    eps = torch.finfo(target.parameter.dtype).eps
    tolerance = 1e-9 if exact else 100 * eps * max(step, 1) ** 0.5
    size = max(float(kept.norm()), float(sketch.norm()))
    return float((sketch - kept).norm()) <= tolerance * size


def _folded(memory: StoredMemory, target: Target, step: int, velocity: bool) -> Float64[Tensor, "..."]:
    """The sketch of a weight or of its velocity after `step`, from the sketches of W0 and v_0 and from the events."""
    start = memory.sketch(target.index, 0)
    moving = memory.velocity_sketch(target.index, 0)
    found = memory.journal.coefficients(target.index, step, velocity)
    assert start is not None
    total = found.initial * start
    if moving is not None:
        total = total + found.velocity * moving
    table = memory.journal.event_coefficients(target.index, step, velocity)
    for weight, record in enumerate(memory.manifest.weights):
        uses = [at for at, use in enumerate(record.uses) if target.name in (record.name, use.bias)]
        if not uses:
            continue
        for block in memory.blocks(weight, step):
            chosen = torch.isin(block.uses, torch.tensor(uses)) & (table[block.backwards] != 0)
            block = block.select(chosen)
            assert block.gradients is not None
            values = block.gradients.double() * table[block.backwards, None]
            total = total + (
                values.sum(0) if target.projection is None else values.T @ target.project(block.keys.double())
            )
    return total
