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
    further_reaching,
    lowest_bit,
    narrow_product,
    not_below,
    partly_reaching,
    reaching,
    several_bounds_into,
    several_further_reaching,
    several_partly_reaching,
    several_reaching,
)
from dualform.compiled.nearby import bounded_first, error_of, is_narrow, marked, multiplied, others, put, scaling_of
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
    heaps = np.full((3, k), -np.inf, np.float32)
    for value in values:
        if value > heaps[1, 0]:
            put(heaps, 1, np.float32(value))
    assert np.isneginf(heaps[[0, 2]]).all()
    heap = heaps[1]
    held = [value for value in sorted(heap.tolist(), reverse=True) if value > -np.inf]
    assert held == sorted(values, reverse=True)[:k]
    assert heap[0] == heap.min()


@numba.njit
def bits_of(levels, asked, block, query, enough):
    return reaching(levels, asked, block, query, enough)


@numba.njit
def bounds_of(levels, asked, block, query, result, at):
    bounds_into(levels, asked, block, query, result, at, 0)


@numba.njit
def bounds_of_several(levels, asked, block, query, result, at, apart):
    several_bounds_into(levels, asked, block, query, result, at, apart)


@numba.njit
def bits_of_listed(several, first, levels, asked, block, listed, at, thresholds, extra, sums, froms, bits):
    if first and several:
        several_partly_reaching(levels[:2], asked[:2], block, listed, at, thresholds, extra, sums, froms, bits)
    elif first:
        partly_reaching(levels[:2], asked[:2], block, listed, at, thresholds, extra, sums, froms, bits)
    elif several:
        several_further_reaching(levels[2:], asked[2:], block, listed, at, thresholds, extra, sums, froms, bits)
    else:
        further_reaching(levels[2:], asked[2:], block, listed, at, thresholds, extra, sums, froms, bits)


@numba.njit
def bits_of_several(levels, asked, block, query, thresholds, extra, bits, to):
    several_reaching(levels, asked, block, query, thresholds, extra, bits, to)


@numba.njit
def bits_of_values(values, at, enough):
    return not_below(values, at, enough)


@numba.njit
def narrow_product_of(rows, row, queries, query, columns):
    return narrow_product(rows, row, queries, query, columns)


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
            bounds = np.zeros((SEVERAL, LANES + 3), np.float32)
            bounds_of_several(levels, asked, block, query, bounds.reshape(-1), 2, LANES + 3)
            for at in range(SEVERAL):
                wanted = np.zeros(LANES + 3, np.float32)
                bounds_of(levels, asked, block, query + at, wanted, 2)
                assert (bounds[at] == wanted).all()


@pytest.mark.parametrize("several", [False, True])
def test_the_last_level_goes_on_where_those_before_ended(several: bool) -> None:
    generator = np.random.default_rng(0)
    blocks, queries, many = 2, 6, SEVERAL if several else 1
    widths = [stop - start + 1 for start, stop in SPANS]
    levels = tuple(generator.standard_normal((blocks, width, LANES)).astype(np.float32) for width in widths)
    asked = tuple(generator.standard_normal((queries, width)).astype(np.float32) for width in widths)
    thresholds, extra = generator.standard_normal(queries).astype(np.float32), np.float32(0.25)
    for block in range(blocks):
        listed, froms = np.array([4, 1, 5, 0]), np.full(4, -1)
        sums, bits = np.full((5, LANES), np.nan, np.float32), np.full(4, 77, np.uint32)
        for at in range(0, 4, many):
            bits_of_listed(several, True, levels, asked, block, listed, at, thresholds, extra, sums, froms, bits)
        for at, query in enumerate(listed):
            assert bits[at] == bits_of(levels[:2], asked[:2], block, query, thresholds[query] - extra)
            known = sum(asked[level][query, :-1].astype(np.float64) @ levels[level][block, :-1] for level in (0, 1))
            assert np.allclose(sums[at], known, rtol=1e-5, atol=1e-5)
        assert np.isnan(sums[4]).all(), "nothing is put anywhere else"
        # Some have gone: the others stand elsewhere in the list than their sums.
        listed[:2], froms[:2], bits[2:] = listed[[1, 3]], [1, 3], 77
        for at in range(0, 2, many):
            bits_of_listed(several, False, levels, asked, block, listed, at, thresholds, extra, sums, froms, bits)
        for at in range(2):
            query = listed[at]
            bounds = np.empty(LANES, np.float32)
            bounds_of(levels, asked, block, query, bounds, 0)
            sure = abs(bounds - (thresholds[query] - extra)) > 1e-4  # sums may be rounded otherwise
            wanted = bounds >= thresholds[query] - extra
            found = np.array([bool(bits[at] >> lane & 1) for lane in range(LANES)])
            assert sure.sum() > LANES // 2 and (found == wanted)[sure].all()
        assert bits[2:].tolist() == [77, 77]


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
            found = float(narrow_product_of(rows, row, queries, query, width))
            assert abs(found - exact[row, query]) <= error_of(width) * sizes[row, query]
            some = width - width // 3
            found = float(narrow_product_of(rows, row, queries, query, some))
            wanted = rows[row, :some].astype(np.float64) @ queries[query, :some].astype(np.float64)
            assert abs(found - wanted) <= error_of(width) * sizes[row, query]


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-22, 1e-10, 1.0, 1e10, 1e18, 1e37])
@pytest.mark.parametrize("other", [1e-44, 1e-20, 1.0, 1e20, 1e37])
def test_products_hold_where_fp32_overflows_and_underflows(size: float, other: float) -> None:
    generator = np.random.default_rng(0)
    width = 100
    keys = (generator.standard_normal((4, width)) * size / 10).astype(np.float32)
    # The query that is asked is the second, of usual ones: some products in fp32, some in fp64.
    queries = (generator.standard_normal((3, width)) * np.array([[1.0], [other], [1.0]]) / 10).astype(np.float32)
    lengths, norms = (np.linalg.norm(part.astype(np.float64), axis=1) for part in (keys, queries))
    if not lengths.all() or not norms.all():
        return
    scale = float(2.0 ** np.ceil(np.log2(lengths.max())))
    scaling = scaling_of(width, norms, (1.0, scale, scale))
    slots, places = np.array([2, -1, 0, 9, 3, 1], np.int32), np.array([0, 1, 2, 3, 4, 5, 0], np.int32)
    which, askers = np.array([2, 1, 0]), np.array([1, 1, 0, 1, 1, 2, 2], np.int32)
    where, scores = np.full(7, 5, np.int32), np.full(7, np.nan)
    nothing = np.empty(0, np.int64)
    more = multiplied(np.arange(6), nothing, keys, slots, queries, scaling, which, places, askers, 7, where, scores)
    assert more == 5 and where.tolist() == [2, -1, 0, -1, 3, 1, 2]
    for pair in (0, 2, 4, 5, 6):
        key, query = where[pair], which[askers[pair]]
        exact = float(keys[key].astype(np.float64) @ queries[query].astype(np.float64)) / scale / norms[query]
        assert abs(scores[pair] - exact) <= error_of(width) * lengths[key] / scale + scaling[query, 1]
    assert np.isnan(scores[[1, 3]]).all()


