"""`where` keeps the events it says it keeps, and groups hold the events they say they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import dualform
import plain
from dualform.errors import BadQuery
from dualform.queries import Attention
from plain import DIM_IN, EXAMPLES, LABELS, NAMES, Event, History

Condition = tuple[str, Any, Callable[[Event], bool]]
MASK = [True, False, True, True, False, False, True, False, True]


def attention_of(history: History) -> Attention:
    return history.memory.attend(None, {"fc": plain.rows("gauss", np.random.default_rng(0), 2)})["fc"]


def one_of(column: str, values: list[Any]) -> st.SearchStrategy[Condition]:
    return st.sampled_from(values).map(lambda v: (column, v, lambda event: event.value(column) == v))


def some_of(column: str, values: list[Any]) -> st.SearchStrategy[Condition]:
    chosen = st.lists(st.sampled_from(values), max_size=4)
    return chosen.map(lambda v: (column, v, lambda event: event.value(column) in v))


def between(column: str) -> st.SearchStrategy[Condition]:
    def build(start: int | None, stop: int | None) -> Condition:
        def holds(event: Event) -> bool:
            value = event.value(column)
            return value is not None and (start is None or value >= start) and (stop is None or value < stop)

        return column, slice(start, stop), holds

    ends = st.none() | st.integers(-2, 9)
    return st.builds(build, ends, ends)


def masked(event: Event) -> bool:
    return event.example >= 0 and MASK[event.example]


conditions = st.one_of(
    one_of("label", [*sorted(set(LABELS)), 99]),
    one_of("name", sorted(set(NAMES))),
    one_of("step", [0, 1, 4, 6, 7]),
    one_of("example", [-1, 0, 8, 20]),
    one_of("position", [0, 1, 2, 3]),
    some_of("label", [*sorted(set(LABELS)), 99]),
    some_of("name", sorted(set(NAMES))),
    some_of("step", [0, 1, 2, 6]),
    some_of("example", [-1, 0, 1, 5]),
    between("label"),
    between("step"),
    between("example"),
    between("position"),
    st.sampled_from([MASK, np.array(MASK), torch.tensor(MASK), torch.tensor([*MASK, True])]).flatmap(
        lambda mask: st.sampled_from([("example", mask, masked), ("label", mask, masked)])
    ),
)


@hypothesis.given(st.lists(conditions, min_size=1, max_size=3), st.sampled_from(plain.FINITE), st.booleans())
@hypothesis.settings(max_examples=150)
def test_where_keeps_the_events_for_which_all_conditions_hold(
    chosen: list[Condition], kind: str, at_once: bool
) -> None:
    history = plain.history(kind)
    attention = attention_of(history)
    whole, weights = attention.scores(), history.memory.weights
    wheres = {column: value for column, value, _ in chosen}
    if at_once and len(wheres) == len(chosen):
        narrowed = attention.where(**wheres)
    else:
        narrowed = attention
        for column, value, _ in chosen:
            narrowed = narrowed.where(**{column: value})
    kept = [at for at, event in enumerate(history.events) if all(holds(event) for _, _, holds in chosen)]
    assert narrowed.scores().equal(whole[:, kept])
    found = narrowed.top(len(history.events))
    assert sorted(found.events[0].tolist()) == [-1] * (len(history.events) - len(kept)) + kept
    assert attention.scores().equal(whole), "narrowing makes another attention, it does not change this one"
    if len(wheres) == len(chosen):
        rebuilt = weights(where=wheres)["fc.weight"].double()
        end = history.steps
        expected = plain.response(plain.OF_WEIGHTS, end, 0, 1.0) * history.initial["fc.weight"].double()
        for at in kept:
            event = history.events[at]
            value = history.coefficient(event, end) * torch.tensor(event.gradient, dtype=torch.float64)
            expected += torch.outer(value, torch.tensor(event.key, dtype=torch.float64))
        assert torch.allclose(rebuilt, expected, rtol=1e-6, atol=1e-6)


@hypothesis.given(st.lists(conditions, min_size=1, max_size=3), st.sampled_from(plain.FINITE), st.booleans())
@hypothesis.settings(max_examples=60)
def test_exclude_leaves_out_what_where_would_keep(chosen: list[Condition], kind: str, of_contributions: bool) -> None:
    history = plain.history(kind)
    attention = attention_of(history)
    asked = attention.contributions(unit=1) if of_contributions else attention
    whole = asked.scores()
    columns = {column: (value, holds) for column, value, holds in chosen}
    narrowed = asked.exclude(**{column: value for column, (value, _) in columns.items()})
    inside = [all(holds(event) for _, holds in columns.values()) for event in history.events]
    assert narrowed.scores().equal(whole[:, [at for at, left_out in enumerate(inside) if not left_out]])
    both = asked.where(**{column: value for column, (value, _) in columns.items()})
    summed = both.totals(by="step").values + narrowed.totals(by="step").values
    assert torch.allclose(summed, asked.totals(by="step").values, rtol=0, atol=1e-9)


def test_exclude_and_where_can_be_chained() -> None:
    history = plain.history("gauss")
    attention = attention_of(history)
    found = attention.where(label=[0, 7]).exclude(step=1).exclude(name="a", label=7).top(81)
    left = [
        at
        for at, event in enumerate(history.events)
        if event.label in (0, 7) and event.step != 1 and not (event.name == "a" and event.label == 7)
    ]
    assert sorted(event for event in found.events[0].tolist() if event >= 0) == left
    assert attention.exclude().scores().equal(attention.scores()), "no condition leaves out nothing"
    assert attention.exclude(example=[-1]).scores().shape == (2, 79)
    assert attention.exclude(label=99).scores().shape == (2, 81)
    assert "of fc.weight" in repr(attention.exclude(label=7))


def test_a_masked_output_leaves_out_exactly_the_masked_contributions() -> None:
    attention = attention_of(plain.history("float64"))
    kept = attention.where(label=[0, 7])
    totals = attention.contributions().totals(by="label")
    parts = totals.values[:, [totals.groups.index(0), totals.groups.index(7)]].sum(dim=1)
    assert torch.allclose(kept.output(), attention.initial() + parts, rtol=0, atol=1e-10)
    assert kept.initial().equal(attention.initial())
    for asked in (attention.contributions().where(label=[0, 7]), kept.contributions()):
        assert torch.allclose(asked.totals(by="step").values.sum(dim=1), parts, rtol=0, atol=1e-10)


def test_where_nothing_is_left_the_answers_are_empty() -> None:
    attention = attention_of(plain.history("gauss")).where(label=99)
    assert attention.scores().shape == (2, 0)
    assert attention.top(3).events.tolist() == [[-1] * 3] * 2
    assert attention.top(2, within="label").events.eq(-1).all()
    assert attention.top(2, by="label").groups == [[None, None]] * 2
    assert attention.totals(by="label").values.eq(0).all()
    assert attention.contributions().totals(by="label").values.eq(0).all()
    assert attention.output().equal(attention.initial())
    assert attention.output(kernel="softmax").equal(attention.initial())


def record(path: Path, ids: Any, **columns: Any) -> dualform.Memory:
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, examples=columns or None) as recorder:
        if ids is None:
            model(torch.eye(2)).sum().backward()
        else:
            with recorder.batch(ids):
                model(torch.arange(2.0 * len(ids)).reshape(-1, 2)).sum().backward()
        optimizer.step()
    return dualform.open(path)


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_column_of_any_dtype_compares_by_value(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = record(tmp_path / "run", [0, 1, 2], label=torch.tensor([3, 100, 0], dtype=dtype))
    attention = memory.attend(None, {"0": torch.ones(1, 2)})["0"]

    def kept(value: Any) -> list[int]:
        events = attention.where(label=value).top(3).examples[0].tolist()
        return sorted(event for event in events if event >= 0)

    assert kept(3) == kept(3.0) == kept([3]) == kept(np.array([3])) == kept(torch.tensor(3)) == kept({3}) == [0]
    assert kept([100, 0.0, 5]) == [1, 2]
    assert kept(slice(0, 4)) == [0, 2]
    assert kept(slice(None, 3)) == [2]
    assert kept(slice(1, None)) == [0, 1]


@pytest.mark.parametrize("value", [-1, 259, 512, 3.5, -253])
def test_a_value_that_does_not_fit_the_columns_dtype_matches_nothing(tmp_path: Path, value: float) -> None:
    memory = record(tmp_path / "run", [0, 1, 2], label=torch.tensor([3, 255, 0], dtype=torch.uint8))
    attention = memory.attend(None, {"0": torch.ones(1, 2)})["0"]
    assert attention.where(label=value).scores().shape == (1, 0)
    assert attention.where(label=[value]).scores().shape == (1, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_a_slice_may_reach_beyond_the_columns_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = record(tmp_path / "run", [0, 1, 2], label=torch.tensor([3, 100, 0], dtype=dtype))
    attention = memory.attend(None, {"0": torch.ones(1, 2)})["0"]
    for everything in (slice(-1000, 1000), slice(-1, None), slice(None, 256), slice(-200, 300)):
        assert attention.where(label=everything).scores().shape == (1, 3), everything
    for nothing in (slice(256, None), slice(None, -1), slice(300, 500)):
        assert attention.where(label=nothing).scores().shape == (1, 0), nothing


def test_a_column_of_booleans_is_compared_with_a_boolean(tmp_path: Path) -> None:
    memory = record(tmp_path / "run", [0, 1, 2], clean=[True, False, True])
    attention = memory.attend(None, {"0": torch.ones(1, 2)})["0"]
    assert attention.where(clean=True).scores().shape == (1, 2)
    assert attention.where(clean=False).scores().shape == (1, 1)
    assert attention.totals(by="clean").groups == (False, True)


REFUSED = [
    ({"label": "seven"}, "holds numbers"),
    ({"label": slice(0, 5, 2)}, "no step"),
    ({"step": slice(0, 5, 2)}, "no step"),
    ({"colour": 1}, "no column 'colour'"),
    ({"name": "zoe"}, "no value 'zoe'"),
    ({"name": ["a", "zoe"]}, "no value 'zoe'"),
    ({"name": 0}, "no value 0"),
    ({"name": slice("a", "c")}, "name"),
    ({"pair": 1}, "cannot choose"),
    ({"example": [True] * (EXAMPLES - 1)}, "boolean array needs an entry for each of the 9 examples"),
    ({"step": "first"}, "does not fit"),
    ({"position": None}, "does not fit"),
]


@pytest.mark.parametrize(("where", "says"), REFUSED, ids=str)
def test_a_condition_that_makes_no_sense_is_refused(where: dict[str, Any], says: str) -> None:
    history = plain.history("gauss")
    for narrow in (attention_of(history).where, attention_of(history).exclude):
        with pytest.raises(BadQuery, match=says):
            narrow(**where)
    with pytest.raises(BadQuery, match=says):
        history.memory.weights(where=where)
    with pytest.raises(BadQuery, match=says):
        history.memory.dual(history.model, where=where)


def test_a_memory_without_ids_has_no_groups_by_example(tmp_path: Path) -> None:
    attention = record(tmp_path / "run", None).attend(None, {"0": torch.ones(3, 2)})["0"]
    assert attention.totals(by="example").values.shape == (3, 0)
    assert attention.top(2, by="example").groups == [[None, None]] * 3
    assert attention.top(2, within="example").events.shape == (3, 0, 2)
    assert attention.contributions().totals(by="example").values.shape == (3, 0, 1)
    assert attention.top(2).examples.eq(-1).all()


def test_a_column_added_later_groups_and_selects(tmp_path: Path) -> None:
    memory = record(tmp_path / "run", [0, 2, 1])
    attention = memory.attend(None, {"0": torch.ones(1, 2)})["0"]
    memory.annotate(author=["kurt", "ada", "kurt"])
    totals = attention.totals(by="author")
    assert (totals.groups, totals.values.tolist()) == (("ada", "kurt"), [[9.0, 6.0]])
    assert attention.where(author="ada").top(2).examples.tolist() == [[1, -1]]
    memory.annotate(author=["emmy", "ada", "ada"])
    assert attention.where(author="emmy").top(1).examples.tolist() == [[0]]
    again = dualform.open(tmp_path / "run").attend(None, {"0": torch.ones(1, 2)})["0"]
    assert again.totals(by="author").values.tolist() == [[14.0, 1.0]]


def test_every_combination_of_a_tuple_of_columns_is_a_group() -> None:
    totals = attention_of(plain.history("gauss")).totals(by=("name", "label"))
    assert totals.groups == tuple((name, label) for name in sorted(set(NAMES)) for label in sorted(set(LABELS)))
    alone = attention_of(plain.history("gauss")).totals(by="name")
    summed = totals.values.reshape(2, len(set(NAMES)), -1).sum(dim=2)
    assert torch.allclose(summed, alone.values, rtol=0, atol=1e-12)


def test_an_event_without_an_example_is_in_no_group_of_examples() -> None:
    history = plain.history("gauss")
    without = [event for event in history.events if event.example < 0]
    assert len(without) == 2
    attention = history.memory.attend(None, {"fc": torch.ones(1, DIM_IN)})["fc"]
    grouped = float(attention.totals(by="label").values.sum())
    everything = float(attention.totals(by="step").values.sum())
    missing = sum(sum(event.key) for event in without)
    assert everything - grouped == pytest.approx(missing, abs=1e-12)
    assert attention.where(example=-1).scores().shape == (1, 2)
    assert attention.where(example=torch.ones(EXAMPLES, dtype=torch.bool)).scores().shape == (1, 79)
