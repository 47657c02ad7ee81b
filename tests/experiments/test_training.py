"""The training loop: the plainest one, and the same one when it goes on at a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import dualform
import tiny
from dualform.experiments import training
from dualform.experiments.training import accuracy, answers, batches, keep, restore, train

STEPS = 20


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return tiny.ONE.model()


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)


def ids() -> list[torch.Tensor]:
    return list(tiny.EXPERIMENTS["single"].batches(tiny.twin("single").data.train, 0))[:STEPS]


def test_recorded_training_is_the_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    model, twin = network(), tiny.twin("single")
    train(model, tiny.ONE, twin.data, tmp_path / "run", ids())
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.weights[STEPS][name]), name
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.recipe == "tiny"
    assert set(memory.columns) == {"label", "image"}
    assert torch.equal(memory.column("label").values.long(), twin.data.train.labels)
    assert memory.certificate().exact


def test_of_several_tasks_the_memory_knows_each_examples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, twin = tiny.TWO.model(), tiny.twin("joint")
    chosen = list(tiny.EXPERIMENTS["joint"].batches(twin.data.train, 0))[:2]
    train(model, tiny.TWO, twin.data, tmp_path / "run", chosen)
    column = dualform.open(tmp_path / "run").column("task")
    names = [column.categories[value] for value in column.values.tolist()]
    assert names == [("upright", "turned")[task] for task in twin.data.train.tasks.tolist()]


def test_a_checkpoint_is_the_state_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 8)
    model, twin, file = network(), tiny.twin("single"), tmp_path / "checkpoint.safetensors"
    train(model, tiny.ONE, twin.data, tmp_path / "run", ids(), checkpoint=file)
    other = network(1)
    optimizer = optimizer_of(other)
    assert restore(file, other, optimizer) == 16
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, twin.weights[16][name])
        # torch's momentum: the last change of the weight is −lr times the velocity.
        moved = (twin.weights[16][name].double() - twin.weights[15][name].double()) / -3e-3
        velocity = optimizer.state[parameter]["momentum_buffer"].double()
        torch.testing.assert_close(velocity, moved, rtol=1e-3, atol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "checkpoint.safetensors"}


@pytest.mark.parametrize("stop", [8, 12, 16, 19])
def test_going_on_at_a_checkpoint_changes_nothing(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 8)
    twin, file, calls = tiny.twin("single"), tmp_path / "checkpoint.safetensors", [0]
    clip = nn.utils.clip_grad_norm_

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if calls[0] == stop:
            raise KeyboardInterrupt
        calls[0] += 1
        return clip(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(network(), tiny.ONE, twin.data, tmp_path / "run", ids(), checkpoint=file)
    assert dualform.open(tmp_path / "run").steps == stop
    again = network(5)  # whatever its weights are: those of the checkpoint are put in
    train(again, tiny.ONE, twin.data, tmp_path / "run", ids(), checkpoint=file)
    for name, value in again.state_dict().items():
        assert torch.equal(value, twin.weights[STEPS][name]), name
    memory = dualform.open(tmp_path / "run")
    assert (memory.steps, memory.manifest.events(0)) == (STEPS, 128 * STEPS)
    assert memory.certificate().exact


def test_a_checkpoint_without_its_memory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 8)
    twin, file = tiny.twin("single"), tmp_path / "checkpoint.safetensors"
    train(network(), tiny.ONE, twin.data, tmp_path / "run", ids(), checkpoint=file)
    model = network()
    train(model, tiny.ONE, twin.data, tmp_path / "other", ids(), checkpoint=file)
    assert dualform.open(tmp_path / "other").manifest.events(0) == 128 * STEPS
    assert all(torch.equal(value, twin.weights[STEPS][name]) for name, value in model.state_dict().items())


def test_without_a_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of(model)
    for content in (None, b"", b"no checkpoint"):
        if content is not None:
            (tmp_path / "checkpoint").write_bytes(content)
        assert restore(tmp_path / "checkpoint", model, optimizer) == 0
        assert not optimizer.state
        assert all(torch.equal(value, network().state_dict()[name]) for name, value in model.state_dict().items())


def test_an_interrupted_checkpoint_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    model = network()
    optimizer = optimizer_of(model)
    model(torch.zeros(2, 8, 8)).sum().backward()
    optimizer.step()
    file = tmp_path / "checkpoint.safetensors"
    keep(file, model, optimizer, 1)
    first = file.read_bytes()
    monkeypatch.setattr(training.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keep(file, model, optimizer, 2)
    assert file.read_bytes() == first
    with safe_open(file, "pt") as stored:
        assert stored.metadata() == {"step": "1"}


def test_answers_and_accuracy_are_the_models() -> None:
    twin = tiny.twin("joint")
    expected = []
    for task, image in zip(twin.data.test.tasks.tolist(), twin.data.test.images, strict=True):
        chosen = tiny.TWO.tasks[task]
        pixels = (image.double() - chosen.mean) / chosen.std
        hidden = pixels.flatten()
        for layer in ("fc0", "fc1"):
            weight, bias = (twin.weights[-1][f"{layer}.{part}"].double() for part in ("weight", "bias"))
            hidden = (weight @ hidden + bias).clamp(min=0)
        expected.append(
            int((twin.weights[-1]["fc2.weight"].double() @ hidden + twin.weights[-1]["fc2.bias"].double()).argmax())
        )
    assert answers(twin.model, tiny.TWO, twin.data.test).tolist() == expected
    hits = [one == label for one, label in zip(expected, twin.data.test.labels.tolist(), strict=True)]
    assert accuracy(twin.model, tiny.TWO, twin.data.test) == pytest.approx(sum(hits) / len(hits), rel=1e-12)
    for task in (0, 1):
        mine = [hit for hit, of in zip(hits, twin.data.test.tasks.tolist(), strict=True) if of == task]
        assert accuracy(twin.model, tiny.TWO, twin.data.test.of(task)) == pytest.approx(sum(mine) / len(mine))


@pytest.mark.parametrize("first", [0, 1000])
def test_batches_of_a_range_of_examples(first: int) -> None:
    found = list(batches(300, 5, seed=1, first=first))
    plain = list(batches(300, 5, seed=1))
    assert all(torch.equal(one, other + first) for one, other in zip(found, plain, strict=True))
    everything = torch.cat(found)
    assert first <= int(everything.min()) and int(everything.max()) < first + 300
    for epoch in (found[0:2], found[2:4]):
        assert len(torch.cat(epoch).unique()) == 256
    assert not torch.equal(torch.cat(list(batches(300, 5, seed=2, first=first))), everything)
