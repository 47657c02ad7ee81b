"""The compiled way through the recorder, and stretches of everyday steps: the same memory as by torch, step by step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import dualform
from dualform.errors import BadIds
from dualform.memory import writer
from dualform.memory.ledger import Ledger
from dualform.recording import routine, stepping, stretch, swift
from dualform.recording.recorder import Recorder
from dualform.recording.routine import Ring
from small import batch, network

pytest.importorskip("numba")
STEPS = 140


def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops from the first step on, and an arena after some steps, also for a network as small as this."""
    monkeypatch.setattr(swift, "PAYS", 0)
    monkeypatch.setattr(writer, "COMMIT_BYTES", 64 << 10)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift, "PAYS", 1 << 62)


def one(model: nn.Module, recorder: Recorder, step: int, size: int = 5) -> None:
    ids, x, y = batch(step, size, dtype=torch.float32)
    with recorder.batch(ids):
        F.cross_entropy(model(x), y).backward()


def plain(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)


def clipped(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def accumulated(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    one(model, recorder, 1000 + step)


def sometimes_accumulated(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    if step == 100:
        one(model, recorder, 1000 + step)


def short_batches(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step, 3 if step % 50 == 0 else 5)


def without_ids(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    _, x, y = batch(step, dtype=torch.float32)
    F.cross_entropy(model(x), y).backward()


def positions(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        outputs = model(torch.stack([x, 2 * x, -x], dim=1))
        F.cross_entropy(outputs.mean(dim=1), y).backward()


def frozen_for_a_while(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(not 80 <= step < 100)
    one(model, recorder, step)


def backward_twice(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=step % 3 == 0)
        if step % 3 == 0:
            loss.backward()


def noisy(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    if step in (70, 120):
        model[2].weight.grad += 0.01  # type: ignore[index]


def spoiled(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step, dtype=torch.float32)
    if step == 90:
        x[1, 2] = torch.nan
    with recorder.batch(ids):
        F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(0.0)  # type: ignore[union-attr]


def schedules(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (1 + 0.01 * step + number)
    one(model, recorder, step)


def commits(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    if step in (45, 46, 100):
        recorder.commit()  # between backward pass and step


def same_twice(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step % 7, dtype=torch.float32)
    with recorder.batch(ids):
        F.cross_entropy(model(x), y).backward()


def called_twice(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x + 1), y)).backward()


def emptied(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    if step in (3, 60, 61, 110):
        optimizer.zero_grad()  # a step without any gradient


def beside_func(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step)
    if step in (2, 70):
        _, x, y = batch(step, dtype=torch.float32)
        torch.func.grad(lambda x: F.cross_entropy(model(x), y))(x)


def others_replaced(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """Two optimisers' worth of parameters in turn: now the one layer has gradients, now the other."""
    one(model, recorder, step)
    for parameter in model[2 * (step // 3 % 2)].parameters():  # type: ignore[index]
        parameter.grad = None


def turned(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """The second layer has the positions first, and batches of other shapes have as many rows."""
    examples, length = (4, 4) if step % 2 else (2, 8)
    x = torch.randn(examples, length, 6, generator=torch.Generator().manual_seed(step))
    with recorder.batch(torch.arange(examples) + 10 * (step % 5)):
        model[2:](model[:2](x).transpose(0, 1).contiguous()).square().mean().backward()  # type: ignore[index]


def two_batches(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        hidden = model[:2](x)  # type: ignore[index]
    with recorder.batch(ids + 50):
        F.cross_entropy(model[2:](hidden), y).backward()  # type: ignore[index]


def ids_of_some_layers(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """At one step in the midst of a stretch the ids fit no layer but one that is not trained."""
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids if step != 75 else torch.arange(7)):
        if step == 75:
            model[0](torch.ones(7, 6))  # type: ignore[index]
        F.cross_entropy(model(x), y).backward()


def looks_aside(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """The last call within a batch is of something else, which no ids fit."""
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        F.cross_entropy(model(x), y).backward()
        model[0](torch.ones(3, 6))  # type: ignore[index]


def alternating(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    one(model, recorder, step, 3 + step % 3)


def strided(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """Inputs that do not lie row by row."""
    ids, x, y = batch(step, dtype=torch.float32)
    if step % 20 == 19:
        x = torch.stack([x, x + 5], dim=2)[:, :, 0] if step % 40 == 19 else x.t().contiguous().t()
    with recorder.batch(ids):
        F.cross_entropy(model(x), y).backward()


def expanded(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """Gradients that are one number for all."""
    ids, x, y = batch(step, dtype=torch.float32)
    with recorder.batch(ids):
        outputs = model[:3](x)  # type: ignore[index]
        (0.1 * outputs.sum() if step % 20 == 19 else F.cross_entropy(outputs, y)).backward()


def transposed(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
    """The gradient of a weight comes to lie column by column."""
    one(model, recorder, step)
    if step % 20 == 19:
        weight = model[0].weight  # type: ignore[index]
        weight.grad = weight.grad.t().contiguous().t()


Loop = Callable[[nn.Module, Any, Recorder, int], None]
LOOPS: list[Loop] = [
    plain, clipped, accumulated, sometimes_accumulated, short_batches, without_ids, positions, frozen_for_a_while,
    backward_twice, noisy, spoiled, schedules, commits, same_twice, called_twice, emptied, beside_func, others_replaced,
    turned, two_batches, ids_of_some_layers, looks_aside, alternating, strided,
    expanded, transposed,
]  # fmt: skip


def record(path: Path, loop: Loop, keep: str = "all", optimizers: int = 1) -> tuple[nn.Module, dualform.Memory]:
    model = network(dtype=torch.float32).append(nn.LayerNorm(4))  # stored as it is, after every step
    if optimizers == 2:
        made = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[0], model[2:])]
    else:
        groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
        made = [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]
    with dualform.record(model, made, path, keep=keep, on_error="raise") as recorder:
        for step in range(1, STEPS + 1):
            loop(model, made[0], recorder, step)
            for optimizer in made:
                optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()
    return model, dualform.open(path)


def assert_same(ours: dualform.Memory, theirs: dualform.Memory) -> None:
    """Everything but the last bits of what was summed in another order."""
    assert ours.steps == theirs.steps
    for name in ("flags", "optimizers"):
        assert (getattr(ours.journal, name) == getattr(theirs.journal, name)).all(), name
    assert np.allclose(ours.journal.settings, theirs.journal.settings, rtol=0, atol=1e-5)
    (numbers, scales), (other_numbers, other_scales) = ours.journal._passes, theirs.journal._passes
    assert (numbers == other_numbers).all()
    assert np.allclose(scales, other_scales, rtol=1e-6, atol=0, equal_nan=True)
    kept = [(f.parameter, f.kind, f.since, f.step, f.count) for f in ours.manifest.findings]
    assert kept == [(f.parameter, f.kind, f.since, f.step, f.count) for f in theirs.manifest.findings]
    assert ours.manifest.nonfinite == theirs.manifest.nonfinite
    assert sorted(ours.manifest.told) == sorted(theirs.manifest.told)
    assert len(ours.manifest.every_step) == 2
    for name in ours.manifest.every_step:
        mine, other = (stored(memory, f"other/{name}") for memory in (ours, theirs))
        assert len(mine) == ours.steps and torch.equal(mine.nan_to_num(7.7), other.nan_to_num(7.7)), name
    for weight in range(len(ours.manifest.weights)):
        for name in ("keys", "gradients", "events", "steps", "backwards", "examples", "positions", "uses"):
            mine, other = (joined(memory, weight, name) for memory in (ours, theirs))
            assert mine is other is None or torch.equal(mine.nan_to_num(7.7), other.nan_to_num(7.7)), name


def stored(memory: dualform.Memory, name: str) -> Tensor:
    return torch.cat([load_file(memory.path / one.file.file)[name] for one in memory.manifest.segments])


def joined(memory: dualform.Memory, weight: int, name: str) -> Tensor | None:
    parts = [getattr(block, name) for block in memory.blocks(weight, memory.steps)]
    return None if parts[0] is None else torch.cat(parts)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the loops below, with their odd steps, have several."""
    for module in (stepping, routine):
        monkeypatch.setattr(module, "AT_A_TIME", 32)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps every stretch had that was judged at once."""
    found: list[int] = []
    judge = stretch.Stretch.judge

    def note(self: stretch.Stretch, loops: Any) -> Any:
        result = judge(self, loops)
        found.append(len(self.steps) if result is not None else -len(self.steps))
        return result

    monkeypatch.setattr(stretch.Stretch, "judge", note)
    return found


@pytest.mark.parametrize("keep", ["all", "keys"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_compiled_way_makes_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, keep: str, judged: list[int]
) -> None:
    with monkeypatch.context() as patch:
        by_torch(patch)
        patch.setattr(stepping, "CALM", 10**9)
        model, theirs = record(tmp_path / "torch", loop, keep)
    assert judged == []
    compiled(monkeypatch)
    our_model, ours = record(tmp_path / "ours", loop, keep)
    assert all(map(torch.equal, our_model.parameters(), model.parameters())), "training is the same bit for bit"
    assert_same(ours, theirs)
    assert ours.certificate().exact == theirs.certificate().exact
    if loop in (plain, clipped, schedules, without_ids, positions, same_twice):
        assert stepping.AT_A_TIME in judged, "calm steps are judged in stretches"


def test_a_stretch_has_sixty_four_steps_from_the_first_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[int]
) -> None:
    compiled(monkeypatch)
    monkeypatch.setattr(writer, "COMMIT_BYTES", 256 << 10)
    for module in (stepping, routine):
        monkeypatch.setattr(module, "AT_A_TIME", 64)
    _, memory = record(tmp_path / "run", plain)
    assert judged[0] == 64 and sum(judged) == STEPS - stepping.CALM
    assert memory.certificate().exact


class Swapping(nn.Module):
    """Two layers of one shape that change places now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, second = (self.one, self.two) if self.calls % 20 else (self.two, self.one)
        return second(torch.relu(first(x)))


def test_layers_of_one_shape_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(monkeypatch)
    model = Swapping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, STEPS + 1):
            one(model, recorder, step)
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run").certificate().exact


@pytest.mark.parametrize("again", [False, True])
def test_ids_that_fit_no_layer_are_told_in_the_midst_of_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Also where the batch was entered before, and fitted then."""
    compiled(monkeypatch)
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 60):
            one(model, recorder, step)
            optimizer.step()
            optimizer.zero_grad()
        ids, x, y = batch(60, dtype=torch.float32)
        given = recorder.batch(ids)
        if again:
            with given:
                F.cross_entropy(model(x), y).backward()
        with pytest.raises(BadIds, match="fit no recorded layer"), given:
            model(x[:3]).sum().backward()


def test_a_stretch_is_as_long_as_there_is_room_for_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[int]
) -> None:
    compiled(monkeypatch)
    monkeypatch.setattr(routine, "RING", 10 * 280)  # the two layers have 68 numbers a step
    _, memory = record(tmp_path / "run", plain)
    assert judged.count(10) >= 8 and max(judged) == 10
    assert memory.certificate().exact


@pytest.mark.parametrize("width", [80, 63])  # hashed while they are copied, and too short for that
def test_repeated_keys_are_found_the_compiled_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    inputs = torch.randn(30, width, generator=torch.Generator().manual_seed(1))
    hashed: list[bool] = []
    enter = Ledger.enter

    def note(self: Ledger, keys: Any, examples: Any, positions: Any, hashes: Any = None) -> Any:
        hashed.append(any(each is not None for each in hashes or ()))
        return enter(self, keys, examples, positions, hashes)

    def go(path: Path) -> tuple[dualform.Memory, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        expected, last = 0, {}
        with dualform.record(model, optimizer, path, on_error="raise") as recorder:
            for step in range(STEPS):
                ids = torch.randint(30, (6 if step % 40 == 20 else 8,), generator=torch.Generator().manual_seed(step))
                changed = (ids == 3) & (step > 60)  # one example is another one from then on
                x = inputs[ids] + changed[:, None]
                for example, other in zip(ids.tolist(), changed.tolist(), strict=True):
                    expected += last.get(example) != other
                    last[example] = other
                with recorder.batch(ids):
                    F.cross_entropy(model(x), ids % 4).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 50 == 49:
                    recorder.commit()
        return dualform.open(path), expected

    monkeypatch.setattr(Ledger, "enter", note)
    with monkeypatch.context() as patch:
        by_torch(patch)
        theirs, expected = go(tmp_path / "torch")
    assert hashed and not any(hashed)
    compiled(monkeypatch)
    ours, _ = go(tmp_path / "ours")
    assert any(hashed) is (width == 80)
    for memory in (ours, theirs):
        assert sum(segment.keys[0] for segment in memory.manifest.segments) == expected
        assert memory.verify().ok and memory.certificate().exact
    for name in ("keys", "gradients", "examples", "steps"):
        mine, other = joined(ours, 0, name), joined(theirs, 0, name)
        assert mine is not None and other is not None and mine.equal(other), name


@pytest.mark.parametrize("way", [compiled, by_torch])
def test_inputs_are_not_held_until_the_batch_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None]
) -> None:
    way(monkeypatch)
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[bool] = []
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(8):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                hidden = model[:2](x)
                seen = weakref.ref(hidden)
                loss = F.cross_entropy(model[2](hidden), y)
                loss.backward()
                del hidden, loss
                alive.append(seen() is not None)
            optimizer.step()
            optimizer.zero_grad()
    assert not any(alive)


def test_a_weight_that_changes_its_shape_stops_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(monkeypatch)
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(60):
            if step == 50:  # pruned
                model[0].weight.data, model[0].bias.data = model[0].weight.data[:6].clone(), model[0].bias.data[:6]
                model[2].weight.data = model[2].weight.data[:, :6].clone()
                optimizer.zero_grad()
            one(model, recorder, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 39:
                recorder.commit()
    assert "2.weight has the shape [4, 6] now and had [4, 8] when recording began" in caplog.text
    assert dualform.open(tmp_path / "run").steps == 40


def test_two_optimisers_make_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        by_torch(patch)
        patch.setattr(stepping, "CALM", 10**9)
        _, theirs = record(tmp_path / "torch", clipped, optimizers=2)
    compiled(monkeypatch)
    _, ours = record(tmp_path / "ours", clipped, optimizers=2)
    assert_same(ours, theirs)
    assert ours.certificate().exact


def fail(optimizer: torch.optim.Optimizer) -> None:
    """A step that raises before it has changed anything."""
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    hook.remove()


def test_a_step_that_fails_keeps_its_events_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure or a hook of the user's may raise inside step(); the gradients are still there afterwards."""

    def failing(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
        one(model, recorder, step)
        if step == 90:
            fail(optimizer)

    compiled(monkeypatch)
    _, memory = record(tmp_path / "run", failing)
    assert memory.certificate().exact
    assert all(segment.events[0] for segment in memory.manifest.segments)
    assert sum(segment.events[0] for segment in memory.manifest.segments) == 5 * STEPS


def test_a_failed_step_keeps_its_events_through_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena in which its rows are is used for others after a commit."""

    def failing(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
        one(model, recorder, step)
        if step == 90:
            fail(optimizer)
            recorder._between_steps = True  # as if the user's code had mended it
            recorder.commit()
            recorder.commit()
            for other in range(60):
                ids, x, y = batch(other, dtype=torch.float32)
                with recorder.batch(ids):
                    torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    compiled(monkeypatch)
    _, memory = record(tmp_path / "run", failing)
    assert memory.certificate().exact
    assert sum(segment.events[0] for segment in memory.manifest.segments) == 5 * STEPS


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("where", ["of", "judge", "rows"])
def test_an_interrupt_while_steps_are_worked_out_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, again: bool
) -> None:
    """Whether the run ends there, or goes on."""
    compiled(monkeypatch)
    _, theirs = record(tmp_path / "whole", plain)
    made: list[int] = []

    def interrupted(model: nn.Module, optimizer: Any, recorder: Recorder, step: int) -> None:
        one(model, recorder, step)
        made.append(step)

    def train(recorder: Recorder, model: nn.Module, optimizer: Any) -> None:
        while len(made) < STEPS:
            interrupted(model, optimizer, recorder, len(made) + 1)
            optimizer.step()
            optimizer.zero_grad()

    our_model = network(dtype=torch.float32).append(nn.LayerNorm(4))
    groups = [{"params": our_model[0].parameters()}, {"params": our_model[2:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    with suppress(KeyboardInterrupt), dualform.record(our_model, optimizer, tmp_path / "run") as recorder:
        while len(made) < 90:
            interrupted(our_model, optimizer, recorder, len(made) + 1)
            try:
                if len(made) > 60 and not again:
                    optimizer.step()
                else:
                    with monkeypatch.context() as patch:
                        if len(made) > 60:
                            patch.setattr(stretch.Stretch, where, interrupt)
                        optimizer.step()
            except KeyboardInterrupt:
                pass
            optimizer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(stretch.Stretch, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                recorder.commit()
        if again:
            train(recorder, our_model, optimizer)
        else:
            raise KeyboardInterrupt
    ours = dualform.open(tmp_path / "run")
    assert ours.manifest.failure is None
    assert ours.certificate().exact
    assert ours.steps == (STEPS if again else 90)
    for name in ("keys", "gradients", "examples", "steps"):
        mine = torch.cat([getattr(block, name) for block in ours.blocks(0, ours.steps)])
        other = torch.cat([getattr(block, name) for block in theirs.blocks(0, ours.steps)])
        assert torch.equal(mine, other), name


def test_steps_that_an_interrupt_lost_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled(monkeypatch)
    with (
        pytest.raises(dualform.errors.RecordingFailed, match="some of them are lost"),
        dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder,
    ):
        for step in range(1, 61):
            one(model, recorder, step)
            if step == 40:
                recorder.commit()
            optimizer.step()
            optimizer.zero_grad()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(writer.Writer, "append", interrupt)
            recorder.commit()
        recorder.commit()
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 39 and "some of them are lost" in str(memory.manifest.failure)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_stretch_in_doubt_is_judged_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[int]
) -> None:
    compiled(monkeypatch)
    _, memory = record(tmp_path / "run", noisy)
    assert any(steps < 0 for steps in judged), "the stretch with the noise was refused"
    assert [(f.parameter, f.step) for f in memory.manifest.findings] == [("2.weight", 70)]
    assert memory.manifest.findings[0].count == 2


def test_room_for_results_is_used_again_when_nobody_looks_at_it() -> None:
    ring = Ring(100)
    ring.next()
    address, view = ring.results.ctypes.data, ring.results[3:5, 10:20][0]
    ring.begin()
    ring.next()
    other = ring.results.ctypes.data
    assert other != address, "somebody still looks at a part of it"
    assert view.shape == (10,)
    del view
    ring.begin()
    ring.next()
    ring.begin()
    ring.next()
    assert ring.results.ctypes.data in (address, other)


@pytest.mark.parametrize("loop, odd", [(plain, 0), (sometimes_accumulated, 1), (short_batches, 2)])
def test_an_odd_step_is_judged_on_its_own_and_those_around_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, odd: int, judged: list[int]
) -> None:
    compiled(monkeypatch)
    for module in (stepping, routine):
        monkeypatch.setattr(module, "AT_A_TIME", 64)
    singly: list[int] = []
    judge = stepping.Stepping._judge
    monkeypatch.setattr(
        stepping.Stepping, "_judge", lambda self, step, late: singly.append(self.steps) or judge(self, step, late)
    )
    record(tmp_path / "run", loop, "keys")
    assert len(singly) == stepping.CALM + odd
    assert sum(judged) == STEPS - len(singly)
