"""A memory on disk: several segments read as one, columns, time travel, and what a commit holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.memory import writer
from dualform.memory.files import tensor_hash
from small import batch, network, run


@pytest.fixture
def one_segment_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)


def columns(memory: dualform.Memory) -> dict[str, torch.Tensor]:
    blocks = list(memory.blocks(0, memory.steps, rows=3))
    names = ["keys", "gradients", "events", "steps", "backwards", "examples", "positions", "uses"]
    return {name: torch.cat([getattr(block, name) for block in blocks]) for name in names}


def test_segments_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = run(tmp_path / "whole")
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)
    _, split = run(tmp_path / "split")
    assert len(whole.manifest.segments) == 1
    assert len(split.manifest.segments) == 6
    for name, values in columns(whole).items():
        assert values.equal(columns(split)[name]), name
    assert columns(split)["events"].tolist() == list(range(30))
    assert np.array_equal(whole.journal.settings, split.journal.settings)
    assert np.array_equal(whole.journal.digests, split.journal.digests)
    assert split.certificate().exact
    for step in range(7):
        for name, tensor in whole.weights(until=step).items():
            assert (tensor - split.weights(until=step)[name]).abs().max() < 1e-14


def test_a_commit_holds_the_sketch_and_the_hash_of_every_weight(tmp_path: Path, one_segment_a_step: None) -> None:
    saved = []
    _, memory = run(tmp_path / "run", after_step=lambda model, step: saved.append(model[0].weight.detach().clone()))
    for step, weight in enumerate(saved, start=1):
        assert (memory.sketch(0, step) - weight @ memory.probe(0)).abs().max() < 1e-14
        assert int(memory._segments[step - 1].read("hashes")[0]) == tensor_hash(weight)


def test_two_equal_runs_have_equal_digests_and_a_different_one_differs_at_its_step(tmp_path: Path) -> None:
    def disturb(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].weight.data[0, 0] += 1e-9

    _, first = run(tmp_path / "first")
    _, second = run(tmp_path / "second")
    _, third = run(tmp_path / "third", after_step=disturb)
    assert np.array_equal(first.journal.digests, second.journal.digests)
    same = (first.journal.digests == third.journal.digests).all(axis=1)
    assert same.tolist() == [True, True, True, False, False, False]


def test_opening_while_recording_sees_the_last_commit(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(1, 5):
            ids, x, y = batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                recorder.commit()
        memory = dualform.open(tmp_path / "run")
        assert memory.steps == 2
        assert memory.certificate().exact
        assert memory.verify().ok
        assert "not closed" in repr(memory)
    assert memory.steps == 2
    assert dualform.open(tmp_path / "run").steps == 4


def test_columns_keep_their_kind_and_are_added_later(tmp_path: Path) -> None:
    given = {
        "label": np.arange(20) % 4,
        "name": [f"ü{i % 3}<b>" for i in range(20)],
        "weight": np.linspace(0, 1, 20),
        "image": torch.randint(0, 255, (20, 2, 2), dtype=torch.uint8),
        "flag": np.arange(20) % 2 == 0,
    }
    run(tmp_path / "run", examples=given)
    memory = dualform.open(tmp_path / "run")
    assert memory.columns == sorted(given)
    assert memory.column("label").values.tolist() == given["label"].tolist()
    assert memory.column("image").values.equal(given["image"])
    assert memory.column("weight").values.dtype == torch.float64
    assert memory.column("name").categories == ("ü0<b>", "ü1<b>", "ü2<b>")
    memory.annotate(author=["ada"] * 19 + ["kurt"])
    again = dualform.open(tmp_path / "run")
    assert again.column("author").categories == ("ada", "kurt")
    memory.annotate(author=["emmy"] * 20)
    assert dualform.open(tmp_path / "run").column("author").categories == ("emmy",)
    assert again.verify().ok


def test_a_memory_can_be_moved(tmp_path: Path) -> None:
    run(tmp_path / "run", examples={"label": np.arange(20)})
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    memory = dualform.open(tmp_path / "elsewhere")
    assert memory.certificate().exact
    assert memory.verify().ok


def test_autocast_for_some_steps_only(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(4):
            ids, x, y = batch(step, dtype=torch.float32)
            with recorder.batch(ids), torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert next(memory.blocks(0, 4)).keys.dtype == torch.float32
    assert next(memory.blocks(0, 4)).keys[5:10].equal(batch(1, dtype=torch.float32)[1])
    assert all("from step 1 on gradients were computed in half precision" in row.reason for row in memory.certificate())
