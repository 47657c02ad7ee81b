"""Questions asked together: nothing before the block is left, then the same answers as alone, in one pass."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dualform
import plain
import scripts
from dualform.blocks import Block
from dualform.errors import BadCall, BadQuery, NotAnsweredYet
from dualform.memory import StoredMemory
from dualform.queries import Spotlight, Timeline, TopEvents, TopGroups, Totals
from plain import DIM_IN, History

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "top": lambda asked: asked.top(3),
    "top within": lambda asked: asked.top(2, within="label"),
    "top by": lambda asked: asked.top(2, by="label"),
    "top by absolute": lambda asked: asked.top(2, by="step", absolute=True),
    "totals": lambda asked: asked.totals(by="label"),
    "totals by step": lambda asked: asked.totals(by="step"),
    "absolute totals": lambda asked: asked.totals(by="step", absolute=True),
    "timeline": lambda asked: asked.timeline(3),
    "scores": lambda asked: asked.scores(),
    "output": lambda asked: asked.output(),
    "softmax": lambda asked: asked.output(kernel="softmax"),
    "initial": lambda asked: asked.initial(),
    "unit": lambda asked: asked.contributions(unit=1).top(2),
    "unit totals": lambda asked: asked.contributions(unit=1).totals(by="step"),
    "vectors": lambda asked: asked.contributions().totals(by="label"),
    "some": lambda asked: asked.where(label=7).totals(by="step"),
    "others": lambda asked: asked.exclude(step=slice(2, 4)).timeline(),
}


def fields_of(answer: Any) -> list[Any]:
    if isinstance(answer, Tensor):
        return [answer]
    names = ("groups", "scores", "events", "examples", "steps", "counts", "values", "edges", "explanation")
    return [getattr(answer, name) for name in names if hasattr(answer, name)]


def empty(memory: StoredMemory) -> None:
    """Let go of all that is kept between questions, so that each is answered as the first one."""
    for key in list(memory.room._kept):
        memory.room.drop(key)


def same(one: Any, other: Any) -> bool:
    """Equal, bit for bit, with NaN equal to NaN."""

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return (
                a.dtype == b.dtype
                and a.shape == b.shape
                and torch.equal(a.isnan(), b.isnan())
                and torch.equal(a.nan_to_num(), b.nan_to_num())
            )
        return bool(a == b)

    return len(fields_of(one)) == len(fields_of(other)) and all(map(alike, fields_of(one), fields_of(other)))


def spotlight_of(history: History, until: int | None = None, queries: int = 2) -> Spotlight:
    rows = torch.randn(queries, DIM_IN, generator=torch.Generator().manual_seed(1))
    return history.memory.attend(None, {"fc": rows, "twin": rows[:1]}, until=until)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Weight, first and last step of everything that was read."""
    read: list[tuple[int, int, int]] = []
    blocks = StoredMemory.blocks

    def noted(memory: StoredMemory, weight: int, until: int, *rest: Any, since: int = 0) -> Iterator[Block]:
        read.append((weight, since, until))
        return blocks(memory, weight, until, *rest, since=since)

    monkeypatch.setattr(StoredMemory, "blocks", noted)
    return read


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(sorted(QUESTIONS)), st.sampled_from(["fc", "twin"]), st.sampled_from([None, 3]))
    ),
    st.sampled_from(["gauss", "repeated", "zero", "float64"]),
    st.sampled_from([1, 20]),
)
@hypothesis.settings(max_examples=40)
def test_the_answers_are_those_to_each_question_alone(
    asked: list[tuple[str, str, int | None]], kind: str, queries: int
) -> None:
    history = plain.history(kind)
    lights = {until: spotlight_of(history, until, queries) for until in (None, 3)}
    empty(history.memory)
    with history.memory.together():
        found = [QUESTIONS[name](lights[until][layer]) for name, layer, until in asked]
    for answer, (name, layer, until) in zip(found, asked, strict=True):
        empty(history.memory)
        assert same(answer, QUESTIONS[name](lights[until][layer])), name


