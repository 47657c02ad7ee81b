"""One score: the exact dot product rounded once to fp32, the same bits however it was asked for."""

import math
from fractions import Fraction
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dualform
import plain
from dualform.queries.score import scores, square_norms

ROWS = [kind for kind in plain.KINDS if kind != "keys only"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
numbers32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
numbers64 = st.floats(min_value=-1e150, max_value=1e150)


def bits(tensor: Tensor) -> Tensor:
    """The bits, with one zero: its sign has a test of its own."""
    return (tensor + 0.0).contiguous().view(torch.int32)


def plain_scores(keys: Tensor, queries: Tensor) -> list[list[float]]:
    return [[plain.score(key, query) for key in keys.tolist()] for query in queries.tolist()]


def assert_exact(keys: Tensor, queries: Tensor) -> None:
    for found, expected in zip(scores(keys, queries).tolist(), plain_scores(keys, queries), strict=True):
        assert plain.same(found, expected)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Keys and queries of any kinds, a few rows of any width."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = draw(st.integers(1, 40))
    keys, queries = (
        plain.rows(draw(st.sampled_from(ROWS)), generator, draw(st.integers(0, 6)), width) for _ in range(2)
    )
    return keys, queries


@hypothesis.given(drawn())
@hypothesis.settings(max_examples=200)
def test_a_score_is_the_exact_dot_product_rounded_to_nearest(drawn: tuple[Tensor, Tensor]) -> None:
    assert_exact(*drawn)


@hypothesis.given(st.integers(1, 4).flatmap(lambda n: st.tuples(*[st.lists(numbers32, min_size=n, max_size=n)] * 3)))
@hypothesis.settings(max_examples=200)
def test_a_score_of_any_fp32_numbers_is_exact(rows: tuple[list[float], ...]) -> None:
    assert_exact(torch.tensor(rows[:2]), torch.tensor(rows[2:]))


@hypothesis.given(st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(numbers64, min_size=n, max_size=n)] * 2)))
@hypothesis.settings(max_examples=200)
def test_a_score_of_fp64_numbers_is_exact(rows: tuple[list[float], ...]) -> None:
    assert_exact(torch.tensor(rows[:1], dtype=torch.float64), torch.tensor(rows[1:], dtype=torch.float64))


@pytest.mark.parametrize("of_keys", DTYPES, ids=str)
@pytest.mark.parametrize("of_queries", DTYPES, ids=str)
def test_keys_and_queries_may_have_any_dtype(of_keys: torch.dtype, of_queries: torch.dtype) -> None:
    generator = np.random.default_rng(5)
    keys, queries = (plain.rows("gauss", generator, count, 33) for count in (7, 3))
    assert_exact(keys.to(of_keys), queries.to(of_queries))


def test_a_sum_on_the_border_of_two_fp32_numbers_goes_to_the_even_one() -> None:
    one, half_a_step, hair = 1.0, 2.0**-24, 2.0**-80
    keys = torch.tensor([[one, half_a_step, 0.0], [one, half_a_step, hair], [one, half_a_step, -hair]])
    keys = torch.cat([keys, keys + torch.tensor([2.0**-23, 0.0, 0.0])])
    found = scores(keys, torch.ones(1, 3))[0].tolist()
    up = 1.0 + 2.0**-23
    assert found == [1.0, up, 1.0, 1.0 + 2.0**-22, 1.0 + 2.0**-22, up]


def test_a_sum_just_below_the_overflow_of_fp32_is_its_largest_number() -> None:
    # 31 · 1082401 = 2^25 − 1, so the first product is exactly the border between the largest number and infinity.
    keys = torch.tensor([[31 * 2.0**51, 1.0]])
    queries = torch.tensor([[1082401 * 2.0**52, hair] for hair in (-1.0, 0.0, 1.0)])
    largest = torch.finfo(torch.float32).max
    assert scores(keys, queries)[:, 0].tolist() == [largest, math.inf, math.inf]


