"""Every question to a memory, against a loop over the list of its events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
import plain
import scripts
from dualform.queries import Attention
from plain import DIM_IN, DIM_OUT, FINITE, KINDS, Event, History, group_of, in_group

ORDERS = ["largest", "smallest", "absolute"]
COLUMNS = ["label", "name", "step", "example", "position", ("label",), ("name", "label"), ("step", "position")]
COLUMNS += [("step", "label"), ("position", "example")]


@dataclass(frozen=True)
class Question:
    """Some queries to a recorded run, at some end step, read in blocks of some size."""

    kind: str
    queries: Tensor
    until: int | None
    block: int

    @property
    def history(self) -> History:
        return plain.history(self.kind)

    @property
    def attention(self) -> Attention:
        return self.history.memory.attend(None, {"fc": self.queries}, until=self.until)["fc"]

    @property
    def end(self) -> int:
        return self.history.steps if self.until is None else self.until

    @property
    def events(self) -> list[Event]:
        return self.history.until(self.end)


def questions(kinds: Sequence[str] = KINDS) -> st.SearchStrategy[Question]:
    def build(kind: str, of_queries: str, seed: int, count: int, until: int | None, block: int) -> Question:
        return Question(kind, plain.rows(of_queries, np.random.default_rng(seed), count), until, block)

    return st.builds(
        build,
        st.sampled_from(kinds),
        st.sampled_from(["gauss", "ties", "zero", "cancel"]),
        st.integers(0, 2**32),
        st.integers(1, 4),
        st.none() | st.integers(0, 6),
        st.sampled_from([3, 7, 1000]),
    )


def assert_best(
    scores: Sequence[float],
    found: Sequence[int],
    expected: Sequence[float],
    slack: Sequence[float],
    k: int,
    order: str,
) -> None:
    """That these are the k best of `expected`, where each of them is known up to its slack."""
    count = min(k, len(expected))
    assert len(set(found[:count])) == count and set(found[count:]) <= {-1}
    assert all(map(math.isnan, scores[count:]))
    assert all(abs(score - expected[at]) <= slack[at] for score, at in zip(scores, found[:count], strict=False))
    rank = {"largest": lambda v: -v, "smallest": lambda v: v, "absolute": abs}[order]
    rank = (lambda v: -abs(v)) if order == "absolute" else rank
    keys = [(rank(score), at) for score, at in zip(scores, found[:count], strict=False)]
    assert keys == sorted(keys), "best first, ties by number"
    left_out = [at for at in range(len(expected)) if at not in found]
    if count:
        assert all(rank(expected[at]) >= keys[-1][0] - slack[at] for at in left_out)


@hypothesis.given(questions(), st.sampled_from([1, 2, 5, 80, 81, 200]), st.sampled_from(ORDERS))
@hypothesis.settings(max_examples=100)
def test_top_is_the_head_of_the_sorted_scores(asked: Question, k: int, order: str) -> None:
    with plain.blocks_of(asked.block):
        found = asked.attention.top(k, order=order)
    for at, query in enumerate(asked.queries.tolist()):
        scores = [plain.score(event.key, query) for event in asked.events]
        best = plain.best(scores, k, order)
        padding = k - len(best)
        assert found.events[at].tolist() == best + [-1] * padding
        assert plain.same(found.scores[at].tolist(), [scores[event] for event in best] + [math.nan] * padding)
        for name in ("example", "step", "position", "use"):
            told = getattr(found, f"{name}s")[at].tolist()
            assert told == [getattr(asked.events[event], name) for event in best] + [-1] * padding


@hypothesis.given(questions(), st.sampled_from([1, 3, 100]), st.sampled_from(ORDERS), st.sampled_from(COLUMNS))
@hypothesis.settings(max_examples=60)
def test_top_within_is_the_top_of_every_group(asked: Question, k: int, order: str, columns: Any) -> None:
    with plain.blocks_of(asked.block):
        found = asked.attention.top(k, within=columns, order=order)
    assert {group_of(event, columns) for event in asked.events} - {None} <= set(found.groups)
    assert found.scores.shape == found.events.shape == (len(asked.queries), len(found.groups), k)
    for at, query in enumerate(asked.queries.tolist()):
        scores = [plain.score(event.key, query) for event in asked.events]
        for number, group in enumerate(found.groups):
            inside = in_group(asked.events, columns, group)
            best = [inside[i] for i in plain.best([scores[i] for i in inside], k, order)]
            padding = k - len(best)
            assert found.events[at, number].tolist() == best + [-1] * padding
            assert plain.same(found.scores[at, number].tolist(), [scores[i] for i in best] + [math.nan] * padding)


@hypothesis.given(questions(), st.sampled_from(COLUMNS), st.booleans())
@hypothesis.settings(max_examples=60)
def test_totals_are_sums_over_groups(asked: Question, columns: Any, absolute: bool) -> None:
    with plain.blocks_of(asked.block):
        found = asked.attention.totals(by=columns, absolute=absolute)
    assert found.values.shape == (len(asked.queries), len(found.groups))
    assert found.values.dtype == torch.float64
    for at, query in enumerate(asked.queries.tolist()):
        for number, group in enumerate(found.groups):
            terms = [plain.dot(asked.events[i].key, query) for i in in_group(asked.events, columns, group)]
            slack = sum_of_products(asked, columns, group, query)
            terms = [abs(term) for term in terms] if absolute else terms
            assert plain.close(float(found.values[at, number]), terms, slack=slack)


def sum_of_products(asked: Question, columns: Any, group: Any, query: list[float]) -> float:
    """Σ |x_i q_i| over a group: what rounding is relative to."""
    events = (asked.events[i] for i in in_group(asked.events, columns, group))
    return sum(abs(a * b) for event in events for a, b in zip(event.key, query, strict=True))


@hypothesis.given(
    questions([kind for kind in KINDS if kind != "nan"]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from(ORDERS),
    st.sampled_from(COLUMNS),
    st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_top_by_ranks_groups_by_their_sums(asked: Question, k: int, order: str, columns: Any, absolute: bool) -> None:
    with plain.blocks_of(asked.block):
        found = asked.attention.top(k, by=columns, order=order, absolute=absolute)
    groups = sorted({group_of(event, columns) for event in asked.events} - {None})
    members = [in_group(asked.events, columns, group) for group in groups]
    assert found.scores.shape == found.counts.shape == (len(asked.queries), k)
    for at, query in enumerate(asked.queries.tolist()):
        terms = [[plain.dot(asked.events[i].key, query) for i in inside] for inside in members]
        sums = [math.fsum(map(abs, some) if absolute else some) for some in terms]
        slack = [1e-12 * sum_of_products(asked, columns, group, query) for group in groups]
        told = [-1 if group is None else groups.index(group) for group in found.groups[at]]
        assert_best(found.scores[at].tolist(), told, sums, slack, k, order)
        assert found.counts[at].tolist() == [0 if i < 0 else len(members[i]) for i in told]


def test_groups_with_equal_sums_come_in_ascending_order() -> None:
    attention = plain.history("gauss").memory.attend(None, {"fc": torch.zeros(1, DIM_IN)})["fc"]
    for order in ORDERS:
        found = attention.top(10, by="label", order=order)
        assert list(found.groups[0]) == [0, 2, 5, 7, *[None] * 6]


def test_a_group_whose_sum_is_not_a_number_comes_after_all_that_are() -> None:
    history = plain.history("nan")
    for order in ORDERS:
        found = history.memory.attend(None, {"fc": torch.ones(1, DIM_IN)})["fc"].top(9, by="example", order=order)
        sums = {
            example: sum(plain.dot(event.key, [1.0] * DIM_IN) for event in history.events if event.example == example)
            for example in range(9)
        }
        numbers = [example for example, value in sums.items() if not math.isnan(value)]
        assert 0 < len(numbers) < 9
        assert set(found.groups[0][: len(numbers)]) == set(numbers)
        assert found.scores[0, len(numbers) :].isnan().all()


def contribution(asked: Question, event: Event, query: list[float], v: list[float], use: int = 0) -> list[float]:
    """The two terms of a contribution along v: through the weight, and through the bias."""
    along = math.fsum(map(float.__mul__, event.gradient, v))
    alpha = plain.dot(event.key, query)
    weight = asked.history.coefficient(event, asked.end)
    return [alpha * weight * along, asked.history.bias_coefficient(event, asked.end, use) * along]


@hypothesis.given(
    questions(FINITE), st.sampled_from([1, 4, 200]), st.sampled_from(ORDERS), st.none() | st.integers(0, DIM_OUT - 1)
)
@hypothesis.settings(max_examples=60)
def test_top_contributions_to_a_unit_or_along_a_direction(
    asked: Question, k: int, order: str, unit: int | None
) -> None:
    v = [1.0, -1.0, 0.5] if unit is None else [float(at == unit) for at in range(DIM_OUT)]
    with plain.blocks_of(asked.block):
        if unit is None:
            found = asked.attention.contributions(direction=v).top(k, order=order)
        else:
            found = asked.attention.contributions(unit=unit).top(k, order=order)
    for at, query in enumerate(asked.queries.tolist()):
        terms = [contribution(asked, event, query, v) for event in asked.events]
        sizes = [math.fsum(map(abs, pair)) for pair in terms]
        along = [sum(abs(a * b) for a, b in zip(event.gradient, v, strict=True)) for event in asked.events]
        # α and g·v are rounded to fp32 before they are multiplied.
        slack = [1e-6 * size + 1e-14 * scale for size, scale in zip(sizes, along, strict=True)]
        expected = [math.fsum(pair) for pair in terms]
        assert_best(found.scores[at].tolist(), found.events[at].tolist(), expected, slack, k, order)


@pytest.mark.parametrize("order", ORDERS)
def test_every_query_may_have_its_own_unit_or_direction(order: str) -> None:
    queries = plain.rows("gauss", np.random.default_rng(4), 6).reshape(2, 3, DIM_IN)
    attention = plain.history("gauss").memory.attend(None, {"fc": queries})["fc"]
    units = torch.tensor([[0, 2, 1], [1, 1, 0]])
    directions = torch.randn(2, 3, DIM_OUT, generator=torch.Generator().manual_seed(0))
    by_unit, along = attention.contributions(unit=units), attention.contributions(direction=directions)
    for flat, at in enumerate(np.ndindex(2, 3)):
        one = attention[at]
        alone = one.contributions(unit=int(units[at])), one.contributions(direction=directions[at])
        for every, single in zip((by_unit, along), alone, strict=True):
            for options in ({}, {"within": "label"}):
                found, expected = every.top(5, order=order, **options), single.top(5, order=order, **options)
                assert found.events[flat].equal(expected.events[0])
                assert torch.equal(found.scores[flat], expected.scores[0])
            totals = every.totals(by="label", absolute=order == "absolute").values[flat]
            expected = single.totals(by="label", absolute=order == "absolute").values[0]
            assert torch.allclose(totals, expected, rtol=1e-12, atol=1e-12)
    chosen = by_unit.where(label=7).top(3)
    assert chosen.events[4].equal(attention[1, 1].where(label=7).contributions(unit=1).top(3).events[0])


@hypothesis.given(questions(FINITE), st.sampled_from(COLUMNS), st.booleans())
@hypothesis.settings(max_examples=40)
def test_totals_of_contributions_along_a_direction(asked: Question, columns: Any, absolute: bool) -> None:
    v = [0.3, 0.0, -2.0]
    with plain.blocks_of(asked.block):
        found = asked.attention.contributions(direction=torch.tensor(v)).totals(by=columns, absolute=absolute)
        best = asked.attention.contributions(direction=v).top(2, by=columns, absolute=absolute)
    v = torch.tensor(v).tolist()
    for at, query in enumerate(asked.queries.tolist()):
        for number, group in enumerate(found.groups):
            inside = [asked.events[i] for i in in_group(asked.events, columns, group)]
            parts = [contribution(asked, event, query, v) for event in inside]
            terms = [abs(sum(pair)) for pair in parts] if absolute else [term for pair in parts for term in pair]
            value = float(found.values[at, number])
            assert plain.close(value, terms, slack=size_of(asked, inside, query))
            if group in best.groups[at]:
                ranked = float(best.scores[at, best.groups[at].index(group)])
                assert plain.close(ranked, terms, relative=1e-6, slack=size_of(asked, inside, query))


def size_of(asked: Question, events: Sequence[Event], query: list[float]) -> float:
    """What rounding is relative to in a sum of contributions."""
    return sum(
        (1 + sum(abs(a * b) for a, b in zip(event.key, query, strict=True))) * sum(map(abs, event.gradient))
        for event in events
    )


@hypothesis.given(questions(FINITE), st.sampled_from(COLUMNS), st.sampled_from(["fc", "twin"]))
@hypothesis.settings(max_examples=40)
def test_totals_of_whole_contributions_are_vectors(asked: Question, columns: Any, layer: str) -> None:
    with plain.blocks_of(asked.block):
        spotlight = asked.history.memory.attend(None, {layer: asked.queries}, until=asked.until)
        found = spotlight[layer].contributions().totals(by=columns)
    assert found.values.shape == (len(asked.queries), len(found.groups), DIM_OUT)
    for at, query in enumerate(asked.queries.tolist()):
        for number, group in enumerate(found.groups):
            inside = [asked.events[i] for i in in_group(asked.events, columns, group)]
            for unit in range(DIM_OUT):
                v = [float(at == unit) for at in range(DIM_OUT)]
                use = ("fc", "twin").index(layer)
                terms = [term for event in inside for term in contribution(asked, event, query, v, use)]
                value = float(found.values[at, number, unit])
                assert plain.close(value, terms, slack=size_of(asked, inside, query))


@hypothesis.given(questions(FINITE), st.sampled_from([1, 4, 200]))
@hypothesis.settings(max_examples=40)
def test_top_of_whole_contributions_ranks_by_the_error_norm(asked: Question, k: int) -> None:
    with plain.blocks_of(asked.block):
        found = asked.attention.contributions().top(k)
    for at, query in enumerate(asked.queries.tolist()):
        expected = [
            abs(plain.dot(event.key, query))
            * abs(asked.history.coefficient(event, asked.end))
            * math.hypot(*event.gradient)
            for event in asked.events
        ]
        slack = [1e-6 * number + 1e-14 * size_of(asked, [event], query)
                 for number, event in zip(expected, asked.events, strict=True)]  # fmt: skip
        assert_best(found.scores[at].tolist(), found.events[at].tolist(), expected, slack, k, "largest")


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e25])
def test_the_error_norm_of_a_small_or_large_gradient_is_not_lost(tmp_path: Any, size: float) -> None:
    x = torch.tensor([[0.5, 0.25], [3.0, -1.0], [1.0, 2.0]])
    g = torch.tensor([[0.0, -2.0], [1.0, 0.0], [3.0, 4.0]]) * size
    memory = record_linear(tmp_path / "run", [x], [g])
    found = memory.attend(None, {"0": torch.ones(1, 2)})["0"].contributions().top(3)
    sizes = (x.double().sum(dim=1).abs() * g.double().norm(dim=1) * 0.125).tolist()
    assert found.events[0].tolist() == plain.best(sizes, 3)
    assert found.scores[0].tolist() == pytest.approx(sorted(sizes, reverse=True), rel=1e-6, abs=0)


def record_linear(path: Any, inputs: list[Tensor], gradients: list[Tensor], **options: Any) -> dualform.Memory:
    """One linear layer, plain SGD with lr 1/8, one step for each input; its gradients are the given ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs[0].shape[-1], gradients[0].shape[-1], dtype=inputs[0].dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for x, g in zip(inputs, gradients, strict=True):
            with recorder.batch(torch.arange(len(x))):
                (model(x) * g).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path)


