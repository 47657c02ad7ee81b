"""How attention spreads over training time: sums over stretches of steps."""

import itertools
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dualform
import plain
import scripts
from dualform.queries import Attention, Timeline
from plain import DIM_IN, DIM_OUT, Event, History
from scripts import Narrow, Script, attention_of, is_sum, kept, narrowed


def bins_of(found: Timeline, events: list[Event]) -> list[list[Event]]:
    edges = found.edges.tolist()
    return [[event for event in events if low <= event.step < high] for low, high in itertools.pairwise(edges)]


def check_edges(found: Timeline, bins: int, until: int) -> None:
    edges = found.edges.tolist()
    assert edges[0] == 1 and edges[-1] == until + 1
    lengths = {high - low for low, high in itertools.pairwise(edges)}
    assert len(edges) == min(bins, until) + 1
    assert not lengths or (min(lengths) >= 1 and max(lengths) - min(lengths) <= 1)


@hypothesis.given(
    scripts.scripts(),
    scripts.queries(),
    st.integers(1, 8),
    scripts.narrowings(),
    st.none() | st.integers(0, 6),
    st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_a_timeline_is_a_sum_for_every_stretch(
    script: Script, queries: Tensor, bins: int, narrowing: list[Narrow], until: int | None, absolute: bool
) -> None:
    history = script.record()
    until = None if until is None else min(until, history.steps)
    end = history.steps if until is None else until
    found = narrowed(attention_of(history, queries, until), narrowing).timeline(bins, absolute=absolute)
    check_edges(found, bins, end)
    parts = bins_of(found, kept(history.until(end), narrowing))
    assert found.values.shape == (len(queries), len(parts)) and found.values.dtype == torch.float64
    assert found.counts.tolist() == [len(part) for part in parts]
    for at, query in enumerate(queries.tolist()):
        for number, part in enumerate(parts):
            assert is_sum(float(found.values[at, number]), part, query, absolute)
    scripts.forget(history)


def term(history: History, event: Event, query: list[float], v: list[float], end: int) -> float:
    along = math.fsum(map(float.__mul__, event.gradient, v))
    weight, bias = history.coefficient(event, end), history.bias_coefficient(event, end)
    return plain.dot(event.key, query) * weight * along + bias * along


@pytest.mark.parametrize("until", [None, 4, 0])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_timeline_of_contributions(until: int | None, absolute: bool, queries: int) -> None:
    history = plain.history("gauss")
    end = 6 if until is None else until
    rows = torch.randn(queries, DIM_IN, generator=torch.Generator().manual_seed(0))
    attention = attention_of(history, rows, until)
    along, whole = attention.contributions(unit=1).timeline(4, absolute=absolute), attention.contributions().timeline(4)
    check_edges(along, 4, end)
    parts = bins_of(along, history.until(end))
    for at, query in enumerate(rows.tolist()):
        for number, part in enumerate(parts):
            terms = [term(history, event, query, [0.0, 1.0, 0.0], end) for event in part]
            expected = math.fsum(map(abs, terms) if absolute else terms)
            assert float(along.values[at, number]) == pytest.approx(expected, abs=1e-11)
            sizes = [
                abs(plain.dot(event.key, query) * history.coefficient(event, end)) * math.hypot(*event.gradient)
                for event in part
            ]
            assert float(whole.values[at, number]) == pytest.approx(math.fsum(sizes), abs=1e-11)
    if end:
        total = attention.contributions(unit=1).totals(by="step", absolute=absolute).values.sum(dim=1)
        assert torch.allclose(along.values.sum(dim=1), total, rtol=0, atol=1e-10)


@pytest.fixture
def attention() -> Attention:
    return plain.history("gauss").memory.attend(None, {"fc": torch.ones(2, DIM_IN)})["fc"]


def test_there_are_fifty_bins_but_never_more_than_steps(attention: Attention) -> None:
    assert attention.timeline().edges.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert attention.timeline(4).edges.tolist() == [1, 2, 4, 5, 7]
    assert attention.timeline(1).counts.tolist() == [81]
    nothing = plain.history("gauss").memory.attend(None, {"fc": torch.ones(2, DIM_IN)}, until=0)["fc"].timeline()
    assert nothing.edges.tolist() == [1] and nothing.values.shape == (2, 0) and nothing.counts.shape == (0,)


def test_a_bin_is_what_where_selects(attention: Attention) -> None:
    found = attention.timeline(4)
    for at in range(4):
        part = attention.where(step=slice(int(found.edges[at]), int(found.edges[at + 1])))
        assert part.scores().shape[1] == found.counts[at]
        assert found.values[:, at].tolist() == pytest.approx(part.scores().double().sum(dim=1).tolist(), abs=1e-5)


@pytest.mark.parametrize("bins", [0, -3, True])
def test_bins_are_a_positive_whole_number(attention: Attention, bins: Any) -> None:
    with pytest.raises(dualform.errors.BadQuery, match="bins must be a whole number of at least 1"):
        attention.timeline(bins)


def test_it_shows_itself(attention: Attention) -> None:
    found = attention.where(label=7).timeline(3)
    lines = repr(found).splitlines()
    assert lines[0].split("  ")[-1].strip() == "total" and "first step" in lines[0] and len(lines) == 7
    assert lines[2].split()[:4] == ["0", "3", "4", str(int(found.counts[1]))]
    assert found._repr_html_().count("<tr>") == 7
    assert found.explain().startswith("key sums: ")
    pytest.importorskip("pandas")
    table = found.to_pandas()
    assert list(table.columns) == ["query", "first step", "last step", "events", "total"]
    assert table["first step"].tolist() == [1, 3, 5] * 2 and table["last step"].tolist() == [2, 4, 6] * 2
    assert table["total"].tolist() == found.values.reshape(-1).tolist()


def test_a_memory_of_keys_has_a_timeline() -> None:
    attention = plain.history("keys only").memory.attend(None, {"fc": torch.ones(1, DIM_IN)})["fc"]
    assert attention.timeline(3).values.shape == (1, 3) and DIM_OUT == 3
