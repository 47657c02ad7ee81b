"""A small network and a plain loop that most recorder tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 4, dtype=dtype))


def batch(step: int, size: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(20, (size,), generator=generator)
    return ids, torch.randn(size, 6, generator=generator, dtype=dtype), ids % 4


def run(
    path: Path,
    model: nn.Module | None = None,
    optimizer: Any = None,
    steps: int = 6,
    before_step: Callable[[nn.Module, int], None] | None = None,
    after_step: Callable[[nn.Module, int], None] | None = None,
    zero: bool = True,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[nn.Module, dualform.Memory]:
    """Record `steps` steps; the two callbacks get the model and the step's number, from 1."""
    model = network(dtype=dtype) if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, path, on_error="raise", **options) as recorder:
        for step in range(1, steps + 1):
            ids, x, y = batch(step, dtype=dtype)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            if before_step:
                before_step(model, step)
            optimizer.step()
            if zero:
                optimizer.zero_grad()
            if after_step:
                after_step(model, step)
    return model, dualform.open(path)