@hypothesis.given(scripts.scripts(), scripts.queries(), st.booleans())
@hypothesis.settings(max_examples=20)
def test_also_where_keys_are_no_numbers(script: scripts.Script, queries: Tensor, absolute: bool) -> None:
    history = script.record()
    attention = scripts.attention_of(history, queries, None)

    def ask() -> list[Any]:
        empty(history.memory)
        return [
            attention.totals(by="label", absolute=absolute),
            attention.timeline(2, absolute=absolute),
            attention.top(2),
            attention.top(2, by="example"),
            attention.scores(),
        ]

    with history.memory.together():
        found = ask()
    assert all(map(same, found, ask()))
    scripts.forget(history)


def test_all_questions_of_a_weight_and_end_step_are_one_pass(passes: list[tuple[int, int, int]]) -> None:
    history = plain.history("gauss")
    empty(history.memory)  # sums that another test's questions left are not read again
    light, earlier = spotlight_of(history), spotlight_of(history, until=3)
    with history.memory.together():
        asked = [ask(light["fc"]) for name, ask in QUESTIONS.items() if name not in ("totals", "top by")]
        asked += [ask(light["twin"]) for name, ask in QUESTIONS.items() if name not in ("totals", "top by")]
        assert passes.count((0, 0, 1)) <= 2 * len(asked), "a look at the first block is no pass"
        passes.clear()
    assert passes == [(0, 0, 1), (0, 1, 3), (0, 3, 6)]
    passes.clear()
    with history.memory.together():
        light["fc"].timeline(), earlier["fc"].timeline(), earlier["fc"].top(1)
    assert sorted(passes) == [(0, 0, 1), (0, 0, 1), (0, 1, 3), (0, 1, 3), (0, 3, 6)]


