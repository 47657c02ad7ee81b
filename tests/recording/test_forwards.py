"""A recorded model, its copies, and forwards that others put before a module's own: each computes what it would."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.recording.forwards import Watching
from small import batch, network, run

Copy = Callable[[nn.Module], Any]


def of_dict(model: nn.Module) -> nn.Module:
    """A copy as a module's own __deepcopy__ may make it: of all that it has."""
    made = copy.deepcopy(model)
    for module, source in zip(made.modules(), model.modules(), strict=True):
        if isinstance(module, nn.Linear):
            module.__dict__.update(copy.deepcopy(vars(source), {id(source): module}))
    return made


COPIES: list[Copy] = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), of_dict]


def steps(recorder: dualform.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for step in range(count):
        ids, x, y = batch(step)
        with recorder.batch(ids):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("during", [True, False])
def test_a_copy_of_a_recorded_model_is_recorded_like_any_other(tmp_path: Path, make: Copy, during: bool) -> None:
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
    for path, count in (("run", 30), ("copy", 30)):
        memory = dualform.open(tmp_path / path)
        assert memory.manifest.events(0) == count
        assert memory.certificate().exact
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda layer: layer._replicate_for_data_parallel(), COPIES[1]]
)
def test_a_copy_computes_with_its_own_weights(make: Copy) -> None:
    layer = nn.Linear(3, 2)
    layer.note = "kept"  # type: ignore[assignment]
    calls: list[Any] = []
    watching = Watching(layer, lambda *call: calls.append(call))
    before = {name for name in vars(copy.copy(layer)) if name != "note"}
    other = make(layer)
    other._parameters = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    assert other(torch.ones(3)).tolist() == [3.0, 3.0]
    assert other.note == "kept"
    assert not calls
    layer(torch.ones(3))
    assert len(calls) == 1
    watching.remove()
    assert set(vars(layer)) == before | {"note"}


def test_a_module_that_says_itself_what_is_kept_of_it_does_so_still() -> None:
    class Brief(nn.Linear):
        def __getstate__(self) -> Any:
            return "brief", torch.__version__

        def __setstate__(self, state: Any) -> None:
            super().__init__(1, 1)
            self.state = state

    layer = Brief(3, 2)
    watching = Watching(layer, lambda *_: None)
    assert copy.deepcopy(layer).state == ("brief", torch.__version__)
    watching.remove()
    assert not {"forward", "__getstate__"} & set(vars(layer))


def test_several_watch_one_module_until_the_last_has_left() -> None:
    layer, calls = nn.Linear(3, 2), []
    first, second = (Watching(layer, lambda *_, who=who: calls.append(who)) for who in "ab")
    layer(torch.ones(3))
    first.remove()
    layer(torch.ones(3))
    first.remove()
    second.remove()
    layer(torch.ones(3))
    assert calls == ["a", "b", "b"]
    assert "forward" not in vars(layer)


def test_a_forward_put_before_ours_stays_and_is_recorded_as_long_as_it_calls_ours(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        ours = model[0].forward

        def doubled(x: torch.Tensor) -> torch.Tensor:
            return 2 * ours(x)

        model[0].forward = doubled  # type: ignore[method-assign]
        steps(recorder, model, optimizer)
    assert dualform.open(tmp_path / "run").certificate().exact
    assert vars(model[0])["forward"] is doubled
    x = batch(0)[1]
    assert model[0](x).equal(2 * F.linear(x, model[0].weight, model[0].bias))
    assert not {"forward", "__getstate__"} & set(vars(model[2]))


def test_two_recorders_of_one_training_see_the_same(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dualform.record(model, optimizer, tmp_path / "a", on_error="raise") as first,
        dualform.record(model, optimizer, tmp_path / "b", on_error="raise") as second,
    ):
        for step in range(3):
            ids, x, y = batch(step)
            with first.batch(ids), second.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for path in "ab":
        memory = dualform.open(tmp_path / path)
        assert memory.manifest.events(0) == 15
        assert memory.certificate().exact
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_class_that_changes_while_it_is_watched_is_followed() -> None:
    class Negative(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    layer, calls = nn.Linear(3, 2), []
    watching = Watching(layer, lambda *_: calls.append(1))
    x = torch.ones(3)
    plain = layer(x)
    layer.__class__ = Negative
    assert layer(x).equal(-plain)
    watching.remove()
    assert calls == [1, 1]
