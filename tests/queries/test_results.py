"""Answers are small objects: shapes, padding, tables, notebooks, and how they were computed."""

import dataclasses
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
import plain
from dualform.queries import Attention, TopEvents, TopGroups, Totals
from plain import DIM_IN, DIM_OUT

HOSTILE = ["<script>alert(1)</script>", "a & b", "&lt;b&gt;", "<img src=x onerror=alert(1)>", 'say "hi"', "plain"]


@pytest.fixture(scope="module")
def attention() -> Attention:
    return plain.history("gauss").memory.attend(None, {"fc": torch.ones(2, DIM_IN)})["fc"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Attention:
    path = tmp_path_factory.mktemp("results") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, examples={"title": HOSTILE}) as recorder:
        with recorder.batch(torch.arange(6)):
            model(torch.randn(6, 3)).sum().backward()
        optimizer.step()
    return dualform.open(path).attend(model, torch.ones(1, 3))["0"]


FIELDS = ("scores", "events", "examples", "steps", "positions", "uses")


def test_shapes_and_dtypes(attention: Attention) -> None:
    top = attention.top(4)
    assert all(getattr(top, name).shape == (2, 4) for name in FIELDS)
    assert top.scores.dtype == torch.float32
    assert all(getattr(top, name).dtype == torch.int64 for name in FIELDS[1:])
    within = attention.top(4, within="label")
    assert all(getattr(within, name).shape == (2, 4, 4) for name in FIELDS)
    assert list(within.groups) == [0, 2, 5, 7]
    by = attention.top(3, by="name")
    assert by.scores.shape == by.counts.shape == (2, 3)
    assert by.scores.dtype == torch.float64 and [len(row) for row in by.groups] == [3, 3]
    totals = attention.totals(by="label")
    assert totals.values.shape == (2, 4) and list(totals.groups) == [0, 2, 5, 7]
    assert attention.contributions().totals(by="label").values.shape == (2, 4, DIM_OUT)
    assert attention.contributions(unit=0).totals(by="label").values.shape == (2, 4)


def test_what_is_missing_is_minus_one_and_not_a_number(attention: Attention) -> None:
    top = attention.where(step=1).top(20)
    there = 16
    assert (top.events[:, :there] >= 0).all() and top.scores[:, :there].isfinite().all()
    for name in FIELDS[1:]:
        assert (getattr(top, name)[:, there:] == -1).all(), name
    assert top.scores[:, there:].isnan().all()
    within = attention.where(label=[0, 2]).top(30, within="label")
    assert (within.events[:, 2:] == -1).all() and within.scores[:, 2:].isnan().all()
    groups = attention.where(label=[0, 2]).top(3, by="label")
    assert [set(row[:2]) for row in groups.groups] == [{0, 2}] * 2
    assert [row[2] for row in groups.groups] == [None, None]
    assert groups.scores[:, 2].isnan().all() and (groups.counts[:, 2] == 0).all()


def test_events_whose_score_is_not_a_number_are_set_apart_and_counted() -> None:
    history = plain.history("nan")
    queries = torch.stack([torch.ones(DIM_IN), torch.zeros(DIM_IN)])
    attention = history.memory.attend(None, {"fc": queries})["fc"]
    scores = [[plain.score(event.key, query) for event in history.events] for query in queries.tolist()]
    missing = [sum(map(math.isnan, row)) for row in scores]
    assert 0 < missing[0] < missing[1] < 81
    for order in ("largest", "smallest", "absolute"):
        top = attention.top(81, order=order)
        assert top.scores.isnan().sum(dim=1).tolist() == missing
        assert (top.events == -1).sum(dim=1).tolist() == missing
        assert top.explain().endswith(f"; {sum(missing)} NaN scores set apart")


def test_the_count_of_scores_set_apart_is_also_told_within_groups() -> None:
    history = plain.history("nan")
    top = history.memory.attend(None, {"fc": torch.zeros(1, DIM_IN)})["fc"].top(81, within="step")
    missing = sum(math.isnan(plain.score(event.key, [0.0] * DIM_IN)) for event in history.events)
    assert top.explain().endswith(f"; {missing} NaN scores set apart")


def test_explain_says_the_way_and_the_rows(attention: Attention) -> None:
    contributions = attention.contributions()
    answers = [attention.top(1), attention.top(1, within="label"), attention.top(1, by="label")]
    for answer in [*answers, attention.totals(by="label"), contributions.top(1), contributions.totals(by="label")]:
        told = re.fullmatch(r"(.+): ([\d,]+) rows read", answer.explain())
        assert told and 0 <= int(told[2]) <= 81


