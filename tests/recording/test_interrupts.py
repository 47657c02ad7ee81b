"""An interrupt that the user's loop survives, as in a notebook: what is recorded then is right, or recording stops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.memory.arena import Staging
from dualform.recording import routine
from dualform.recording.plain import run_plain
from faults import compiled
from small import batch, network

STEPS, INTERRUPTED = 30, 16
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


class Once:
    """What a function does, and then, one time, an interrupt."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.armed = function, False

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return lambda *arguments: self(instance, *arguments)

    def __call__(self, *arguments: Any) -> Any:
        result = self._function(*arguments)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return result


def train(
    path: Path, make: Make, interrupted: Callable[[torch.optim.Optimizer, dualform.Recorder], None], keep: str = "all"
) -> dualform.Memory:
    """Record a run in which one step is another's."""
    model = network(dtype=torch.float32)
    optimizer = make(model)
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        for step in range(1, STEPS + 1):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            if step == INTERRUPTED:
                interrupted(optimizer, recorder)
            else:
                optimizer.step()
            optimizer.zero_grad()
            if step == 8:
                recorder.commit()
    return dualform.open(path)


def is_true(memory: dualform.Memory) -> None:
    """Every step of a memory has its own events, each once."""
    for step in range(1, memory.steps + 1):
        blocks = memory.blocks(0, memory.steps)
        found = torch.cat([block.examples[block.steps == step] for block in blocks]).tolist()
        assert found == batch(step)[0].tolist(), step


@pytest.mark.parametrize("make, keep", [(sgd, "all"), (adam, "all"), (sgd, "keys")])
def test_steps_lost_as_a_commit_begins_stop_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, keep: str
) -> None:
    turn = Once(Staging.turn)
    monkeypatch.setattr(Staging, "turn", turn)

    def interrupted(optimizer: torch.optim.Optimizer, recorder: dualform.Recorder) -> None:
        optimizer.step()
        turn.armed = True
        with pytest.raises(KeyboardInterrupt):
            recorder.commit()

    memory = train(tmp_path / "run", make, interrupted, keep)
    assert memory.steps == 8
    assert "an interrupt came while a commit began" in str(memory.manifest.failure)
    is_true(memory)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("commit", [False, True])
def test_a_step_that_was_made_and_not_finished_stops_the_recording(tmp_path: Path, make: Make, commit: bool) -> None:
    hook = Once(lambda *_: None)

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        optimizer.register_step_post_hook(hook)  # before ours
        return optimizer

    def interrupted(optimizer: torch.optim.Optimizer, recorder: dualform.Recorder) -> None:
        hook.armed = True
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        if commit:
            recorder.commit()

    memory = train(tmp_path / "run", hooked, interrupted)
    assert memory.steps == 8
    assert "an optimiser's step was interrupted" in str(memory.manifest.failure)
    is_true(memory)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("where", ["sketch", "arrived", "pre-hook"])
def test_a_step_that_is_made_again_has_its_events_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, where: str
) -> None:
    """Interrupted before the optimiser changed anything."""
    compiled(monkeypatch, room=24 << 10)
    hook = Once(lambda *_: None)
    if where != "pre-hook":
        kind = routine.Sketching if where == "sketch" else routine.Taking
        hook = Once(getattr(kind, where))
        monkeypatch.setattr(kind, where, hook)

    def interrupted(optimizer: torch.optim.Optimizer, recorder: dualform.Recorder) -> None:
        if where == "pre-hook":
            optimizer.register_step_pre_hook(hook)
        hook.armed = True
        with pytest.raises(KeyboardInterrupt):
            if where == "arrived":
                recorder.commit()
            optimizer.step()
        optimizer.step()

    memory = train(tmp_path / "run", make, interrupted)
    assert memory.steps == STEPS and memory.manifest.failure is None
    assert not hook.armed
    is_true(memory)
    assert make is adam or memory.certificate().exact


def test_gradients_stay_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Once(torch._C._set_grad_enabled)
    monkeypatch.setattr(torch._C, "_set_grad_enabled", switch)
    switch.armed = True
    with pytest.raises(KeyboardInterrupt):
        run_plain(lambda: None)
    assert torch.is_grad_enabled()


def test_passes_that_make_no_events_make_no_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(monkeypatch, room=24 << 10)

    def segments(path: Path, passes: int) -> int:
        model = network(dtype=torch.float32)
        optimizer = sgd(model)
        with dualform.record(model, optimizer, path, on_error="raise") as recorder:
            for step in range(1, 101):
                ids, x, y = batch(step, dtype=torch.float32)
                with recorder.batch(ids):
                    for _ in range(passes):
                        inputs = x.clone().requires_grad_()
                        torch.autograd.grad(F.cross_entropy(model(inputs), y), inputs)
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return len(dualform.open(path).manifest.segments)

    assert segments(tmp_path / "many", 3) <= 4 * segments(tmp_path / "none", 0)
