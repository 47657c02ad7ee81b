"""Copies of a recorded model: each computes with its own weights, and is recorded only by a recorder of its own."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dualform
from small import batch, network, run

MAKE: list[Callable[[nn.Module], Any]] = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]


def steps(
    recorder: dualform.Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    for step in range(3):
        ids, x, y = batch(step)
        with recorder.batch(ids):
            F.cross_entropy((forward or model)(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("during", [True, False])
def test_a_copy_of_a_recorded_model_is_recorded_like_any_other(tmp_path: Path, make: Any, during: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        steps(recorder, model, optimizer)
        other = make(model)
        if during:
            run(tmp_path / "copy", other)
        steps(recorder, model, optimizer)
    if not during:
        run(tmp_path / "copy", other)
    for path in ("run", "copy"):
        memory = dualform.open(tmp_path / path)
        assert memory.manifest.events(0) == 30
        assert memory.certificate().exact


def with_noise(module: nn.Module) -> Any:
    """A copy as meta-learning and noise on weights make it: all attributes are shared but the parameters, made anew."""
    made = module.__new__(type(module))
    made.__dict__ = vars(module).copy()
    made._parameters = {name: p + 0.05 * p.detach().sign() for name, p in module._parameters.items() if p is not None}
    made._modules = {name: with_noise(inner) for name, inner in module._modules.items() if inner is not None}
    return made


def test_a_copy_of_all_attributes_computes_with_its_own_weights(tmp_path: Path) -> None:
    plain, model = network(), network()
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        path = tmp_path / ("run" if one is model else "other")
        with dualform.record(model if one is model else network(), optimizer, path, on_error="raise") as recorder:
            steps(recorder, one, optimizer, lambda x, one=one: with_noise(one)(x))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert dualform.open(tmp_path / "run").certificate().exact


def test_a_forward_put_on_a_module_before_the_start_stays(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = dualform.record(model, optimizer, tmp_path / "run")
    plain = model[0].forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * plain(x)

    model[0].forward = doubled  # type: ignore[method-assign]
    with recorder:
        steps(recorder, model, optimizer)
    assert vars(model[0])["forward"] is doubled


def test_two_recorders_see_the_same_and_one_that_fails_leaves_the_other_alone(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dualform.record(model, optimizer, tmp_path / "a") as first,
        dualform.record(model, optimizer, tmp_path / "b", on_error="raise") as second,
    ):
        for step in range(6):
            if step == 3:
                first.commit()
                first._capture._order = "none"  # type: ignore[assignment]
            ids, x, y = batch(step)
            with first.batch(ids), second.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "a").steps == 3
    memory = dualform.open(tmp_path / "b")
    assert memory.steps == 6 and memory.certificate().exact


def test_a_pass_without_numbers_beside_the_training_is_no_event(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        steps(recorder, model, optimizer)
        mode = FakeTensorMode()
        weights = {name: mode.from_tensor(p.detach()).requires_grad_() for name, p in model.named_parameters()}
        x = mode.from_tensor(batch(0)[1])
        with mode:
            torch.func.functional_call(model, weights, (x,)).sum().backward()
        steps(recorder, model, optimizer)
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.events(0) == 30 and memory.certificate().exact
