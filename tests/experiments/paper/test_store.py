"""Results in files: what was written is what is read, and what cannot be read is not there."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.experiments.paper import store
from dualform.experiments.paper.parts import PARTS


@dataclass(frozen=True)
class Leaf:
    number: float
    count: int
    name: str
    true: bool


@dataclass(frozen=True)
class Tree:
    leaf: Leaf
    perhaps: Leaf | None
    measured: float | None
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]
    rows: tuple[tuple[float, ...], ...]
    counts: dict[str, tuple[int, ...]]


def exact(number: float) -> float:
    """What nine digits hold of a number."""
    return float(f"{number:.9g}")


numbers = st.floats(allow_nan=False, allow_infinity=False).map(exact)
wholes = st.integers(-(2**53), 2**53)
leaves = st.builds(Leaf, numbers, wholes, st.text(), st.booleans())
trees = st.builds(
    Tree,
    leaves,
    st.none() | leaves,
    st.none() | numbers,
    st.lists(leaves, max_size=3).map(tuple),
    st.dictionaries(st.text(), leaves, max_size=3),
    st.lists(st.lists(numbers, max_size=4).map(tuple), max_size=3).map(tuple),
    st.dictionaries(st.text(), st.lists(wholes, max_size=3).map(tuple), max_size=2),
)


@given(trees)
def test_a_record_comes_back_as_it_was(tree: Tree) -> None:
    text = json.dumps(store.plain(tree), allow_nan=False)
    assert store.made(Tree, json.loads(text)) == tree


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_nine_digits(number: float) -> None:
    assert store.plain(number) == pytest.approx(number, rel=1e-8, abs=1e-320)
    assert isinstance(store.plain(number), float)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_null_and_then_nan(wrong: float) -> None:
    assert store.plain((wrong, {"a": wrong})) == [None, {"a": None}]
    (back, other) = store.made(tuple[float, ...], store.plain((wrong, 1.5)))
    assert math.isnan(back)
    assert other == 1.5


def test_a_file_holds_the_record_and_how_long_it_took(tmp_path: Path) -> None:
    leaf = Leaf(math.nan, 3, "“é”\n", True)
    store.write(tmp_path / "leaf.json", leaf, 1.23456)
    text = (tmp_path / "leaf.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["result"]["number"] is None
    assert "“é”" in text
    found = store.read(Leaf, tmp_path / "leaf.json")
    assert found is not None
    assert math.isnan(found[0].number)
    assert (found[0].count, found[0].name, found[0].true, found[1]) == (3, "“é”\n", True, 1.235)
    assert [file.name for file in tmp_path.iterdir()] == ["leaf.json"]


BROKEN: dict[str, Any] = {
    "empty": "",
    "cut off": '{"format": 1, "seconds": 1.0, "result": {"number": 1.0, "cou',
    "no json": "\x00\x01",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "another format": {"format": 2},
    "no format": {"format": None},
    "no result": {"result": None},
    "fields missing": {"result": {"number": 1.0}},
    "a word for a number": {"result": {"number": "many", "count": 1, "name": "a", "true": True}},
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_damaged_or_of_another_format_is_not_there(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "leaf.json"
    whole = {"format": store.FORMAT, "seconds": 0.5, "result": {"number": 1.0, "count": 1, "name": "a", "true": True}}
    file.write_text(json.dumps(whole))
    assert store.read(Leaf, file) == (Leaf(1.0, 1, "a", True), 0.5)
    file.write_text(content if isinstance(content, str) else json.dumps(whole | content))
    assert store.read(Leaf, file) is None
    file.write_bytes(b"\xff\xfe\x00")
    assert store.read(Leaf, file) is None
    file.unlink()
    assert store.read(Leaf, file) is None


def test_a_list_where_a_dict_should_be_is_damage_too(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"format": store.FORMAT, "seconds": 0.5, "result": {"layers": []}}))
    (votes,) = (part.kind for part in PARTS if part.name == "votes")
    assert store.read(votes, file) is None


def test_an_interrupted_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    file, leaf = tmp_path / "leaf.json", Leaf(1.0, 1, "a", True)
    store.write(file, leaf, 0.0)
    monkeypatch.setattr(store.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.write(file, Leaf(2.0, 1, "a", True), 0.0)
    assert store.read(Leaf, file) == (leaf, 0.0)


@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_every_part_of_a_real_run_comes_back(name: str, paper: Any) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    for experiment in part.experiments:
        assert store.plain(paper.part(experiment, name)) == paper.raw(experiment, name)
