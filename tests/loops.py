"""Random small training runs: networks, batches, optimisers and loops, drawn by hypothesis.

`train` runs one of them, with or without a recorder, and saves every weight after every step: the plain truth
that tests compare a memory with.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """Everything that decides a training run."""

    seed: int
    dtype: torch.dtype
    widths: tuple[int, ...]
    bias: bool
    tied: bool
    leading: tuple[int, ...]
    groups: tuple[tuple[tuple[str, Any], ...], ...]
    implementation: str
    optimizers: int
    steps: int
    accumulate: int
    clip: float | None
    loss_scale: float
    l2: float
    set_to_none: bool
    schedule: bool
    warm_up: int
    evaluate: bool
    freeze: bool
    skip_backward: bool
    closure: bool
    retain: bool


_lr = st.sampled_from([0.001, 0.01, 0.05, 0.1])


@st.composite
def _group(draw: st.DrawFn, sign: bool) -> tuple[tuple[str, Any], ...]:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    return (
        ("lr", draw(_lr)),
        ("momentum", momentum),
        ("dampening", 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3]))),
        ("weight_decay", draw(st.sampled_from([0.0, 0.01, 0.1]))),
        ("nesterov", nesterov),
        ("maximize", sign),
    )


@st.composite
def runs(draw: st.DrawFn, dtype: torch.dtype) -> Run:
    sign = draw(st.integers(0, 4)) == 0
    widths = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    # A network whose every trained weight is a single number cannot tell a clip's scale from anything else.
    several = any(a * b > 1 for a, b in itertools.pairwise(widths))
    clip = draw(st.sampled_from([None, 0.1, 1.0])) if several else None
    return Run(
        seed=draw(st.integers(0, 2**20)),
        dtype=dtype,
        widths=widths,
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        leading=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        groups=(draw(_group(sign)), draw(_group(sign))),
        implementation=draw(st.sampled_from(["foreach", "fused", "plain"])),
        optimizers=draw(st.integers(1, 2)),
        steps=draw(st.integers(1, 8)),
        accumulate=draw(st.integers(1, 3)),
        clip=clip,
        loss_scale=draw(st.sampled_from([1.0, 1.0, 1024.0])) if several else 1.0,
        l2=draw(st.sampled_from([0.0, 0.0, 0.01])),
        set_to_none=draw(st.booleans()),
        schedule=draw(st.booleans()),
        warm_up=draw(st.sampled_from([0, 0, 2])),
        evaluate=draw(st.booleans()),
        freeze=draw(st.booleans()) and (clip is None or all(width > 1 for width in widths[1:])),
        skip_backward=draw(st.booleans()),
        closure=draw(st.integers(0, 3)) == 0,
        retain=draw(st.integers(0, 3)) == 0,
    )


class Network(nn.Module):
    """Linear layers with an in-place relu between them; `tied` calls a square layer twice, through two modules."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        pairs = list(zip(run.widths[:-1], run.widths[1:], strict=True))
        self.layers = nn.ModuleList(nn.Linear(a, b, run.bias, dtype=run.dtype) for a, b in pairs)
        self.square = nn.Linear(run.widths[-1], run.widths[-1], run.bias, dtype=run.dtype) if run.tied else None
        self.twin = nn.Linear(run.widths[-1], run.widths[-1], run.bias, dtype=run.dtype) if run.tied else None
        if self.twin is not None:
            self.twin.weight = self.square.weight

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at + 1 < len(self.layers):
                x = torch.relu_(x)
        if self.square is not None:
            x = self.square(torch.tanh(self.twin(torch.tanh(self.square(x)))))
        return x


@dataclass
class Trained:
    """A run's result: the model, and every parameter as it was when recording began and after every step."""

    model: nn.Module
    history: list[dict[str, Tensor]]
    test_inputs: Tensor


def make(run: Run) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(run.seed)
    model = Network(run)
    named = dict(model.named_parameters())
    weights = [p for n, p in named.items() if not n.endswith("bias")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    chosen = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}
    how = chosen[run.implementation]
    parts = [(weights, run.groups[0]), (biases, run.groups[1])]
    parts = [(params, group) for params, group in parts if params]
    if run.optimizers == 2:
        optimizers = [torch.optim.SGD(params, **dict(group), **how) for params, group in parts]
    else:
        groups = [{"params": params, **dict(group)} for params, group in parts]
        optimizers = [torch.optim.SGD(groups, **how)]
    return model, optimizers


def train(run: Run, record: Any = None) -> Trained:
    """Train; `record(model, optimizers)` gives the recorder's context manager."""
    model, optimizers = make(run)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers] if run.schedule else []
    generator = torch.Generator().manual_seed(run.seed + 1)
    history: list[dict[str, Tensor]] = []
    frozen = model.layers[0].weight

    def data() -> tuple[Tensor, Tensor]:
        x = torch.randn(*run.leading, run.widths[0], generator=generator, dtype=run.dtype)
        return x, torch.randn(*run.leading, run.widths[-1], generator=generator, dtype=run.dtype)

    def backward(recorder: Any) -> Tensor:
        x, y = data()
        ids = torch.randint(50, (run.leading[0],), generator=generator)
        context = recorder.batch(ids) if recorder is not None else contextlib.nullcontext()
        with context:
            loss = (model(x) - y).square().mean() * run.loss_scale / run.accumulate
            # Two unknowns (scale and decay) need more than two equations to be told apart.
            if run.l2 and run.widths[1] * min(run.widths[0], 4) >= 4:
                loss = loss + run.l2 / 2 * run.loss_scale / run.accumulate * frozen.square().sum()
            loss.backward(retain_graph=run.retain)
            if run.retain:
                loss.backward()
        return loss

    def zero() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=run.set_to_none)

    def one_step(recorder: Any, step: int) -> None:
        frozen.requires_grad_(not (run.freeze and step % 3 == 1) or len(list(model.parameters())) == 1)
        if not run.set_to_none and not frozen.requires_grad:
            frozen.grad = None if frozen.grad is None else torch.zeros_like(frozen)
        if run.evaluate:
            with torch.no_grad():
                model(data()[0])
            x, _ = data()
            x.requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        if run.skip_backward and step % 2:
            backward(recorder)
            zero()

        def gradients() -> Tensor:
            for _ in range(run.accumulate):
                loss = backward(recorder)
            if run.loss_scale != 1.0:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= run.loss_scale
            if run.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            return loss

        if run.closure and len(optimizers) == 1:
            optimizers[0].step(gradients)
            save()
        else:
            gradients()
            for optimizer in optimizers:
                optimizer.step()
                save()
        zero()
        for scheduler in schedulers:
            scheduler.step()

    def save() -> None:
        history.append({n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)})

    for step in range(run.warm_up):
        one_step(None, step)
    history.clear()
    save()
    with record(model, optimizers) if record is not None else contextlib.nullcontext() as recorder:
        for step in range(run.steps):
            one_step(recorder, step)
    return Trained(model, history, torch.randn(5, run.widths[0], generator=generator, dtype=run.dtype))