def test_huge_fp64_products_that_cancel_are_exact() -> None:
    keys = torch.tensor([[1e200, -1e200, 3.0]], dtype=torch.float64)
    queries = torch.tensor([[1e200, 1e200, 2.0]], dtype=torch.float64)
    assert scores(keys, queries).tolist() == [[6.0]]


def test_an_infinite_or_missing_number_makes_an_infinite_or_missing_score() -> None:
    keys = torch.tensor([[math.inf, 1.0], [math.nan, 0.0], [-math.inf, math.inf], [math.inf, 0.0]])
    found = scores(keys, torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist()
    assert plain.same(found[0], [math.inf, math.nan, math.nan, math.inf])
    assert plain.same(found[1], [math.nan, math.nan, math.nan, math.nan])


@hypothesis.given(drawn(), st.integers(1, 3))
@hypothesis.settings(max_examples=100)
def test_the_bits_do_not_depend_on_the_split(drawn: tuple[Tensor, Tensor], size: int) -> None:
    keys, queries = drawn
    whole = scores(keys, queries)
    by_query = [scores(keys, queries[at : at + size]) for at in range(0, len(queries), size)]
    by_key = [scores(keys[at : at + size], queries) for at in range(0, len(keys), size)]
    numbers = ~whole.isnan()
    for part in ([torch.cat(by_query)] if by_query else []) + ([torch.cat(by_key, dim=1)] if by_key else []):
        assert bits(part)[numbers].equal(bits(whole)[numbers])
        assert part.isnan().equal(~numbers)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_score_of_zero_has_one_sign(value: float) -> None:
    # Whether −0 · 1 + … starts from 0 or from the first product differs between a matrix product and a vector's.
    for keys in (1, 2, 5, 16):
        for queries in (1, 2, 5, 16):
            for width in (1, 2, 8, 33):
                found = scores(torch.full((keys, width), value), -torch.ones(queries, width))
                assert not found.signbit().any(), (keys, queries, width)


@pytest.mark.parametrize("kind", plain.KINDS)
@pytest.mark.parametrize("block", [1, 4, 1000])
def test_scores_of_a_memory_are_exact_whatever_the_blocks(kind: str, block: int) -> None:
    history = plain.history(kind)
    queries = plain.rows("gauss", np.random.default_rng(1), 3)
    with plain.blocks_of(block):
        found = history.memory.attend(None, {"fc": queries})["fc"].scores()
        one_by_one = [history.memory.attend(None, {"fc": query})["fc"].scores() for query in queries]
    expected = [[plain.score(event.key, query) for event in history.events] for query in queries.tolist()]
    assert all(plain.same(a, b) for a, b in zip(found.tolist(), expected, strict=True))
    numbers = ~found.isnan()
    assert bits(torch.cat(one_by_one))[numbers].equal(bits(found)[numbers])


def test_all_scores_are_refused_where_they_do_not_fit() -> None:
    attention = plain.history("gauss").memory.attend(None, {"fc": torch.ones(2, plain.DIM_IN)})["fc"]
    with (
        mock.patch("dualform.queries.spotlight.SCORES_BYTES", 4 * 2 * 81 - 1),
        pytest.raises(dualform.errors.BadQuery, match="fewer queries"),
    ):
        attention.scores()
    with mock.patch("dualform.queries.spotlight.SCORES_BYTES", 4 * 2 * 81):
        assert attention.scores().shape == (2, 81)


@hypothesis.given(drawn())
def test_a_square_norm_is_the_score_of_a_row_with_itself(drawn: tuple[Tensor, Tensor]) -> None:
    rows, _ = drawn
    rows = rows[rows.isfinite().all(dim=1)]
    expected = [plain.nearest_fp32(sum((Fraction(x) ** 2 for x in row), Fraction(0))) for row in rows.tolist()]
    assert square_norms(rows).tolist() == expected
