"""Folds of groups: any mask of groups at any step is the fold of the others; files that do not fit are made anew."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
import small
from dualform.errors import BadQuery
from dualform.queries import groupfolds
from dualform.queries.groupfolds import GroupFolds, group_folds
from dualform.queries.selection import Selection

LABELS = [i % 3 for i in range(20)]
KINDS = ["a" if i < 8 else "b" for i in range(20)]
STEPS = 12


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)


def recorded(path: Path, steps: int = STEPS) -> dualform.Memory:
    model = small.network()
    return small.run(path, model, sgd(model), steps, examples={"label": LABELS, "kind": KINDS})[1]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dualform.Memory:
    """With marks after 4, 8 and 12 steps."""
    monkeypatch.setattr(groupfolds, "STRIDE", 1)
    found = recorded(tmp_path / "run")
    monkeypatch.setattr(type(found.folds.keyframes), "spacing", 4)
    return found


def folds_of(memory: dualform.Memory, *columns: str) -> GroupFolds:
    return group_folds(memory, memory.folds, columns)


def files(memory: dualform.Memory) -> dict[str, Path]:
    return {path.stem: path for path in (memory.path / "derived" / "folds").rglob("*.safetensors")}


@pytest.mark.parametrize("until", [0, 1, 4, 6, 8, 11, STEPS])
@pytest.mark.parametrize("groups", [[], [0], [1, 4], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]])
def test_without_groups_is_the_fold_of_the_others(memory: dualform.Memory, groups: list[int], until: int) -> None:
    folds = folds_of(memory, "kind", "label")
    left_out = {folds.grouping.groups[at] for at in groups}
    kept = torch.tensor([(kind, label) not in left_out for kind, label in zip(KINDS, LABELS, strict=True)])
    expected = memory.weights(where={"example": kept}, until=until)
    found = folds.without(groups, until)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [[0], [0, 1]])
def test_events_without_an_example_stay(memory: dualform.Memory, tmp_path: Path, groups: list[int]) -> None:
    """Both where what is left out is folded, and where what is kept is."""
    model = small.network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "half", examples={"label": LABELS}) as recorder:
        for step in range(1, STEPS + 1):
            ids, x, y = small.batch(step)
            with recorder.batch(ids) if step % 2 else contextlib.nullcontext():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    half = dualform.open(tmp_path / "half")
    left_out = torch.tensor([label in groups for label in LABELS])
    expected = half.folds.whole(7, Selection().without(half, {"example": left_out}))
    assert not torch.equal(expected["0.weight"], half.weights(where={"example": ~left_out}, until=7)["0.weight"])
    found = folds_of(half, "label").without(groups, 7)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12)


def test_a_dropped_pass_may_hold_infinities(memory: dualform.Memory, tmp_path: Path) -> None:
    model = small.network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "dropped", examples={"label": LABELS}) as recorder:
        for step in range(1, STEPS + 1):
            ids, x, y = small.batch(step)
            with recorder.batch(ids):
                (F.cross_entropy(model(x), y) * (float("inf") if step == 3 else 1.0)).backward()
            if step == 3:
                optimizer.zero_grad()  # a loss scaler does that
            optimizer.step()
            optimizer.zero_grad()
    dropped = dualform.open(tmp_path / "dropped")
    assert dropped.manifest.nonfinite > 0
    for name, weight in dropped.weights(where={"label": [0, 2]}).items():
        found = folds_of(dropped, "label").without([1], dropped.steps)[name]
        torch.testing.assert_close(found, weight, rtol=1e-10, atol=1e-12)


def test_there_is_no_mark_between_a_pass_and_its_last_step(memory: dualform.Memory, tmp_path: Path) -> None:
    """A bias that an optimiser of its own steps later."""
    model = small.network()
    weights = torch.optim.SGD([one.weight for one in (model[0], model[2])], lr=0.1, momentum=0.9)
    biases = torch.optim.SGD([one.bias for one in (model[0], model[2])], lr=0.1, momentum=0.9)
    examples = {"label": LABELS}
    with dualform.record(model, [weights, biases], tmp_path / "two", examples=examples) as recorder:
        for step in range(1, 7):
            ids, x, y = small.batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            weights.step()
            weights.zero_grad()
            if step % 2 == 0:  # of two passes, each of which the weights have used before
                biases.step()
                biases.zero_grad()
    two = dualform.open(tmp_path / "two")
    assert not two.journal.is_clean(4)  # where there would be a mark
    for until in range(1, two.steps + 1):
        expected = two.folds.whole(until, Selection().without(two, {"label": 1}))
        for groups in ([1], [0, 2]):
            found = folds_of(two, "label").without(groups, until)
            kept = expected if groups == [1] else two.folds.whole(until, Selection().without(two, {"label": [0, 2]}))
            for name, weight in kept.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12)


def test_the_files_of_another_run_are_not_taken(memory: dualform.Memory, tmp_path: Path) -> None:
    folds_of(memory, "label").last()
    model = small.network(seed=1)
    other = small.run(tmp_path / "other", model, sgd(model), STEPS, examples={"label": LABELS, "kind": KINDS})[1]
    for name, file in files(memory).items():
        place = other.path / "derived" / "folds" / file.parent.name / f"{name}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    for name, weight in other.weights(where={"label": [0, 2]}, until=10).items():
        found = folds_of(other, "label").without([1], 10)[name]
        torch.testing.assert_close(found, weight, rtol=1e-10, atol=1e-12)


def test_only_the_events_since_the_last_mark_are_read(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    folds = folds_of(memory, "label")
    folds.last()
    memory.weights(until=10)
    assert sorted(files(memory)) == ["00000004", "00000008", "00000012"]
    asked = []
    blocks = type(memory).blocks

    def watched(self: dualform.Memory, weight: int, until: int, *, since: int = 0, **options: object) -> object:
        asked.append((since, until))
        return blocks(self, weight, until, since=since, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(memory), "blocks", watched)
    folds.without([0], 10)
    folds.without([0, 1], 10)
    assert set(asked) == {(8, 10)}


def test_a_mask_at_the_last_step_needs_no_keyframes(memory: dualform.Memory) -> None:
    folds_of(memory, "label").without([0], memory.steps)
    assert not (memory.path / "derived" / "keyframes").exists()


def test_the_parts_and_the_untouched_are_the_whole(memory: dualform.Memory) -> None:
    whole = memory.weights()
    for name, part in folds_of(memory, "label").last().weights.items():
        rebuilt = memory.folds.untouched(name, memory.steps) + part.sum(dim=0)
        torch.testing.assert_close(rebuilt, whole[name], rtol=1e-10, atol=1e-12)


def test_they_are_made_once_and_kept(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folds_of(memory, "label").last()
    monkeypatch.setattr(GroupFolds, "_next", lambda *_: pytest.fail("made again"))
    kept = folds_of(dualform.open(memory.path), "label").last()
    assert all(torch.equal(kept.weights[name], part) for name, part in first.weights.items())


def test_what_cannot_be_written_is_kept_at_hand(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groupfolds, "write_state", lambda *_: False)
    folds = folds_of(memory, "label")
    first = folds.without([0], 10)
    assert not files(memory)
    monkeypatch.setattr(GroupFolds, "_next", lambda *_: pytest.fail("made again"))
    assert all(torch.equal(folds.without([0], 10)[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("damage", ["cut", "flipped", "annotated"])
def test_what_does_not_fit_is_made_anew(memory: dualform.Memory, damage: str) -> None:
    first = folds_of(memory, "label").last()
    for file in files(memory).values():
        content = bytearray(file.read_bytes())
        if damage == "cut":
            file.write_bytes(content[:-100])
        elif damage == "flipped":
            content[-300] ^= 1
            file.write_bytes(content)
    again = memory
    if damage == "annotated":
        memory.annotate(label=[(i + 1) % 3 for i in range(20)])
    else:
        again = dualform.open(memory.path)
    found = folds_of(again, "label").last()
    for name, part in first.weights.items():
        expected = torch.cat([part[:3].roll(1, dims=0), part[3:]]) if damage == "annotated" else part
        torch.testing.assert_close(found.weights[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("before", [8, 10])
def test_a_memory_that_grew_makes_only_what_is_new(memory: dualform.Memory, tmp_path: Path, before: int) -> None:
    """Also where its last step was a mark: a last step is kept without velocities."""
    run, model = tmp_path / "growing", small.network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, examples={"label": LABELS}, on_error="raise") as recorder:
        for step in range(1, STEPS + 1):
            ids, x, y = small.batch(step)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == before:
                recorder.commit()
                folds_of(dualform.open(run), "label").last()
                kept = {name: path.read_bytes() for name, path in files(dualform.open(run)).items()}
    assert sorted(kept) == sorted({"00000004", "00000008", f"{before:08d}"})
    after = dualform.open(run)
    found = folds_of(after, "label").last()
    now = files(after)
    assert sorted(now) == ["00000004", "00000008", "00000012"]
    assert now["00000004"].read_bytes() == kept["00000004"]
    expected = folds_of(memory, "label").last()
    for name, part in expected.weights.items():
        torch.testing.assert_close(found.weights[name], part, rtol=1e-10, atol=1e-12)


def test_too_many_groups_are_refused(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groupfolds, "MOST", 2)
    with pytest.raises(BadQuery, match="makes 3 groups; at most 2"):
        folds_of(memory, "label")
    with pytest.raises(BadQuery):
        folds_of(memory, "step")
