"""Many queries: they are searched some at a time, and asked together they share one pass."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import dualform
from dualform import compiled
from dualform.memory import StoredMemory
from dualform.queries import best, pairs, search
from dualform.queries.score import pair_scores, scores
from dualform.queries.selection import Grouping
from queries.test_shadow import always, loops, record, rows_of, same

QUERIES = 23


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dualform.Memory:
    """One whose bounds are used although it is small."""
    monkeypatch.setattr(best, "FEW", 1)
    monkeypatch.setattr(search, "SEED", 16)
    record(tmp_path / "run", rows_of("relu", 1500, 24, 5))
    return dualform.open(tmp_path / "run")


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("at_once", [1, 5])
def test_queries_are_searched_some_at_a_time(
    memory: dualform.Memory, order: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best, "AT_ONCE", at_once)
    monkeypatch.setattr(best, "HELD", 40)
    attention = memory.attend(None, {"": rows_of("gaussian", QUERIES, 24, 6)})[""]
    label = Grouping.by(memory, "label")
    with always():
        assert same(attention, 5, order)
        assert same(attention.contributions(unit=1), 5, order)
        assert same(attention.contributions(unit=torch.arange(QUERIES) % 2), 5, order)
        assert same(attention.contributions(), 5, order) == (order != "smallest")
        assert same(attention.where(label=1), 3, order)
        assert same(attention, 3, order, label)
    with mock.patch.object(search.Search, "_worth", return_value=0), mock.patch.object(best, "MANY", 1 << 40):
        assert same(attention, 5, order)
        assert same(attention, 3, order, label)


def test_a_query_of_zeros_does_not_keep_questions_from_sharing_a_pass(
    memory: dualform.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = torch.cat([rows_of("gaussian", 3, 24, 6), torch.zeros(1, 24)])
    attention = memory.attend(None, {"": queries})[""]
    rows, blocks = [], StoredMemory.blocks

    def counted(*arguments, **keywords):
        for block in blocks(*arguments, **keywords):
            rows.append(len(block))
            yield block

    monkeypatch.setattr(StoredMemory, "blocks", counted)
    with memory.together():
        answers = [attention.top(5), attention.top(3, within="label"), attention.where(label=1).top(4)]
    assert all("full scan" in answer.explain() for answer in answers)
    assert sum(rows) == 1500


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_queries_that_carry_gradients_are_queries_like_others(memory: dualform.Memory, dtype: torch.dtype) -> None:
    queries = rows_of("gaussian", 3, 24, 6).to(dtype)
    wanted = memory.attend(None, {"": queries})[""].top(5)
    found = memory.attend(None, {"": queries.requires_grad_()})[""].top(5)
    assert found.scores.equal(wanted.scores) and found.events.equal(wanted.events)


@pytest.mark.parametrize("fast", [False, True])
def test_pairs_that_are_hard_to_round_are_found_in_every_part(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PART", 64)
    monkeypatch.setattr("dualform.fast.threads", lambda: 3)
    keys, queries = rows_of("whole numbers", 400, 24, 1), torch.ones(3, 24)
    # Half-way between two fp32 numbers, but for a last term that decides: in the last parts alone.
    keys[:300], keys[300:] = keys[:300].abs() + 1.0, 0.0
    keys[300:, 0], keys[300:, 1], keys[300:, 2] = 1.0, 2.0**-24, torch.tensor([2.0**-90, -(2.0**-90)]).repeat(50)
    keys[350:] = -keys[350:]
    at_key, at_query = torch.arange(400).repeat(3), torch.arange(3).repeat_interleave(400)
    with loops(compiled if fast else None):
        found = pair_scores(keys, queries, at_key, at_query)
    assert found.equal(scores(keys, queries).reshape(-1))
    assert len(found[300:350].unique()) == 2
