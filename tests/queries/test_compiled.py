"""The compiled loops say what the plainest computation says."""

import hypothesis
import numba
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dualform import compiled
from dualform.compiled.nearby import put
from dualform.compiled.lanes import bounds_into, lowest_bit, reaching
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