def test_answers_cannot_be_changed(attention: Attention) -> None:
    for answer in (attention.top(2), attention.top(2, by="label"), attention.totals(by="label")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            answer.explanation = None


def test_a_table_of_events_has_a_row_for_each_query_and_rank(attention: Attention) -> None:
    pytest.importorskip("pandas")
    top = attention.top(3)
    table = top.to_pandas()
    assert list(table.columns) == ["query", "rank", "score", "event", "example", "step", "position", "use"]
    assert table["query"].tolist() == [0, 0, 0, 1, 1, 1] and table["rank"].tolist() == [1, 2, 3] * 2
    for column in ("score", "event", "example", "step", "position", "use"):
        assert table[column].tolist() == getattr(top, f"{column}s").reshape(-1).tolist()


def test_a_table_of_events_within_groups_names_the_group(attention: Attention) -> None:
    pytest.importorskip("pandas")
    top = attention.where(label=[0, 7]).top(2, within="label")
    table = top.to_pandas()
    assert table["group"].tolist() == [0, 0, 7, 7] * 2, "what is only padding is no row"
    assert table["query"].tolist() == [0] * 4 + [1] * 4 and table["rank"].tolist() == [1, 2] * 4
    assert table["event"].tolist() == top.events[:, [0, 3]].reshape(-1).tolist()
    pairs = attention.top(1, within=("name", "label")).to_pandas()["group"]
    assert ("b", 7) in pairs.tolist()


def test_a_table_of_groups(attention: Attention) -> None:
    pytest.importorskip("pandas")
    top = attention.top(9, by="label")
    table = top.to_pandas()
    assert list(table.columns) == ["query", "rank", "group", "score", "events"]
    assert len(table) == 8 and table["group"].tolist() == top.groups[0][:4] + top.groups[1][:4]
    assert table["score"].tolist() == top.scores[:, :4].reshape(-1).tolist()
    assert table["events"].sum() == 2 * 79


def test_a_table_of_totals(attention: Attention) -> None:
    pytest.importorskip("pandas")
    totals = attention.totals(by="label")
    table = totals.to_pandas()
    assert list(table.columns) == ["query", "group", "total"]
    assert table["total"].tolist() == totals.values.reshape(-1).tolist()
    assert table["group"].tolist() == [0, 2, 5, 7] * 2
    vectors = attention.contributions().totals(by="label")
    table = vectors.to_pandas()
    assert list(table.columns) == ["query", "group", "unit 0", "unit 1", "unit 2"]
    assert table[["unit 0", "unit 1", "unit 2"]].to_numpy().tolist() == vectors.values.reshape(8, 3).tolist()


def test_a_missing_pandas_is_told_with_the_command(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(dualform.errors.MissingExtra, match=r"pip install 'dualform\[table\]'"):
        attention.top(1).to_pandas()


def test_the_repr_is_a_readable_table(attention: Attention) -> None:
    top = attention.top(2)
    lines = repr(top).splitlines()
    assert lines[0].split() == ["query", "rank", "score", "event", "example", "step", "position", "use"]
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert float(lines[1].split()[2]) == pytest.approx(float(top.scores[0, 0]), rel=1e-5)
    assert [int(line.split()[3]) for line in lines[1:]] == top.events.reshape(-1).tolist()
    long = repr(attention.top(81))
    assert len(long.splitlines()) == 22 and long.endswith("… 142 more rows")
    assert "nan" not in repr(attention.where(step=1).top(81))


def test_the_repr_shows_text_as_it_is(hostile: Attention) -> None:
    shown = repr(hostile.totals(by="title"))
    assert all(text in shown for text in HOSTILE)


class _Tags(HTMLParser):
    """The tags of a page, and the text of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def parsed(answer: TopEvents | TopGroups | Totals) -> _Tags:
    page = _Tags()
    page.feed(answer._repr_html_())
    return page


def test_a_notebook_shows_text_as_it_is_and_runs_nothing(hostile: Attention) -> None:
    answers = [hostile.totals(by="title"), hostile.top(6, by="title"), hostile.top(1, within="title")]
    answers += [hostile.totals(by=("title", "step")), hostile.contributions().totals(by="title")]
    for answer in answers:
        page = parsed(answer)
        assert page.tags <= {"table", "thead", "tbody", "tr", "th", "td"}
        shown = " ".join(page.cells)
        assert "<script>" in shown and "alert(1)" in shown
    assert set(HOSTILE) <= set(parsed(hostile.totals(by="title")).cells), "also an ampersand is shown as it is"


def test_a_notebook_shows_the_same_cells_as_the_repr(attention: Attention) -> None:
    for answer in (attention.top(2), attention.top(2, by="label"), attention.totals(by="label")):
        cells = [cell for line in repr(answer).splitlines()[1:] for cell in line.split()]
        assert parsed(answer).cells == cells
    rows = re.findall("<tr>", attention.top(81)._repr_html_())
    assert len(rows) == 21


def test_a_notebook_says_how_many_rows_are_not_shown(attention: Attention) -> None:
    assert "142 more rows" in html.unescape(attention.top(81)._repr_html_())


def test_attention_and_spotlight_say_what_they_are(attention: Attention, tmp_path: Path) -> None:
    assert repr(attention) == "Attention('fc': 2 queries over 81 events of fc.weight)"
    assert attention.uses == ["fc", "twin"]
    spotlight = plain.history("gauss").memory.attend(None, {"twin": torch.ones(2, DIM_IN)})
    assert repr(spotlight) == "Spotlight(\n  Attention('twin': 2 queries over 81 events of fc.weight)\n)"
