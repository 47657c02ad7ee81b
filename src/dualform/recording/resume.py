"""Going on with a run: is the model that was loaded the one the memory has at that step?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from dualform.errors import BadCall, ModelMismatch
from dualform.memory import Column, Manifest, StoredMemory
from dualform.memory.prefix import drop_after, prefix
from dualform.optimizers import LINEAR
from dualform.recording.description import final_tensors
from dualform.recording.stepping import Stepping
from dualform.recording.targets import Target, Targets

logger = logging.getLogger("dualform")


def resumed_memory(
    path: Path, step: int, blank: Manifest, targets: Targets, stepping: Stepping, columns: Sequence[Column]
) -> StoredMemory:
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
    for column in columns:
        memory.require_enough(column)
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
        kept = memory.sketch(target.index, step)
        if not _is_near(memory, target, target.parameter, kept, step, velocity=False):
            raise ModelMismatch(
                f"{target.name} is not what it was after step {step} of the recorded run. Load model and optimiser "
                f"from a checkpoint of step {step}, or pass the step of the checkpoint as resume_at."
            )
        velocity = stepping.velocity(target)
        if velocity is None or not _is_linear(memory, target, step):
            continue  # a fresh optimiser begins without, and the journal says so
        kept = memory.velocity_sketch(target.index, step)
        if kept is None and memory.manifest.keep != "all" and memory.manifest.format == 1:
            continue  # format 1 has no sketches of velocities
        if not _is_near(memory, target, velocity, kept, step, velocity=True):
            raise ModelMismatch(
                f"the optimiser's momentum of {target.name} is not what it was after step {step} of the recorded run. "
                "Load the optimiser's state from the same checkpoint as the model's."
            )


def _is_linear(memory: StoredMemory, target: Target, step: int) -> bool:
    flags = memory.journal.flags[:step, target.index]
    return bool(((flags == 0) | (flags & LINEAR > 0)).all())


def _is_near(memory: StoredMemory, target: Target, now: Tensor, kept: Tensor | None, step: int, velocity: bool) -> bool:
    """Whether a parameter or velocity is that of the step: by its sketch to the bit but for the order of its sums, or,
    where none was kept, by what the events add up to, within their rounding.
    """
    sketch = target.sketch(now)
    if kept is not None:
        both = sketch.isfinite() & kept.isfinite()
        if not bool(both.eq(sketch.isfinite()).all() and both.eq(kept.isfinite()).all()):
            return False
        sketch, kept = sketch[both], kept[both]  # weights that diverged are NaN in the same places
        return bool((sketch - kept).norm() <= 1e-9 * max(kept.norm(), sketch.norm()))
    if memory.manifest.keep != "all":
        return False
    total, terms = _folded(memory, target, step, velocity)
    size = max(terms, float(total.norm()), float(sketch.norm()))
    eps = torch.finfo(target.parameter.dtype).eps
    return bool((sketch - total).norm() <= 100 * eps * max(step, 1) ** 0.5 * size)


def _folded(memory: StoredMemory, target: Target, step: int, velocity: bool) -> tuple[Float64[Tensor, "..."], float]:
    """The sketch of a weight or of its velocity after `step`, from W0, v_0 and the events; and its terms' size."""
    found = memory.journal.coefficients(target.index, step, velocity)
    total = found.initial * target.sketch(memory.initial(target.name))
    moving = memory.velocity(target.name)
    if moving is not None:
        total = total + found.velocity * target.sketch(moving)
    terms = float(total.norm()) ** 2
    table = memory.journal.event_coefficients(target.index, step, velocity)
    for weight, record in enumerate(memory.manifest.weights):
        uses = [at for at, use in enumerate(record.uses) if target.name in (record.name, use.bias)]
        if not uses:
            continue
        for block in memory.blocks(weight, step):
            block = block.select(torch.isin(block.uses, torch.tensor(uses)) & (table[block.backwards] != 0))
            assert block.gradients is not None
            values = block.gradients.double() * table[block.backwards, None]
            if target.projection is None:
                part, sizes = values.sum(0), values.square().sum(1)
            else:
                keys = target.project(block.keys.double())
                part, sizes = values.T @ keys, values.square().sum(1) * keys.square().sum(1)
            total = total + part
            terms += float(sizes.sum())
    return total, terms**0.5
