"""Coefficients: with which factor torch's own optimisers finally put each gradient into a weight, in fp64."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.optimizers import (
    ACTIVE,
    COLUMNS,
    DECOUPLED,
    FIRST,
    LINEAR,
    MAXIMIZE,
    NESTEROV,
    SettingsReader,
    coefficients,
    is_linear,
    read_settings,
)
from small import batch, network, run

SHAPE = (2, 3)


@dataclass(frozen=True)
class Step:
    """What happens to the weight in one step; None for a setting leaves it as it is."""

    gradient: str
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    how = draw(st.sampled_from([{"foreach": True}, {"fused": True}, {"foreach": False}, {"tensor": True}]))
    lr = draw(st.sampled_from([0.01, 0.1, 0.3]))
    return {
        "lr": torch.tensor(lr) if how.pop("tensor", False) else lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 1.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.2])),
        "maximize": draw(st.booleans()),
        **how,
    }


gradients = st.sampled_from(["some", "some", "some", "zero", "none"])
plain_steps = st.builds(Step, gradients)
changing_steps = st.builds(
    Step,
    gradients,
    lr=st.none() | st.sampled_from([0.0, 0.02, 0.2]),
    momentum=st.none() | st.sampled_from([0.0, 0.0, 0.7]),
    weight_decay=st.none() | st.sampled_from([0.0, 0.05]),
)


def assert_coefficients(optimizer: Any, weight: nn.Parameter, steps: list[Step], l2: float = 0.0) -> None:
    """Step torch's optimiser, and rebuild the weight after every step from W0, v_0 and the gradients alone."""
    generator = torch.Generator().manual_seed(len(steps))
    start = weight.detach().clone()
    buffer = optimizer.state[weight].get("momentum_buffer") if weight in optimizer.state else None
    velocity = torch.zeros_like(start) if buffer is None else buffer.detach().clone()
    settings, flags = np.zeros((len(steps), len(COLUMNS))), np.zeros(len(steps), dtype=np.uint8)
    used: list[Tensor] = []
    group = optimizer.param_groups[0]
    for at, step in enumerate(steps):
        for name in ("lr", "momentum", "weight_decay"):
            if getattr(step, name) is not None:
                group[name] = getattr(step, name)
        some = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        gradient = some if step.gradient == "some" else torch.zeros_like(some)
        used.append(gradient)
        weight.grad = None
        if step.gradient != "none":
            weight.grad = gradient + l2 * weight.detach()
            found = read_settings(optimizer, group, weight)
            settings[at], flags[at] = found.row, found.flags
            settings[at, COLUMNS.index("l2")] = l2
        optimizer.step()

        found = coefficients(settings[: at + 1], flags[: at + 1])
        terms = [found.initial * start, found.velocity * velocity]
        terms += [c * g for c, g in zip(found.steps.tolist(), used, strict=True)]
        size = sum(float(term.norm()) for term in terms)
        assert (sum(terms) - weight.detach()).norm() <= 1e-13 * size, (at, found)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


@hypothesis.given(options(), st.lists(plain_steps, min_size=1, max_size=8))
@hypothesis.settings(max_examples=150)
def test_sgd_of_every_kind(options: dict[str, Any], steps: list[Step]) -> None:
    weight = parameter()
    assert_coefficients(torch.optim.SGD([weight], **options), weight, steps)


@hypothesis.given(options(), st.lists(changing_steps, min_size=1, max_size=8))
@hypothesis.settings(max_examples=150)
def test_settings_that_change_during_the_run(options: dict[str, Any], steps: list[Step]) -> None:
    """Schedules of the rate and the decay, and momentum switched off (the old velocity stays) and on again."""
    weight = parameter()
    assert_coefficients(torch.optim.SGD([weight], **options), weight, steps)


@hypothesis.given(options(), st.lists(changing_steps, min_size=1, max_size=4), st.integers(1, 3))
def test_a_velocity_that_was_there_before(options: dict[str, Any], steps: list[Step], before: int) -> None:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], **options)
    for _ in range(before):
        weight.grad = torch.full(SHAPE, 0.5, dtype=torch.float64)
        optimizer.step()
    assert_coefficients(optimizer, weight, steps)


