"""What sieves leave together holds all of the best, whoever met which rows."""

from types import ModuleType

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dualform import compiled
from dualform.queries.flat import tiles_of
from dualform.queries.sieve import Sieve, Tile, Wanted, all_left


@pytest.mark.parametrize("fast", [None, compiled])
@hypothesis.given(
    sieves=st.integers(1, 4), queries=st.sampled_from([1, 3, 20]), k=st.integers(1, 6), absolute=st.booleans(),
    known=st.booleans(), groups=st.sampled_from([0, 1, 2, 3, 40]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_several_sieves_leave_the_best(
    fast: ModuleType | None, sieves: int, queries: int, k: int, absolute: bool, known: bool, groups: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    keys, asked = torch.randn(120, 7, generator=random), torch.randn(queries, 7, generator=random).double()
    asked /= asked.norm(dim=1, keepdim=True)
    # Some of no group, or all of one.
    codes = torch.randint(-1, groups, (120,), generator=random) if groups else torch.zeros(120, dtype=torch.int64)
    groups = max(groups, 1)
    scores = keys.double() @ asked.T
    scores = scores.abs() if absolute else scores
    # Every query with its groups, one after the other.
    inside = codes[:, None] == torch.arange(queries * groups) % groups
    scores = scores.repeat_interleave(groups, dim=1).where(inside, -torch.inf)
    best = scores.topk(k, dim=0).values[-1]
    first = best - 0.5 if known else torch.full_like(best, -torch.inf)
    tiny = torch.full((queries,), 1e-40, dtype=torch.float64)
    wanted = Wanted(asked, asked.norm(dim=1), tiny, first, k, absolute, codes)
    every = [Sieve(wanted, 1 << 20, fast) for _ in range(sieves)]
    turn, norms = 0, keys.norm(dim=1) * (1 + 1e-6)
    for tile in tiles_of(iter([(0, keys[:50]), (50, keys[50:].double())]), asked, norms):  # of two kinds of numbers
        for at in range(0, len(tile), 16):
            assert every[turn % sieves].take(tile, slice(at, min(at + 16, len(tile))))
            turn += 1
    asking, ids, bounds = all_left(every)
    left = set(zip(ids.tolist(), asking.tolist(), strict=True))
    assert len(left) == len(ids)
    assert set(map(tuple, (inside & (scores >= best)).nonzero().tolist())) <= left
    assert inside[ids, asking].all() and (bounds >= scores[ids, asking]).all()
    # The error of a product is far smaller than what lies between scores.
    assert len(left) <= int((inside & (scores >= best - 1e-3)).sum())


def test_too_many_are_told() -> None:
    keys, asked = torch.ones(300, 4), torch.full((2, 4), 0.5).double()
    nothing = torch.full((2,), -torch.inf, dtype=torch.float64)
    wanted = Wanted(asked, asked.norm(dim=1), torch.zeros(2, dtype=torch.float64), nothing, 3, False)
    (tile,) = tiles_of(iter([(0, keys)]), asked, keys.norm(dim=1))
    for module in (None, compiled):
        assert not Sieve(wanted, 400, module).take(tile, slice(0, 300))
        assert Sieve(wanted, 600, module).take(tile, slice(0, 300))


@pytest.mark.parametrize("fast", [None, compiled])
def test_a_bound_holds_where_every_error_is_as_large_as_it_may_be(fast: ModuleType | None) -> None:
    # x · q for x = 1 and q = -1/2; what is multiplied is x + 1/4, the longest it may be, and q - 1/4.
    one = torch.ones(1, dtype=torch.float64)
    wanted = Wanted(-one[:, None] / 2, one / 2, 0 * one, -one / 2, 1, False)
    tile = Tile(
        0, lambda _, values: values.fill_(-1.25 * 0.75), torch.float32, torch.ones(1), one, torch.full((1,), 0.25),
        torch.ones(1), one / 4,
    )  # fmt: skip
    sieve = Sieve(wanted, 10, fast)
    assert sieve.take(tile, slice(0, 1))
    asking, ids, bounds = all_left([sieve])
    assert asking.tolist() == ids.tolist() == [0]
    assert -0.5 <= float(bounds) < -0.49
