"""Folds of groups: any mask of groups is the whole less what they made, and files that do not fit are made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dualform
import small
from dualform.errors import BadQuery
from dualform.queries import groupfolds
from dualform.queries.groupfolds import group_folds

LABELS = [i % 3 for i in range(20)]
KINDS = ["a" if i < 8 else "b" for i in range(20)]


@pytest.fixture
def memory(tmp_path: Path) -> dualform.Memory:
    _, found = small.run(tmp_path / "run", steps=12, examples={"label": LABELS, "kind": KINDS})
    return found


@pytest.mark.parametrize("groups", [[], [0], [1, 4], [0, 1, 2, 3, 4]])
def test_without_groups_is_the_fold_of_the_others(memory: dualform.Memory, groups: list[int]) -> None:
    folds = group_folds(memory, memory.folds, ("kind", "label"))
    left_out = {folds.grouping.groups[at] for at in groups}
    kept = torch.tensor([(kind, label) not in left_out for kind, label in zip(KINDS, LABELS, strict=True)])
    expected = memory.weights(where={"example": kept})
    found = folds.without(groups)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12)


def test_the_parts_and_the_untouched_are_the_whole(memory: dualform.Memory) -> None:
    folds = group_folds(memory, memory.folds, ("label",))
    whole = memory.weights()
    for name, part in folds.parts.items():
        rebuilt = memory.folds.untouched(name, memory.steps) + part.sum(dim=0)
        torch.testing.assert_close(rebuilt, whole[name], rtol=1e-10, atol=1e-12)


def test_they_are_made_once_and_kept(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = group_folds(memory, memory.folds, ("label",))
    monkeypatch.setattr(groupfolds, "_made", lambda *_: pytest.fail("made again"))
    again = dualform.open(memory.path)
    kept = group_folds(again, again.folds, ("label",))
    assert all(torch.equal(kept.parts[name], part) for name, part in first.parts.items())


@pytest.mark.parametrize("damage", ["cut", "flipped", "annotated"])
def test_what_does_not_fit_is_made_anew(memory: dualform.Memory, damage: str) -> None:
    first = group_folds(memory, memory.folds, ("label",))
    (file,) = (memory.path / "derived" / "folds").iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-100])
    elif damage == "flipped":
        content[-300] ^= 1
        file.write_bytes(content)
    else:
        memory.annotate(label=[(i + 1) % 3 for i in range(20)])
    again = dualform.open(memory.path)
    found = group_folds(again, again.folds, ("label",))
    for name, part in first.parts.items():
        expected = part.roll(1, dims=0) if damage == "annotated" else part
        torch.testing.assert_close(found.parts[name], expected, rtol=1e-10, atol=1e-12)


def test_too_many_groups_are_refused(memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groupfolds, "MOST", 2)
    with pytest.raises(BadQuery, match="makes 3 groups; at most 2"):
        group_folds(memory, memory.folds, ("label",))
    with pytest.raises(BadQuery):
        group_folds(memory, memory.folds, ("step",))