def test_a_backward_pass_that_was_dropped_contributes_nothing(tmp_path: Any) -> None:
    """As under a loss scaler: a pass overflowed, its step was skipped and its gradients were cleared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    with dualform.record(model, optimizer, tmp_path / "run", examples={"label": [0, 1]}) as recorder:
        for scale in (1.0, math.inf, 2.0):
            with recorder.batch(torch.arange(2)):
                (model(x) * torch.tensor([[1.0, 2.0], [0.5, 1.0]]) * scale).sum().backward()
            if math.isfinite(scale):
                optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    contributions = memory.attend(model, x)["0"].contributions
    for asked in (contributions(unit=0), contributions()):
        found = asked.top(6)
        told = dict(zip(found.events[0].tolist(), found.scores[0].tolist(), strict=True))
        assert (told.get(2), told.get(3)) == (0.0, 0.0)
        assert asked.top(2, by="label").scores.isfinite().all()
        assert asked.totals(by="label").values.isfinite().all()
    many = memory.attend(model, x.repeat(20, 1))["0"]
    assert many.output().isfinite().all()
    for asked in (many.contributions(unit=0), many.contributions()):
        assert asked.totals(by="label").values.isfinite().all()


@hypothesis.given(questions(FINITE), st.sampled_from(["fc", "twin"]))
@hypothesis.settings(max_examples=60)
def test_initial_plus_all_contributions_is_the_output(asked: Question, layer: str) -> None:
    use = ("fc", "twin").index(layer)
    history, end = asked.history, asked.end
    with plain.blocks_of(asked.block):
        attention = history.memory.attend(None, {layer: asked.queries}, until=asked.until)[layer]
        output, initial = attention.output(), attention.initial()
        summed = initial + attention.contributions().totals(by="step").values.sum(dim=1)
    kept = plain.response(plain.OF_WEIGHTS, end, 0, 1.0), plain.response(plain.OF_BIASES, end, 0, 1.0)
    weight, bias = history.initial["fc.weight"].tolist(), history.initial[f"{layer}.bias"].tolist()
    for at, query in enumerate(asked.queries.tolist()):
        scale = size_of(asked, asked.events, query) + sum(map(abs, query)) + 1
        for unit in range(DIM_OUT):
            v = [float(i == unit) for i in range(DIM_OUT)]
            start = kept[0] * plain.dot(weight[unit], query) + kept[1] * bias[unit]
            terms = [term for event in asked.events for term in contribution(asked, event, query, v, use)]
            assert abs(float(initial[at, unit]) - start) <= 1e-12 * scale
            assert abs(float(output[at, unit]) - math.fsum([start, *terms])) <= 1e-12 * scale
            assert abs(float(output[at, unit] - summed[at, unit])) <= 1e-12 * scale


@hypothesis.given(
    scripts.scripts(scripts.FAMILIES[:-1]),
    st.sampled_from(scripts.COLUMNS),
    scripts.narrowings(),
    st.none() | st.integers(0, 6),
    st.integers(0, 2**32),
    st.sampled_from(["unit", "units", "direction"]),
)
@hypothesis.settings(max_examples=40)
def test_contributions_of_many_queries_are_summed_before_they_are_multiplied(
    script: scripts.Script, columns: Any, narrowing: list[scripts.Narrow], until: int | None, seed: int, along: str
) -> None:
    history = script.record()
    until = None if until is None else min(until, history.steps)
    end = history.steps if until is None else until
    queries = plain.rows("gauss", np.random.default_rng(seed), 50)
    vectors = {"unit": torch.eye(3)[[1] * 50], "units": torch.eye(3)[torch.arange(50) % 3]}
    vectors["direction"] = torch.tensor([[0.5, -2.0, 1.0]]).expand(50, -1)
    v = vectors[along].tolist()
    attention = scripts.attention_of(history, queries, until)
    contributions = {
        "unit": lambda: attention.contributions(unit=1),
        "units": lambda: attention.contributions(unit=torch.arange(50) % 3),
        "direction": lambda: attention.contributions(direction=v[0]),
    }[along]()
    found = scripts.narrowed(contributions, narrowing).totals(by=columns)
    assert found.explanation.way == "sums of weighted keys"
    best = scripts.narrowed(contributions, narrowing).top(1, by=columns)
    events = scripts.kept(history.until(end), narrowing)
    for at in range(0, 50, 7):
        query = queries[at].tolist()
        for number, group in enumerate(found.groups):
            inside = [events[i] for i in in_group(events, columns, group)]
            parts = [_parts(history, event, query, v[at], end) for event in inside]
            scale = sum((1 + sum(map(abs, event.key))) * sum(map(abs, event.gradient)) for event in inside) * 10
            assert plain.close(float(found.values[at, number]), [t for pair in parts for t in pair], slack=scale)
        there = {group_of(event, columns) for event in events} - {None}
        assert (best.groups[at][0] in there) if there else best.groups[at] == [None]
        if there:
            assert float(best.scores[at, 0]) == pytest.approx(
                max(float(found.values[at, list(found.groups).index(g)]) for g in there), abs=1e-9
            )
    scripts.forget(history)


def _parts(history: History, event: Event, query: list[float], v: list[float], end: int) -> list[float]:
    along = math.fsum(map(float.__mul__, event.gradient, v))
    weight, bias = history.coefficient(event, end), history.bias_coefficient(event, end)
    return [plain.dot(event.key, query) * weight * along, bias * along]


def alike(one: Tensor, other: Tensor) -> bool:
    """Near each other where both are finite, and the same infinities and NaN."""
    whole = one.isfinite()
    same = torch.equal(one.nan_to_num(0.5, 1e300, -1e300)[~whole], other.nan_to_num(0.5, 1e300, -1e300)[~whole])
    size = float(one[whole].abs().max()) if bool(whole.any()) else 0.0
    return (
        same
        and torch.equal(whole, other.isfinite())
        and torch.allclose(one[whole], other[whole], rtol=1e-9, atol=1e-11 * size)
    )


@hypothesis.given(scripts.scripts(), scripts.queries(), st.sampled_from(scripts.COLUMNS), scripts.narrowings())
@hypothesis.settings(max_examples=60)
def test_every_way_spoils_the_same_sums(
    script: scripts.Script, queries: Tensor, columns: Any, narrowing: list[scripts.Narrow]
) -> None:
    """NaN and infinities in keys, gradients and queries are in the answers that a scan has them in."""
    history = script.record()
    many = queries.repeat(20, 1)
    attention = scripts.narrowed(scripts.attention_of(history, many, None), narrowing)
    output = attention.output()
    totals = [attention.contributions(unit=1).totals(by=columns), attention.contributions().totals(by=columns)]
    one_by_one = [attention[at].output() for at in range(len(queries))]
    history.memory.resident = 0
    scanned = [attention.contributions(unit=1).totals(by=columns), attention.contributions().totals(by=columns)]
    for found, plainly in zip(totals, scanned, strict=True):
        assert plainly.explanation.way == "sums over a full scan"
        assert alike(found.values, plainly.values), found.explanation.way
    for at, alone in enumerate(one_by_one):
        assert alike(output[at], alone)
    scripts.forget(history)


@pytest.mark.parametrize("kind", ["gauss", "ties", "repeated", "zero"])
def test_the_output_is_that_of_the_trained_layer(kind: str) -> None:
    history = plain.history(kind)
    x = plain.rows("gauss", np.random.default_rng(3), 4)
    spotlight = history.memory.attend(None, {"fc": x, "twin": x})
    for layer in ("fc", "twin"):
        module = getattr(history.model, layer)
        truth = x.double() @ module.weight.detach().double().T + module.bias.detach().double()
        assert torch.allclose(spotlight[layer].output(), truth, rtol=0, atol=2e-5 * float(truth.abs().max()))


@pytest.mark.parametrize("until", range(7))
def test_until_counts_only_the_events_of_the_first_steps(until: int) -> None:
    history = plain.history("gauss")
    attention = history.memory.attend(None, {"fc": torch.ones(1, DIM_IN)}, until=until)["fc"]
    assert attention.scores().shape == (1, len(history.until(until)))
    found = attention.top(100)
    assert int((found.events >= 0).sum()) == len(history.until(until))
    assert int(found.steps.max()) == (until or -1)


def test_queries_keep_their_leading_dimensions() -> None:
    memory = plain.history("gauss").memory
    queries = plain.rows("gauss", np.random.default_rng(2), 24).reshape(2, 3, 4, DIM_IN)
    attention = memory.attend(None, {"fc": queries})["fc"]
    assert attention.query_shape == (2, 3, 4) and len(attention) == 24
    assert attention.output().shape == attention.initial().shape == (2, 3, 4, DIM_OUT)
    assert attention.output(kernel="softmax").shape == (2, 3, 4, DIM_OUT)
    flat = attention.top(3).events
    assert flat.shape == (24, 3)
    for index in [(..., -1), (0,), (slice(None), 1), (1, 2, 3), (torch.tensor([1, 0, 1]),), (..., [3, 0]), (None, 1)]:
        picked = attention[index]
        expected = flat.reshape(2, 3, 4, 3)[(*index, slice(None))]
        assert picked.query_shape == tuple(expected.shape[:-1])
        assert picked.top(3).events.equal(expected.reshape(-1, 3))
        assert picked.output().shape == (*picked.query_shape, DIM_OUT)
        assert picked.queries.equal(queries[(*index, slice(None))].reshape(-1, DIM_IN))
    mask = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    assert attention[mask].top(3).events.equal(flat.reshape(2, 3, 4, 3)[mask].reshape(-1, 3))


def test_picking_and_narrowing_can_be_chained() -> None:
    memory = plain.history("gauss").memory
    queries = plain.rows("gauss", np.random.default_rng(2), 6).reshape(2, 3, DIM_IN)
    attention = memory.attend(None, {"fc": queries})["fc"]
    one = attention[0].where(label=7)[-1].contributions(unit=1).top(4)
    other = attention.where(label=7)[0, 2].contributions(unit=1).top(4)
    assert one.events.equal(other.events) and one.scores.equal(other.scores)
    assert one.events.shape == (1, 4)


def test_a_module_that_is_called_twice_in_a_forward_has_two_rows_of_queries(tmp_path: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.fc(x)))

    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys: list[Tensor] = []
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64)
            keys += [x, torch.tanh(model.fc(x)).detach()]
            with recorder.batch(torch.arange(4)):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    x = torch.randn(5, 3, dtype=torch.float64)
    inner = torch.tanh(model.fc(x)).detach()
    attention = memory.attend(model, x)["fc"]
    assert attention.query_shape == (2, 5)
    assert attention.queries.equal(torch.cat([x, inner]))
    truth = torch.cat([x, inner]) @ torch.cat(keys).T
    assert torch.allclose(attention.scores().double(), truth, rtol=1e-6, atol=1e-6)
    assert torch.allclose(attention[1].output(), model(x).detach(), rtol=1e-12, atol=1e-12)
    assert attention.top(24).examples.min() >= 0


@pytest.mark.parametrize("k", [0, -1, True])
def test_k_must_be_a_positive_whole_number(k: Any) -> None:
    attention = plain.history("gauss").memory.attend(None, {"fc": torch.ones(1, DIM_IN)})["fc"]
    for asked in (attention, attention.contributions(unit=0), attention.contributions()):
        with pytest.raises(dualform.errors.BadQuery, match="k must be a whole number of at least 1"):
            asked.top(k)


def test_a_question_that_makes_no_sense_is_refused() -> None:
    attention = plain.history("gauss").memory.attend(None, {"fc": torch.ones(1, DIM_IN)})["fc"]
    refused = dualform.errors.BadQuery
    with pytest.raises(refused, match="order must be one of"):
        attention.top(3, order="best")
    with pytest.raises(refused, match="by or within, not both"):
        attention.top(3, by="label", within="label")
    with pytest.raises(refused, match="needs by="):
        attention.top(3, absolute=True)
    with pytest.raises(refused, match=r"no column 'colour'.*label, name"):
        attention.totals(by="colour")
    with pytest.raises(refused, match="cannot form groups"):
        attention.totals(by="pair")
    with pytest.raises(refused, match="a column or a tuple"):
        attention.totals(by=())
    with pytest.raises(refused, match="not both"):
        attention.contributions(unit=1, direction=[1.0, 0.0, 0.0])
    with pytest.raises(refused, match=r"direction must have shape \[3\]"):
        attention.contributions(direction=[1.0, 0.0])
    two = plain.history("gauss").memory.attend(None, {"fc": torch.ones(2, DIM_IN)})["fc"]
    for unit in (torch.tensor([0, 1, 2]), torch.tensor([[0, 1]]), torch.tensor([0.0, 1.0]), torch.tensor([0, 3])):
        with pytest.raises(refused):
            two.contributions(unit=unit)
    with pytest.raises(refused, match=r"direction must have shape \[3\]"):
        two.contributions(direction=torch.ones(3, 3))
    for unit in (-1, 3, True):
        with pytest.raises(refused, match="unit must be a whole number from 0 to 2"):
            attention.contributions(unit=unit)
    with pytest.raises(refused, match="needs contributions to a unit"):
        attention.contributions().totals(by="label", absolute=True)


def test_a_memory_of_keys_answers_what_keys_can_answer() -> None:
    history = plain.history("keys only")
    attention = history.memory.attend(history.model, torch.ones(2, DIM_IN))["fc"]
    assert attention.top(3).events.shape == (2, 3)
    assert attention.totals(by="label").values.shape == (2, 4)
    asks = [
        lambda: attention.contributions(unit=0),
        lambda: attention.output(),
        lambda: attention.initial(),
        lambda: history.memory.weights(),
        lambda: history.memory.dual(history.model),
        lambda: history.memory.compact("fc"),
    ]
    for ask in asks:
        with pytest.raises(dualform.errors.NotKept, match="keep='all'"):
            ask()
