"""The baselines of the benchmarks answer right: each against a plain fp64 argsort."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dualform.queries.score import scores

EVENTS, DIM, K = 5000, 24, 10


@pytest.fixture(scope="module")
def baselines() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "baselines.py"
    spec = importlib.util.spec_from_file_location("benchmark_baselines", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return torch.randn(EVENTS, DIM, generator=torch.Generator().manual_seed(0))


def queries(count: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(count))


def plain(terms: Tensor, k: int) -> Tensor:
    """The events of the k largest terms: largest first, then the earlier event."""
    return terms.argsort(dim=-1, descending=True, stable=True)[..., :k]


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("tile", [64, 999, 8192])
@pytest.mark.parametrize("skip", [False, True])
def test_the_torch_scan_finds_the_top_k(baselines: ModuleType, keys: Tensor, count: int, tile: int, skip: bool) -> None:
    asked = queries(count)
    terms = asked.double() @ keys.double().T
    scan = baselines.TorchScan.build(keys)
    scan.plans[count] = baselines.Plan(tile, skip)
    found = scan.search(asked, K)
    assert found.events.equal(plain(terms, K))
    torch.testing.assert_close(found.scores.double(), terms.gather(1, found.events), rtol=1e-5, atol=1e-5)
    assert scan.first(100).search(asked, K).events.equal(plain(terms[:, :100], K))


def test_the_torch_scan_tunes_itself_for_every_number_of_queries(baselines: ModuleType, keys: Tensor) -> None:
    scan = baselines.TorchScan.build(keys)
    for count in (1, 7):
        found = scan.search(queries(count), K)
        assert found.events.equal(plain(queries(count).double() @ keys.double().T, K))
    assert set(scan.plans) == {1, 7}


def test_faiss_finds_the_top_k(baselines: ModuleType, keys: Tensor) -> None:
    pytest.importorskip("faiss")
    engine = baselines.FaissFlat.build(keys)
    for count in (1, 30):
        terms = queries(count).double() @ keys.double().T
        found = engine.search(queries(count), K)
        assert found.events.equal(plain(terms, K))
        torch.testing.assert_close(found.scores.double(), terms.gather(1, found.events), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [3, 2000])  # a group has about 1,250 events
def test_the_scan_within_groups_finds_the_top_k_of_each(baselines: ModuleType, keys: Tensor, k: int) -> None:
    codes = torch.randint(4, (EVENTS,), generator=torch.Generator().manual_seed(1))
    asked = queries(5)
    terms = asked.double() @ keys.double().T
    found = baselines.WithinScan.build(keys, codes, 4).search(asked, k)
    assert found.events.shape == (5, 4, k)
    for group in range(4):
        members = (codes == group).nonzero()[:, 0]
        best = members[plain(terms[:, members], k)]
        assert found.events[:, group, : best.shape[1]].equal(best)
        assert (found.events[:, group, best.shape[1] :] == -1).all()


@pytest.mark.parametrize("absolute", [False, True])
def test_the_scan_for_totals_sums_every_group(baselines: ModuleType, keys: Tensor, absolute: bool) -> None:
    codes = torch.randint(4, (EVENTS,), generator=torch.Generator().manual_seed(1))
    asked = queries(5)
    terms = asked.double() @ keys.double().T
    terms = terms.abs() if absolute else terms
    sums = torch.stack([terms[:, codes == group].sum(1) for group in range(4)], dim=1)
    totals = baselines.TotalsScan.build(keys, codes, 4).search(asked, absolute)
    assert (totals - sums).abs().max() <= 1e-6 * terms.abs().sum(1).max()


def test_the_fp64_scan_ranks_contributions_to_a_unit_each(baselines: ModuleType, keys: Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    values, biases = torch.randn(2, 3, EVENTS, generator=generator, dtype=torch.float64)
    asked, units = queries(6), torch.tensor([0, 1, 2, 2, 1, 0])
    terms = (asked.double() @ keys.double().T) * values[units] + biases[units]
    found = baselines.Fp64Scan.build(keys, values, biases).search(asked, K, units)
    assert found.events.equal(plain(terms, K))
    torch.testing.assert_close(found.scores, terms.gather(1, found.events))


def test_the_exact_scan_rounds_every_score_and_breaks_ties_by_event(baselines: ModuleType, keys: Tensor) -> None:
    repeated = torch.cat([keys, keys, torch.zeros(4, DIM)])  # every score twice, and four zeros
    asked = torch.cat([queries(5), torch.zeros(1, DIM), -queries(5)])
    all_scores = scores(repeated, asked)
    for k in (K, 2 * EVENTS):  # the second reaches the negative scores
        found = baselines.ExactScan.build(repeated).search(asked, k)
        best = plain(all_scores, k)
        assert found.events.equal(best)
        assert found.scores.equal(all_scores.gather(1, best))
