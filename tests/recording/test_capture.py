"""Events are what really reached a weight: hooks in every kind of loop, and nothing left behind."""

import copy
import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import BadCall
from dualform.memory import writer
from dualform.recording import stepping
from faults import compiled
from small import batch, network, run


def events(memory: dualform.Memory, weight: int = 0) -> list[tuple[int, int, int, int]]:
    """(step, backward, example, use) of every event of a weight."""
    rows = []
    for block in memory.blocks(weight, memory.steps):
        columns = zip(block.steps, block.backwards, block.examples, block.uses, strict=True)
        rows += [tuple(int(value) for value in row) for row in columns]
    return rows


def hooks_of(model: nn.Module) -> int:
    """How many hooks are on a model's modules and parameters."""
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_events_carry_step_example_and_order(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", steps=3)
    expected = [(step, step - 1, int(i), 0) for step in (1, 2, 3) for i in batch(step)[0]]
    assert events(memory) == expected


def test_keys_and_gradients_are_what_flowed(tmp_path: Path) -> None:
    model = network()
    x, y = batch(1)[1:]
    outputs = {}
    model[0].register_forward_hook(lambda m, i, o: (o.retain_grad(), outputs.update(o=o))[0])
    _, memory = run(tmp_path / "run", model, steps=1)
    (block,) = memory.blocks(0, 1)
    assert block.keys.equal(x)
    model = network()
    hidden = model[0](x)
    hidden.retain_grad()
    F.cross_entropy(model[2](torch.relu(hidden)), y).backward()
    assert block.gradients.equal(hidden.grad)


def test_evaluation_autograd_grad_and_unused_forwards_leave_no_event(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        ids, x, y = batch(1)
        with torch.no_grad():
            model(x)
        model(x)
        x.requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with recorder.batch(ids):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert len(events(memory)) == 5
    assert memory.certificate().exact


def test_pending_rows_of_autograd_grad_are_let_go(tmp_path: Path) -> None:
    model = network()
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run") as recorder:
        for _ in range(3):
            x = batch(1)[1].requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        assert recorder._capture.open == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_exact(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.head = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return self.head(checkpoint(self.inner, x, use_reentrant=reentrant))

    _, memory = run(tmp_path / "run", Checkpointed())
    assert memory.certificate().exact
    assert [memory.manifest.events(w) for w in range(3)] == [30, 30, 30]


def test_a_frozen_layer_makes_no_events_until_it_is_thawed(tmp_path: Path) -> None:
    model = network()
    model[0].requires_grad_(False)

    def thaw(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].requires_grad_(True)

    _, memory = run(tmp_path / "run", model, after_step=thaw)
    assert {step for step, *_ in events(memory)} == {4, 5, 6}
    assert memory.certificate().exact


def test_a_bias_trained_on_a_frozen_weight_is_exact(tmp_path: Path) -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    _, memory = run(tmp_path / "run", model)
    assert memory.certificate().exact
    x = batch(9)[1]
    output = memory.attend(model, x)["0"].output()
    assert (output - model[0](x)).abs().max() < 1e-12


def test_a_group_added_in_mid_training_is_followed(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def add(model: nn.Module, step: int) -> None:
        if step == 2:
            model[0].zero_grad()
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    _, memory = run(tmp_path / "run", model, optimizer, after_step=add)
    assert {step for step, *_ in events(memory)} == {3, 4, 5, 6}
    assert memory.certificate().exact


def test_gradients_of_a_weight_no_recorded_optimiser_steps_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    _, memory = run(tmp_path / "run", model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert memory.manifest.events(0) == 0
    assert "0.weight gets gradients, but no recorded optimiser steps it" in caplog.text


def test_an_optimiser_that_steps_inside_backward_is_exact(tmp_path: Path) -> None:
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with dualform.record(model, list(optimizers.values()), tmp_path / "run", on_error="raise") as recorder:
        for at in range(4):
            ids, x, y = batch(at)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 16
    assert memory.certificate().exact


def test_a_fused_optimiser_with_a_loss_scaler_is_exact(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(6):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                scaler.scale(F.cross_entropy(model(x), y) * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.nonfinite > 0
    assert memory.certificate().exact
    assert memory.attend(model, x)["2"].output().isfinite().all()


def test_a_skipped_step_drops_its_pass(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(6):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                (F.cross_entropy(model(x), y) * (float("nan") if step == 3 else 1.0)).backward()
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 5
    assert memory.certificate().exact


def test_an_input_changed_in_place_is_told_and_then_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.layer(x)
            x += 1.0
            return y.float()

    torch.manual_seed(0)
    model = Careless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(3):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert "layer: its input was changed in place between forward and backward" in caplog.text
    assert [finding.step for finding in memory.manifest.findings] == [1]
    truth = batch(2, dtype=torch.float32)[1].bfloat16()
    assert next(memory.blocks(0, 3)).keys[-5:].equal(truth)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("compiled_first", [False, True])
def test_torch_compile_is_exact_after_start_and_told_before(tmp_path: Path, compiled_first: bool) -> None:
    torch._dynamo.reset()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    if compiled_first:
        compiled(batch(0)[1])
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(2):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(compiled(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = dualform.open(tmp_path / "run").certificate()
    if compiled_first:
        assert all("there was a gradient at step 1, but no event" in row.reason for row in certificate)
    else:
        assert certificate.exact


def test_a_copy_or_a_pickle_of_the_model_records_nothing(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        average = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        ids, x, y = batch(1)
        with recorder.batch(ids):
            average(x).sum().backward()
            loaded(x).sum().backward()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run").manifest.events(0) == 5


def test_every_hook_is_taken_off_at_the_end_and_after_an_exception(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "a"):
        assert hooks_of(model) == 6
    assert hooks_of(model) == 0
    with pytest.raises(KeyboardInterrupt), dualform.record(model, optimizer, tmp_path / "b") as recorder:
        ids, x, y = batch(1)
        with recorder.batch(ids):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        raise KeyboardInterrupt
    assert hooks_of(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert dualform.open(tmp_path / "b").steps == 1


def test_start_and_close_work_without_a_with_block(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = dualform.record(model, optimizer, tmp_path / "run").start()
    model(batch(1)[1]).sum().backward()
    optimizer.step()
    recorder.commit()
    assert dualform.open(tmp_path / "run").steps == 1
    recorder.close()
    recorder.close()
    assert dualform.open(tmp_path / "run").manifest.final is not None


def test_the_global_random_state_is_untouched(tmp_path: Path) -> None:
    model = network()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(tmp_path / "run", model)
    assert torch.get_rng_state().equal(before)


def test_a_failure_inside_the_recorder_never_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain, _ = run(tmp_path / "plain", network(), steps=4)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 5):
            if step == 3:
                recorder.commit()
                monkeypatch.setattr(recorder._stepping, "finish", lambda *_: 1 / 0)
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight.equal(plain[0].weight)
    assert hooks_of(model) == 0
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 2
    assert "ZeroDivisionError" in memory.manifest.failure
    assert "valid up to step 2" in caplog.text
    assert memory.certificate().exact
    assert "recording stopped after step 2" in repr(memory.certificate())


def test_a_disk_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = run(tmp_path / "plain", network(), steps=6)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    write = writer.write_tensors

    def full(root: Path, file: str, tensors: object, **options: Any) -> object:
        if file.endswith("000002.safetensors"):
            raise OSError(28, "No space left on device")
        return write(root, file, tensors, **options)

    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)
    monkeypatch.setattr(writer, "write_tensors", full)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 7):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight.equal(plain[0].weight)
    assert hooks_of(model) == 0
    assert caplog.text.count("No space left on device. Training goes on unrecorded") == 1
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 2
    assert "No space left on device" in memory.manifest.failure
    assert memory.certificate().exact
    assert memory.verify().ok


def test_on_error_raise_stops_the_training_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(dualform.errors.RecordingFailed, match="recording stopped after step 0"),
        dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder,
    ):
        monkeypatch.setattr(recorder._stepping, "prepare", lambda index: 1 / 0)
        model(batch(1)[1]).sum().backward()
        optimizer.step()


def test_layers_chooses_by_glob_or_predicate(tmp_path: Path) -> None:
    choices = {"glob": "2", "globs": ["1", "2"], "function": lambda name, module: module.out_features == 4}
    for name, layers in choices.items():
        _, memory = run(tmp_path / name, layers=layers)
        assert [weight.name for weight in memory.manifest.weights] == ["2.weight"]
        assert memory.certificate().exact


def test_a_parametrised_weight_is_not_recorded_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    _, memory = run(tmp_path / "run", model)
    assert [weight.name for weight in memory.manifest.weights] == ["2.weight"]
    assert "0: its weight or bias is parametrised" in caplog.text
    assert memory.certificate().exact


def test_the_first_step_says_how_many_bytes_recording_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dualform")
    run(tmp_path / "run", steps=1)
    assert "the first step took" in caplog.text
    assert "GB are free" in caplog.text


class Stopped(torch.autograd.Function):
    """Lets nothing flow back: autograd then hands None to the hooks before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def test_a_layer_to_which_nothing_flows_back_has_no_events(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for _ in range(3):
            x = torch.randn(5, 3)
            with recorder.batch(torch.arange(5)):
                (model["b"](x).sum() + Stopped.apply(model["a"](x)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    assert [sum(segment.events[at] for segment in memory.manifest.segments) for at in (0, 1)] == [0, 15]


def give_back(tensor: Tensor, *_: Any) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("way", ["by torch", "compiled"])
def test_an_input_whose_memory_is_given_back_is_told_and_then_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """As where activations are offloaded or made again: read by its address, it would end the process."""
    if way == "compiled":
        compiled(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 7):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                hidden = torch.relu(model[0](x)) + 0  # whose last reader is the backward pass of the next layer
                output = model[2](torch.relu(model[1](hidden)))
                given = model[1].weight.register_post_accumulate_grad_hook(partial(give_back, hidden))
                if step < 3:
                    given.remove()
                F.cross_entropy(output, y).backward()
                given.remove()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert caplog.text.count("1: the memory of its input or its gradient was given back") == 1
    assert memory.steps == 6
    assert [step for step, *_ in events(memory, 1)] == [1] * 5 + [2] * 5 + [4] * 5 + [5] * 5 + [6] * 5
    assert [step for step, *_ in events(memory, 0)] == [step for step in range(1, 7) for _ in range(5)]
    assert [(f.parameter, f.step, f.count) for f in memory.manifest.findings] == [("1.weight", 3, 1), ("1.bias", 3, 1)]


def test_inference_tensors_are_recorded_as_inputs(tmp_path: Path) -> None:
    """They keep no version; features of a frozen model may be such, where only a bias is trained on them."""
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 4):
            ids, x, y = batch(step)
            with torch.inference_mode():
                x = x * 1
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    keys = torch.cat([block.keys for block in memory.blocks(0, 3)])
    assert keys.equal(torch.cat([batch(step)[1] for step in (1, 2, 3)]))


def test_a_layer_called_beside_a_vmap_is_recorded(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 4):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                scaled = torch.vmap(lambda a, x=x, y=y: a * F.cross_entropy(model(x), y))
                scaled(torch.tensor([0.2, 0.3])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert len(events(memory)) == 15
    assert memory.certificate().exact


def test_weights_used_past_their_modules_leave_nothing_behind(tmp_path: Path) -> None:
    """And what they took is not taken for events of a pass that follows."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 4):
            ids, x, y = batch(step)
            hidden = torch.relu(F.linear(x, model[0].weight, model[0].bias))
            F.cross_entropy(F.linear(hidden, model[2].weight, model[2].bias), y).backward()
            with recorder.batch(ids):
                torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            F.linear(x, model[0].weight, model[0].bias).square().mean().backward()
            assert recorder._capture._accumulated
            optimizer.step()
            optimizer.zero_grad()
            assert recorder._capture._accumulated == []
    assert events(dualform.open(tmp_path / "run")) == []


def test_a_hook_that_is_there_before_ours_stays(tmp_path: Path) -> None:
    """One that is registered for all modules comes before those of a module."""
    model, seen = network(), []

    def first(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(gradient.shape))

    handle = nn.modules.module.register_module_forward_hook(first)
    try:
        _, memory = run(tmp_path / "run", model, steps=3)
    finally:
        handle.remove()
    assert len(seen) == 12  # of three layers and the model
    assert memory.certificate().exact


def test_an_interrupt_as_a_batch_begins_is_not_in_the_way_of_the_next(
    tmp_path: Path,
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        recorder._capture.batch = recorder.batch(batch(1)[0])  # as such an interrupt leaves it
        with pytest.raises(BadCall, match="already open"), recorder.batch(batch(1)[0]):
            pass
        ids, x, y = batch(1)
        with recorder.batch(ids):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run").certificate().exact


def test_steps_that_wait_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows gather in no arena."""
    compiled(monkeypatch)
    monkeypatch.setattr(writer, "LARGEST_ARENA", 0)
    monkeypatch.setattr(stepping, "OUTSIDE", 20_000)
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = 0
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 200):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            most = max(most, len(recorder._stepping._pending))
    assert 30 < most <= 20_000 / (5 * (6 + 8 + 8 + 4) * 4)
    assert dualform.open(tmp_path / "run").certificate().exact