def test_what_needs_no_pass_makes_none(passes: list[tuple[int, int, int]]) -> None:
    attention = spotlight_of(plain.history("gauss"))["fc"]
    attention.totals(by="label")
    passes.clear()
    with plain.history("gauss").memory.together():
        totals, best, initial = attention.totals(by="label"), attention.top(1, by="example"), attention.initial()
    assert passes == []
    assert totals.values.shape == (2, 4) and best.counts.shape == (2, 1) and initial.shape == (2, 3)


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda answer: answer.values,
    "method": lambda answer: answer.explain(),
    "len": len,
    "iter": list,
    "index": lambda answer: answer[0],
    "in": lambda answer: 1 in answer,
    "bool": bool,
    "compare": lambda answer: answer == 1,
    "add": lambda answer: answer + 1,
    "add to": lambda answer: 1 + answer,
    "matmul": lambda answer: answer @ answer.T,
    "torch": torch.sum,
    "torch in a list": lambda answer: torch.cat([answer, answer]),
    "torch beside": lambda answer: torch.ones(2, 81) * answer,
    "where": lambda answer: torch.where(answer > 0, answer, 0.0),
    "shape": lambda answer: answer.shape,
    "tolist": lambda answer: answer.tolist(),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "format": lambda answer: f"{answer}",
    "html": lambda answer: answer._repr_html_(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_too_early_is_told(read: str) -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    with history.memory.together():
        for answer in (attention.totals(by="label"), attention.scores()):
            with pytest.raises(NotAnsweredYet, match="answered when the together\\(\\) block is left"):
                READS[read](answer)


def test_afterwards_it_is_as_if_it_were_the_answer() -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    with history.memory.together():
        scores, totals, best = attention.scores(), attention.totals(by="label"), attention.top(2)
        groups, timeline = attention.top(2, by="label"), attention.timeline()
        assert repr(totals) == "<Totals: answered when the together() block is left>"
    plainly = attention.scores()
    assert torch.equal(scores, plainly) and len(scores) == 2 and scores[0].equal(plainly[0])
    assert (scores + 1).equal(plainly + 1) and (1 - scores).equal(1 - plainly) and (-scores).equal(-plainly)
    assert (scores @ plainly.T).equal(plainly @ plainly.T) and (plainly @ scores.T).equal(plainly @ plainly.T)
    assert torch.cat([scores, plainly]).equal(torch.cat([plainly, plainly]))
    assert torch.stack(list(scores)).equal(plainly)
    assert (scores > 0).equal(plainly > 0) and bool((scores == plainly).all())
    assert torch.nn.functional.pad(scores, (0, 1)).shape == (2, 82)
    assert scores.numpy().shape == (2, 81) and scores.tolist() == plainly.tolist()
    assert repr(scores) == repr(plainly) and repr(totals) == repr(attention.totals(by="label"))
    assert "<table>" in totals._repr_html_() and totals.explain() == attention.totals(by="label").explain()
    kinds = ((scores, Tensor), (totals, Totals), (best, TopEvents), (groups, TopGroups), (timeline, Timeline))
    assert all(isinstance(answer, kind) for answer, kind in kinds)
    for again in (pickle.loads(pickle.dumps(totals)), copy.deepcopy(totals), copy.copy(totals)):
        assert type(again) is Totals and again.values.equal(totals.values)
    with pytest.raises(AttributeError):
        totals.nothing
    assert bool(totals) and len({scores, totals}) == 2
    with pytest.raises(TypeError):
        len(best)


def test_an_error_inside_leaves_the_questions_unanswered() -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    with pytest.raises(ZeroDivisionError), history.memory.together():
        totals = attention.totals(by="label")
        1 / 0
    with pytest.raises(NotAnsweredYet):
        totals.values
    assert attention.totals(by="label").values.shape == (2, 4), "and the next question is answered at once"


def test_an_error_while_answering_is_told_on_leaving() -> None:
    def kernel(scores: Tensor) -> Tensor:
        return scores[:1, :1]

    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    with pytest.raises(BadQuery, match="a kernel must keep the shape"), history.memory.together():
        output = attention.output(kernel=kernel)
    with pytest.raises(NotAnsweredYet):
        output.shape
    assert attention.output().shape == (2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda attention: attention.top(0),
        lambda attention: attention.totals(by="colour"),
        lambda attention: attention.where(step="first"),
        lambda attention: attention.exclude(colour=1),
        lambda attention: attention.output(kernel="hard"),
        lambda attention: attention.timeline(0),
        lambda attention: attention.contributions(unit=9),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_at_once(wrong: Callable[[Any], Any]) -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    with history.memory.together():
        with pytest.raises(BadQuery):
            wrong(attention)
        asked = attention.top(1)
    assert asked.events.shape == (2, 1)


def test_it_cannot_be_nested_or_entered_again() -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    block = history.memory.together()
    with block:
        before = attention.top(1)
        with pytest.raises(BadCall, match="open on this memory already"), history.memory.together():
            pass
        with pytest.raises(BadCall, match="was entered before"), block:
            pass
        after = attention.top(1)
    assert same(before, after)
    with pytest.raises(BadCall, match="was entered before"), block:
        pass
    assert attention.top(1).events.shape == (2, 1)


def test_two_memories_can_be_asked_at_once() -> None:
    one, other = plain.history("gauss"), plain.history("ties")
    first, second = spotlight_of(one)["fc"], spotlight_of(other)["fc"]
    with one.memory.together(), other.memory.together():
        found = first.top(2), second.top(2)
        with pytest.raises(NotAnsweredYet):
            found[1].events
    with one.memory.together():
        at_once = second.top(2)
        assert at_once.events.shape == (2, 2), "another memory is not waited for"
    assert same(found[0], first.top(2)) and same(found[1], second.top(2))


def test_another_thread_is_not_held_up() -> None:
    history = plain.history("gauss")
    attention = spotlight_of(history)["fc"]
    found: list[Any] = []
    with history.memory.together():
        thread = threading.Thread(target=lambda: found.append(attention.top(2).events))
        thread.start()
        thread.join()
        mine = attention.top(2)
    assert found[0].equal(mine.events)


def test_a_model_that_attends_can_be_run_inside() -> None:
    history = plain.history("float64")
    dual = history.memory.dual(history.model, fold=False)
    x = torch.randn(3, DIM_IN, dtype=torch.float64)
    with history.memory.together():
        inside = dual(x)
        later = history.memory.attend(dual, x)["fc"].output()
    assert torch.allclose(inside, later, rtol=0, atol=1e-10)
    assert history.memory.weights()["fc.weight"].shape == (3, DIM_IN)


def test_nothing_asked_is_nothing_done(passes: list[tuple[int, int, int]]) -> None:
    with plain.history("gauss").memory.together() as nothing:
        assert nothing is None
    assert passes == []
    assert issubclass(NotAnsweredYet, dualform.errors.DualformError)
