"""Section 5.4's thought experiment made real: the network without the events of one task, or as it was before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from dualform.experiments.paper.checks import percent
from dualform.experiments.paper.run import Run


@dataclass(frozen=True)
class Masked:
    """A model made of some of the events, and its accuracy in per cent by task.

    `without` is the task whose events are left out, in `layer` alone or (None) in all; `until` is the last step.
    """

    without: str | None
    layer: str | None
    until: int
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Masks:
    """The trained model, the one of an earlier step, and those without one task's events."""

    rows: tuple[Masked, ...]


def masks(run: Run) -> Masks:
    """Measure what each task's events are worth, layer by layer."""
    memory, before = run.memory, run.experiment.phases[0].steps
    final = {name: value.detach() for name, value in run.model.named_parameters()}
    rows = [
        Masked(None, None, memory.steps, _accuracy(run, final)),
        Masked(None, None, before, _accuracy(run, memory.weights(until=before))),
    ]
    names = [task.name for task in run.recipe.tasks]
    for without in reversed(names):
        kept = [name for name in names if name != without]
        masked = memory.weights(where={"task": kept})
        rows.append(Masked(without, None, memory.steps, _accuracy(run, masked)))
        for layer in run.experiment.layers:
            alone = {name: masked[name] if name.startswith(f"{layer}.") else value for name, value in final.items()}
            rows.append(Masked(without, layer, memory.steps, _accuracy(run, alone)))
    return Masks(tuple(rows))


@torch.no_grad()
def _accuracy(run: Run, weights: Mapping[str, Tensor]) -> dict[str, float]:
    test = run.data.test
    answers = functional_call(run.model, dict(weights), (run.recipe.inputs(test),)).argmax(1)
    right = answers == test.labels
    return {task.name: percent(right[test.tasks == number]) for number, task in enumerate(run.recipe.tasks)}