@hypothesis.given(options(), st.lists(plain_steps, min_size=1, max_size=6), st.sampled_from([0.01, 0.3]))
def test_an_l2_term_in_the_loss_is_a_decay_inside_the_gradient(
    options: dict[str, Any], steps: list[Step], l2: float
) -> None:
    weight = parameter()
    assert_coefficients(torch.optim.SGD([weight], **options), weight, steps, l2)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.1, 0.125])
def test_asgd(maximize: bool, foreach: bool, weight_decay: float, lr: float) -> None:
    """ASGD's rate decays by itself, and its own decay λ acts on the weight."""
    weight = parameter()
    settings = {"lambd": 0.05, "alpha": 0.7, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
    optimizer = torch.optim.ASGD([weight], lr=lr, **settings)
    assert_coefficients(optimizer, weight, [Step(g) for g in ("some", "none", "some", "zero", "some", "some")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_run_with_asgd_is_certified(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network(dtype=dtype)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, lambd=0.01, weight_decay=0.01)
    _, memory = run(tmp_path / "run", model=model, optimizer=optimizer, dtype=dtype)
    assert memory.certificate().exact, memory.certificate()


@hypothesis.given(
    st.lists(st.tuples(*[st.sampled_from([0.01, 0.1])] * 2, st.sampled_from([0.0, 0.9]), st.booleans()), min_size=1),
)
def test_a_decoupled_decay_acts_on_the_weight_alone(steps: list[tuple[float, float, float, bool]]) -> None:
    """W ← (1 − ηλ) W − η v with v ← μ v + G, by hand: torch has no SGD of that kind."""
    generator = torch.Generator().manual_seed(2)
    start = parameter().detach()
    weight, velocity, there = start.clone(), torch.zeros(SHAPE, dtype=torch.float64), False
    rows, flags, used = [], [], []
    for lr, decay, momentum, nesterov in steps:
        gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        weight = weight * (1 - lr * decay)
        if momentum:
            velocity = momentum * velocity + gradient if there else gradient.clone()
            weight = weight - lr * (gradient + momentum * velocity if nesterov else velocity)
        else:
            weight = weight - lr * gradient
        rows.append([lr, momentum, 0.0, decay, 0.0])
        flags.append(ACTIVE | LINEAR | DECOUPLED | (NESTEROV if nesterov else 0) | (0 if there else FIRST))
        there = there or momentum > 0
        used.append(gradient)
    found = coefficients(np.array(rows), np.array(flags, dtype=np.uint8))
    rebuilt = found.initial * start + sum(c * g for c, g in zip(found.steps.tolist(), used, strict=True))
    assert torch.allclose(rebuilt, weight, rtol=0, atol=1e-13)


def test_a_step_without_a_gradient_changes_nothing() -> None:
    active = np.array([[0.1, 0.9, 0.0, 0.01, 0.0]])
    alone = coefficients(active, np.array([ACTIVE | LINEAR | FIRST], dtype=np.uint8))
    padded = coefficients(
        np.concatenate([np.zeros((1, 5)), np.full((1, 5), 0.5), active, np.full((1, 5), 0.5)]),
        np.array([0, 0, ACTIVE | LINEAR | FIRST, 0], dtype=np.uint8),
    )
    assert padded.steps.tolist() == [0.0, 0.0, alone.steps[0], 0.0]
    assert (padded.initial, padded.velocity) == (alone.initial, alone.velocity)


def test_no_step_at_all_is_the_initial_weight() -> None:
    found = coefficients(np.zeros((0, 5)), np.zeros(0, dtype=np.uint8))
    assert (found.initial, found.velocity, len(found.steps)) == (1.0, 0.0, 0)


def test_reading_the_settings_changes_nothing() -> None:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.25), momentum=0.5, dampening=0.1, weight_decay=0.2)
    weight.grad = torch.ones_like(weight)
    settings = read_settings(optimizer, optimizer.param_groups[0], weight)
    assert weight not in optimizer.state
    assert settings.row == (0.25, 0.5, 0.1, 0.2, 0.0) and settings.flags == ACTIVE | LINEAR | FIRST
    optimizer.step()
    assert read_settings(optimizer, optimizer.param_groups[0], weight).flags == ACTIVE | LINEAR
    optimizer.param_groups[0] |= {"maximize": True, "nesterov": True}
    assert read_settings(optimizer, optimizer.param_groups[0], weight).flags == ACTIVE | LINEAR | MAXIMIZE | NESTEROV


class _Changed(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        pass


class _Unchanged(torch.optim.SGD):
    pass


def test_only_the_sgd_family_is_linear() -> None:
    weight = parameter()
    family = [torch.optim.SGD, torch.optim.ASGD, _Unchanged]
    others = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta]
    others += [torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.LBFGS, _Changed]
    assert all(is_linear(kind([weight], lr=0.1)) for kind in family)
    assert not any(is_linear(kind([weight], lr=0.1)) for kind in others)
    for kind in others:
        optimizer = kind([weight], lr=0.1)
        assert not read_settings(optimizer, optimizer.param_groups[0], weight).flags & LINEAR


def test_a_scheduler_does_not_hide_the_optimiser(tmp_path: Path) -> None:
    """A scheduler wraps the instance's step; it is still SGD, and every step has its own rate."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
    rates: list[tuple[float, float]] = []

    def after(model: nn.Module, step: int) -> None:
        group = optimizer.param_groups[0]
        rates.append((group["lr"], group["momentum"]))
        if step < 6:
            scheduler.step()

    _, memory = run(tmp_path / "run", model=model, optimizer=optimizer, after_step=after)
    assert is_linear(optimizer) and memory.certificate().exact
    assert [tuple(row) for row in memory.journal.settings[:, 0, :2].tolist()] == rates
    assert len(set(rates)) == 6


def test_momentum_switched_through_zero_in_a_recorded_run(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.05)

    def switch(model: nn.Module, step: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.0 if step in (2, 3) else 0.8

    _, memory = run(tmp_path / "run", model=model, optimizer=optimizer, after_step=switch, steps=8)
    assert memory.certificate().exact
    rebuilt = memory.weights()
    assert all(torch.allclose(rebuilt[n], t, rtol=0, atol=1e-14) for n, t in model.state_dict().items())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_missing_and_zero_gradients_in_a_recorded_run(tmp_path: Path, set_to_none: bool) -> None:
    """A layer that is frozen for some steps: None leaves it alone, zero lets momentum and decay act."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 8):
            model[0].requires_grad_(step not in (3, 4, 6))
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
            moved = not model[0].weight.equal(before)
            assert moved is (step not in (3, 4, 6) or not set_to_none)
            optimizer.zero_grad(set_to_none=set_to_none)
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    assert memory.certificate()[0].events == 20


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD, torch.optim.Adam])
def test_many_settings_are_those_of_each(kind: type[torch.optim.Optimizer]) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    optimizer = kind([{"params": weights[:3]}, {"params": weights[3:], "lr": 0.5}], lr=0.1)
    if kind is torch.optim.SGD:
        optimizer.param_groups[0]["momentum"] = 0.9
    groups = [*[optimizer.param_groups[0]] * 3, optimizer.param_groups[1]]
    reader = SettingsReader(optimizer)

    def check() -> None:
        each = [read_settings(optimizer, group, weight) for weight, group in zip(weights, groups, strict=True)]
        assert reader.read(list(zip(weights, groups, strict=True))) == each

    for step in range(6):
        check()
        weights[1].grad = torch.ones(2, 2)  # the others have no velocity yet
        optimizer.step()
        if step == 2:
            weights[0].grad = torch.ones(2, 2)
        groups[0]["lr"] /= 2
    if kind is torch.optim.SGD:
        check()
        groups[3]["lr"] = torch.tensor(0.25)
        check()
        groups[3]["lr"] *= 2  # the same tensor, with another value
        check()
        groups[3]["lr"] = 0.1
        check()
        groups[3]["lr"] = torch.tensor(0.1)  # equal to 0.1, but not the same number
        check()
        groups[3]["lr"] = np.array(0.5)
        check()
        groups[3]["lr"] /= 2
        check()
        groups[3]["lr"] = 0.5
        check()
        optimizer.state[weights[1]] = {}
        check()
        optimizer.load_state_dict(optimizer.state_dict())
        groups = [*[optimizer.param_groups[0]] * 3, optimizer.param_groups[1]]
        check()
        optimizer.state.clear()
        check()
