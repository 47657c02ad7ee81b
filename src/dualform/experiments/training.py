"""Training as the paper's experiments do it, with a memory; a run that was interrupted goes on at its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import dualform
from dualform.experiments.datasets import Dataset, Split
from dualform.experiments.recipes import Recipe

BATCH = 128
EVERY = 500  # steps between checkpoints


def train(
    model: nn.Module,
    chosen: Recipe,
    data: Dataset,
    path: Path,
    batches: Sequence[Int64[Tensor, " batch"]],
    *,
    checkpoint: Path | None = None,
    title: str = "Training",
) -> None:
    """Train on these batches of example ids, with every event recorded in a memory at `path`.

    With a `checkpoint` file the state is kept there every 500 steps, and training goes on from it if it is there.
    """
    inputs, labels = chosen.inputs(data.train), data.train.labels
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    done = restore(checkpoint, model, optimizer) if checkpoint is not None and (path / "segments").is_dir() else 0
    columns, resume_at = chosen.columns(data.train), done or None
    with (
        dualform.record(
            model,
            optimizer,
            path,
            examples=columns,
            keep="all",
            recipe=chosen.name,
            resume_at=resume_at,
            on_error="raise",  # a training without its memory is of no use here
        ) as recorder,
        tqdm(total=len(batches), initial=done, desc=title, unit="step", disable=None) as progress,
    ):
        for step, ids in enumerate(batches[done:], start=done + 1):
            with recorder.batch(ids):
                loss = F.cross_entropy(model(inputs[ids]), labels[ids])
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update()
            if checkpoint is not None and step % EVERY == 0:
                recorder.commit()  # a checkpoint must not be ahead of the memory
                keep(checkpoint, model, optimizer, step)


def batches(examples: int, steps: int, seed: int, first: int = 0) -> Iterator[Int64[Tensor, " batch"]]:
    """Yield `steps` whole batches of the ids first … first + examples − 1, without replacement within an epoch."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        place = step % (examples // BATCH)
        if place == 0:
            order = first + torch.randperm(examples, generator=generator)
        yield order[place * BATCH : (place + 1) * BATCH]


@torch.no_grad()
def answers(model: nn.Module, chosen: Recipe, test: Split) -> Int64[Tensor, " images"]:
    """The model's answer to every test image."""
    found: Tensor = model(chosen.inputs(test)).argmax(1)
    return found


def accuracy(model: nn.Module, chosen: Recipe, test: Split) -> float:
    """Return the share of test images that the model gets right."""
    return float((answers(model, chosen, test) == test.labels).double().mean())


def keep(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write weights and velocities as they are after a step, by rename."""
    tensors = {f"weight/{name}": value.detach() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors[f"velocity/{name}"] = optimizer.state[parameter]["momentum_buffer"]
    unfinished = checkpoint.with_suffix(".part")
    save_file(tensors, unfinished, {"step": str(step)})
    os.replace(unfinished, checkpoint)


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint; 0 where there is none that can be read."""
    try:
        with safe_open(checkpoint, "pt") as file:
            return int(file.metadata()["step"])
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
        return 0


@torch.no_grad()
def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint's state into the model and the optimiser and return its step; 0 where there is none."""
    step = checkpoint_step(checkpoint)
    if step:
        with safe_open(checkpoint, "pt") as file:
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(f"weight/{name}"))
                optimizer.state[parameter]["momentum_buffer"] = file.get_tensor(f"velocity/{name}")
    return step
