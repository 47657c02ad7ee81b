"""The compiled loops say what the plainest computation says."""

import hypothesis
import numba
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dualform import compiled
from dualform.compiled.lanes import (
    SEVERAL,
    bounds_into,
    lowest_bit,
    narrow_product,
    not_below,
    reaching,
    several_reaching,
)
from dualform.compiled.nearby import best_first, error_of, others, product, put, scaling_of
from dualform.fast import LANES, SPANS
from dualform.queries import shadow
from dualform.queries.best import _pick
from dualform.queries.reducers import ORDERS


@hypothesis.given(
    queries=st.integers(1, 4), k=st.integers(1, 6), order=st.sampled_from(ORDERS), seed=st.integers(0, 10_000),
    nan=st.booleans(),
)  # fmt: skip
def test_the_best_are_picked_as_by_sorting(queries: int, k: int, order: str, seed: int, nan: bool) -> None:
    generator = np.random.default_rng(seed)
    pairs, events = generator.integers(0, 40), 12
    at_query, event = generator.integers(queries, size=pairs), generator.integers(events, size=pairs)
    # Few different scores, so that there are ties, and each pair its own one, so that some come several times.
    table = generator.integers(-2, 3, size=(queries, events)).astype(np.float32) * np.float32(0.5)
    if nan:
        table[generator.random(table.shape) < 0.2] = np.nan
    scores = table[at_query, event]
    columns = tuple(torch.arange(events) * 10 + column for column in range(5))
    answers = []
    for way in ("plain", "compiled"):
        result, numbers = torch.full((queries, k), torch.nan), torch.full((queries, k, 5), -1)
        if way == "plain":
            given = (torch.from_numpy(part) for part in (at_query, event, scores))
            count = _pick(*given, order, columns, result, numbers)
        else:
            arrays = tuple(column.numpy() for column in columns)
            filled = result.numpy(), numbers.numpy()
            count = compiled.pick(at_query, event, scores, ORDERS.index(order), arrays, *filled)
        answers.append((result, numbers, count))
    (one, numbers, count), (other, also, again) = answers
    assert one.nan_to_num(7.0).equal(other.nan_to_num(7.0))
    assert numbers.equal(also)
    assert count == again == int(np.isnan(scores).sum())
    for query in range(queries):
        rank = {"largest": lambda v: -v, "smallest": lambda v: v, "absolute": lambda v: -abs(v)}[order]
        found = {(rank(float(score)), int(at)) for score, at, q in zip(scores, event, at_query, strict=True)
                 if q == query and not np.isnan(score)}  # fmt: skip
        wanted = [at * 10 for _, at in sorted(found)[:k]]
        assert numbers[query, :, 0].tolist() == wanted + [-1] * (k - len(wanted))


@hypothesis.given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30), st.integers(1, 8))
def test_a_heap_holds_the_largest(values: list[float], k: int) -> None:
    heap = np.full(k, -np.inf, np.float32)
    for value in values:
        if value > heap[0]:
            put(heap, np.float32(value))
    held = [value for value in sorted(heap.tolist(), reverse=True) if value > -np.inf]
    assert held == sorted(values, reverse=True)[:k]
    assert heap[0] == heap.min()


@numba.njit
def bits_of(levels, asked, block, query, enough):
    return reaching(levels, asked, block, query, enough)


@numba.njit
def bounds_of(levels, asked, block, query, result, at):
    bounds_into(levels, asked, block, query, result, at)


@numba.njit
def bits_of_several(levels, asked, block, query, thresholds, extra, bits, to):
    several_reaching(levels, asked, block, query, thresholds, extra, bits, to)


@numba.njit
def bits_of_values(values, at, enough):
    return not_below(values, at, enough)


@numba.njit
def narrow_product_of(rows, row, queries, query):
    return narrow_product(rows, row, queries, query)


@numba.njit
def lowest_of(bits):
    return lowest_bit(bits)


def test_the_lowest_bit_is_found() -> None:
    for bit in range(32):
        assert lowest_of(np.uint32(1 << bit)) == bit
        assert lowest_of(np.uint32((1 << bit) | (1 << 31))) == bit


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lanes_reach_what_their_products_reach(count: int) -> None:
    generator = np.random.default_rng(count)
    blocks, queries = 3, 5
    spans = SPANS[:count]
    levels = tuple(
        generator.standard_normal((blocks, stop - start + 1, LANES)).astype(np.float32) for start, stop in spans
    )
    asked = tuple(generator.standard_normal((queries, stop - start + 1)).astype(np.float32) for start, stop in spans)

    for block in range(blocks):
        for query in range(queries):
            wide = sum(asked[at][query, :-1].astype(np.float64) @ levels[at][block, :-1] for at in range(count))
            wide += asked[-1][query, -1].astype(np.float64) * levels[-1][block, -1]
            bounds = np.zeros(LANES + 4, np.float32)
            bounds_of(levels, asked, block, query, bounds, 2)
            assert np.allclose(bounds[2:-2], wide, rtol=1e-5, atol=1e-5)
            assert not bounds[:2].any() and not bounds[-2:].any()
            for enough in (-100.0, -1.0, 0.3, 2.0, 100.0):
                bits = bits_of(levels, asked, block, query, np.float32(enough))
                assert [bool(bits >> lane & 1) for lane in range(LANES)] == (
                    bounds[2:-2] >= np.float32(enough)
                ).tolist()
                assert bits_of_values(bounds, 2, np.float32(enough)) == bits
        thresholds = generator.standard_normal(queries).astype(np.float32)
        for query in range(queries - SEVERAL + 1):
            several = np.zeros(SEVERAL + 2, np.uint32)
            bits_of_several(levels, asked, block, query, thresholds, np.float32(0.25), several, 1)
            alone = [bits_of(levels, asked, block, query + at, thresholds[query + at] - np.float32(0.25))
                     for at in range(SEVERAL)]  # fmt: skip
            assert several.tolist() == [0, *alone, 0]