def test_products_are_in_fp32_only_where_it_loses_nothing() -> None:
    assert [is_narrow(1 / size) for size in (1e-21, -1e-19, 1.0, -1e37, 1e39)] == [False, True, True, True, False]


@hypothesis.given(
    seed=st.integers(0, 10_000), most=st.integers(1, 12), blocks=st.integers(1, 5), some=st.integers(1, 5),
    alike=st.booleans(),
)  # fmt: skip
def test_the_best_of_the_first_rows_are_taken_once(seed: int, most: int, blocks: int, some: int, alike: bool) -> None:
    generator = np.random.default_rng(seed)
    widths, tile = [stop - start + 1 for start, stop in SPANS], 2
    levels = tuple(generator.standard_normal((blocks, width, LANES)).astype(np.float32) for width in widths)
    asked = tuple(generator.standard_normal((tile + some, width)).astype(np.float32) for width in widths)
    if alike:
        levels = tuple(np.ones_like(level) for level in levels)
    seeds, slack = blocks * LANES, 0.125
    sizes = np.sort(generator.random(seeds).astype(np.float32))[::-1].copy()
    bounds = np.empty((some, seeds), np.float32)
    for query in range(some):
        for block in range(blocks):
            bounds_of(levels, asked, block, tile + query, bounds[query], block * LANES)
    coarsely, marks = np.empty(some * seeds, np.float32), np.empty(some * blocks, np.uint32)
    bounded_first(levels, asked, tile, some, seeds, coarsely, np.empty((1, most), np.float32), marks)
    assert (coarsely == bounds.reshape(-1)).all()
    places, askers, last = (np.empty(some * seeds, kind) for kind in (np.int32, np.int32, np.float32))

    def pairs() -> list[tuple[int, int]]:
        count = marked(coarsely, sizes, tile, some, seeds, slack, marks, places, askers, last)
        wanted = bounds[askers[:count] - tile, places[:count]] + slack * sizes[places[:count]]
        assert np.allclose(last[:count], wanted, atol=1e-5)
        assert (np.diff(places[:count] // LANES) >= 0).all(), "block after block"
        return list(zip(places[:count].tolist(), askers[:count].tolist(), strict=True))

    first = pairs()
    thresholds = np.full(tile + some, 1e30, np.float32)
    thresholds[tile:] = np.median(bounds, axis=1)
    others(coarsely, sizes, thresholds, tile, some, seeds, slack, marks)
    rest = pairs()
    assert len(set(first + rest)) == len(first + rest), "each once"
    for query in range(some):
        taken = [place for place, asking in first if asking == tile + query]
        assert len(taken) >= min(most, seeds)
        assert sorted(bounds[query, taken], reverse=True)[:most] == sorted(bounds[query], reverse=True)[:most]
        reach = bounds[query] >= thresholds[tile + query] - np.float32(slack) * np.repeat(sizes[::LANES], LANES)
        reach[taken] = False
        assert sorted(place for place, asking in rest if asking == tile + query) == reach.nonzero()[0].tolist()


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
@pytest.mark.parametrize("count", [1, 3, 300])
def test_queries_are_prepared_alike(extended: bool, width: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(700, width, generator=torch.Generator().manual_seed(0)).relu()
    made = shadow.build(lambda: iter([(torch.arange(700), keys)]), 700, width)
    queries = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    norms = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    whole = torch.hypot(norms, torch.ones_like(norms)) if extended else norms
    prepared = []
    for module in (None, compiled):
        monkeypatch.setattr(shadow, "compiled", lambda work, module=module: module)
        prepared.append(shadow.Asked.of(made, queries, -1 / whole, norms / whole, extended))
    plain, fast = prepared
    for one, other in zip((*plain.levels, plain.fine), (*fast.levels, fast.fine), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype == np.float32
        assert np.abs(one - other).max() < 1e-6
    assert (plain.offsets is None) == (fast.offsets is None) == (not extended)
    assert not extended or np.array_equal(plain.offsets, fast.offsets)


@hypothesis.given(
    rows=st.integers(1, 40), columns=st.sampled_from([1, 3, 15, 16, 17, 31, 32, 50]), k=st.integers(1, 5),
    kind=st.sampled_from([np.int32, np.float32, np.float64]), absolute=st.booleans(), room=st.integers(0, 100),
    known=st.booleans(), many=st.integers(1, 3), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_what_may_be_among_the_best_passes(
    rows: int, columns: int, k: int, kind: type, absolute: bool, room: int, known: bool, many: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = (random.standard_normal((rows, columns)) * 1000).astype(kind)
    scales, units = random.random(rows).astype(np.float32), random.random(columns) + 0.1
    errors, norms = (random.random(rows).astype(np.float32) * most for most in (50, 20))
    sizes, lost, tiny = random.random(columns), random.random(columns), random.random(columns)
    groups = random.integers(-1, many, rows)
    norms[groups < 0], errors[groups < 0] = np.inf, np.nan
    first = random.random((columns * many, 1)) * 500 if known else np.full((columns * many, 1), -np.inf)
    before = np.repeat(first, k, axis=1)
    heaps = before.copy()
    found, row = [], 0
    part = np.empty(columns + room, np.int64), np.empty(columns + room, np.int64), np.empty(columns + room)
    given = values, scales, units, errors, norms, sizes, lost, tiny, groups, absolute, heaps
    while row < rows:
        row, count = compiled.sift(*given, row, *part)
        found += list(zip(*(one[:count].tolist() for one in part), strict=True))

    scores = (values.astype(np.float32) * scales[:, None]).astype(np.float64) * units
    scores = np.abs(scores) if absolute else scores
    errors, norms = errors.astype(np.float64), norms.astype(np.float64)
    off = errors[:, None] * sizes + (norms + errors)[:, None] * lost + tiny
    # Every column with its groups, one after the other.
    chosen = groups[:, None] == np.arange(columns * many) % many
    scores, off = np.repeat(scores, many, axis=1), np.repeat(off, many, axis=1)
    surely = np.where(chosen, scores - off, -np.inf)
    best = np.sort(np.concatenate([before.T, surely]), axis=0)[-k:].T
    assert np.allclose(np.sort(heaps, axis=1), best, rtol=1e-12)
    reached = chosen & (scores + off > best[:, 0] + 1e-9)
    pairs = {(row, column): bound for row, column, bound in found}
    assert len(pairs) == len(found)  # none twice
    assert set(zip(*(places.tolist() for places in reached.nonzero()), strict=True)) <= set(pairs)
    assert all(chosen[row, column] and np.isclose(scores[row, column] + off[row, column], bound, rtol=1e-12)
               for (row, column), bound in pairs.items())  # fmt: skip
    if known:  # and what cannot be does not
        assert all(bound >= before[column, 0] for (_, column), bound in pairs.items())


def test_rows_that_cannot_be_read_as_such_are_refused() -> None:
    with pytest.raises(numba.TypingError, match="has no rows of numbers"):
        compiled.sift(*sifted(np.zeros((4, 20), np.int8)))
    with pytest.raises(numba.TypingError, match="has no rows of numbers"):
        compiled.sift(*sifted(np.zeros((4, 40), np.float32)[:, ::2]))


def sifted(values: np.ndarray) -> tuple:
    """Arguments of the loop for some values."""
    rows, columns = values.shape
    by_row, by_column = np.ones(rows, np.float32), np.ones(columns)
    result = np.empty(99, np.int64), np.empty(99, np.int64), np.empty(99)
    of = by_row, by_column, by_row, by_row, by_column, by_column, by_column
    return values, *of, np.zeros(rows, np.int64), False, np.zeros((columns, 2)), 0, *result