@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 65, 80, 255, 800, 4099])
def test_products_in_fp32_err_by_no_more_than_they_say(width: int) -> None:
    generator = np.random.default_rng(width)
    rows, queries = (generator.standard_normal((3, width)).astype(np.float32) for _ in range(2))
    rows[1], queries[1] = 1.0, np.float32(1 / 3)  # every rounding in the same direction
    queries[2] = -np.sign(rows[2]) * np.float32(0.1)
    exact = rows.astype(np.float64) @ queries.astype(np.float64).T
    sizes = np.linalg.norm(rows.astype(np.float64), axis=1)[:, None] * np.linalg.norm(
        queries.astype(np.float64), axis=1
    )
    for row in range(3):
        for query in range(3):
            found = float(narrow_product_of(rows, row, queries, query))
            assert abs(found - exact[row, query]) <= error_of(width) * sizes[row, query]


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-22, 1e-10, 1.0, 1e10, 1e18, 1e37])
@pytest.mark.parametrize("other", [1e-44, 1e-20, 1.0, 1e20, 1e37])
def test_products_hold_where_fp32_overflows_and_underflows(size: float, other: float) -> None:
    generator = np.random.default_rng(0)
    width = 100
    keys = (generator.standard_normal((4, width)) * size / 10).astype(np.float32)
    queries = (generator.standard_normal((1, width)) * other / 10).astype(np.float32)
    lengths, norms = (np.linalg.norm(part.astype(np.float64), axis=1) for part in (keys, queries))
    if not lengths.all() or not norms.all():
        return
    scale = float(2.0 ** np.ceil(np.log2(lengths.max())))
    scaling = scaling_of(width, norms, (1.0, scale, scale))
    for key in range(4):
        exact = float(keys[key].astype(np.float64) @ queries[0].astype(np.float64)) / scale / norms[0]
        found = product(keys, key, queries, 0, scaling[0, 0])
        assert abs(found - exact) <= error_of(width) * lengths[key] / scale + scaling[0, 1]


@hypothesis.given(seed=st.integers(0, 10_000), some=st.integers(1, 12), blocks=st.integers(1, 5), alike=st.booleans())
def test_the_best_of_the_first_rows_are_taken_once(seed: int, some: int, blocks: int, alike: bool) -> None:
    generator = np.random.default_rng(seed)
    widths = [stop - start + 1 for start, stop in SPANS]
    levels = tuple(generator.standard_normal((blocks, width, LANES)).astype(np.float32) for width in widths)
    asked = tuple(generator.standard_normal((1, width)).astype(np.float32) for width in widths)
    if alike:
        levels = tuple(np.ones_like(level) for level in levels)
    seeds, slack = blocks * LANES, 0.125
    sizes = np.sort(generator.random(seeds).astype(np.float32))[::-1].copy()
    bounds = np.empty(seeds, np.float32)
    for block in range(blocks):
        bounds_of(levels, asked, block, 0, bounds, block * LANES)
    left, places, taken = np.empty(seeds, np.float32), np.empty(seeds, np.int32), np.empty(seeds, np.float32)
    count = best_first(levels, asked, sizes, 0, seeds, slack, np.empty(some, np.float32), left, places, taken)
    first = places[:count].copy()
    assert len(set(first.tolist())) == count >= min(some, seeds)
    assert sorted(bounds[first], reverse=True)[:some] == sorted(bounds, reverse=True)[:some]
    assert np.allclose(taken[:count], bounds[first] + slack * sizes[first], atol=1e-5)
    untaken = np.ones(seeds, bool)
    untaken[first] = False
    assert np.isneginf(left[first]).all() and (left[untaken] == bounds[untaken]).all()
    threshold = np.float32(np.median(bounds))
    rest = places[: others(left, sizes, threshold, seeds, slack, places)].tolist()
    wanted = (bounds >= threshold - np.float32(slack) * np.repeat(sizes[::LANES], LANES)) & untaken
    assert rest == wanted.nonzero()[0].tolist()


@pytest.mark.parametrize("part", range(3))
def test_norms_are_those_of_torch(part: int) -> None:
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    rows[1], rows[2], rows[3, 4], rows[4, 0] = 0.0, 3e38, torch.nan, torch.inf
    found = np.full(7, -1.0)
    compiled.norms(rows.numpy(), found, part, 3)
    mine = slice(7 * part // 3, 7 * (part + 1) // 3)
    wanted = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).numpy()
    assert np.allclose(found[mine], wanted[mine], rtol=1e-14, equal_nan=True)
    assert (np.delete(found, np.r_[mine]) == -1.0).all()


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("width", [1, 3, 40, 200])
def test_queries_are_prepared_alike(extended: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(700, width, generator=torch.Generator().manual_seed(0)).relu()
    made = shadow.build(lambda: iter([(torch.arange(700), keys)]), 700, width)
    queries = torch.randn(300, width, generator=torch.Generator().manual_seed(1))
    norms = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    whole = torch.hypot(norms, torch.ones_like(norms)) if extended else norms
    prepared = []
    for module in (None, compiled):
        monkeypatch.setattr(shadow, "compiled", lambda work, module=module: module)
        prepared.append(shadow.Asked.of(made, queries, -1 / whole, norms / whole, extended))
    plain, fast = prepared
    for one, other in zip((*plain.levels, plain.fine), (*fast.levels, fast.fine), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-6
    assert (plain.offsets is None) == (fast.offsets is None) == (not extended)
