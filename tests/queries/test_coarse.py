"""Keys in bytes: their error is what they say, and a scan of them finds what a scan of every event finds."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import dualform
from dualform import compiled
from dualform.queries import best, search
from dualform.queries.coarse import Coarse
from dualform.queries.index import Index, index_of
from dualform.queries.search import Search
from queries.test_shadow import KINDS, always, loops, record, rows_of, same


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index also for memories so small that a scan would do."""
    monkeypatch.setattr(best, "FEW", 1)
    monkeypatch.setattr(search, "SEED", 16)


def coarse_of(keys: torch.Tensor, block: int = 100) -> Coarse:
    numbers = torch.arange(40, 40 + len(keys))
    return Coarse.of(lambda: zip(numbers.split(block), keys.split(block), strict=True), *keys.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("module", [None, compiled])
def test_no_product_is_further_off_than_its_error(kind: str, queries: int, module) -> None:
    keys = rows_of(kind, 700, 30, 1)
    asked = torch.nn.functional.normalize(rows_of("gaussian", queries, 30, 2))
    exact = keys.double() @ asked.double().T
    coarse = coarse_of(keys)
    with mock.patch("dualform.queries.coarse.compiled", return_value=module):
        parts = [(part.first, part.values.clone(), part.errors.clone()) for part in coarse.products(asked)]
    near, errors = torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])
    assert parts[0][0] == 40 and near.shape == exact.shape
    norms = torch.linalg.vector_norm(asked, dim=1, dtype=torch.float64)
    assert ((near.double() - exact).abs() <= errors[:, None].double() * norms + 30 * 1e-40).all()
    # And not much further than half of a step in every column.
    assert (errors <= 0.6 * 30**0.5 * keys.double().abs().amax(dim=1) / 127 + 2e-30).all()


def test_rows_that_are_not_finite_are_zeros() -> None:
    keys = rows_of("gaussian", 300, 8, 0)
    keys[3, 2], keys[150, 1], keys[299] = torch.nan, torch.inf, -torch.inf
    coarse = coarse_of(keys)
    odd = torch.tensor([3, 150, 299])
    assert not coarse.bytes[odd].any() and not coarse.scales[odd].any()
    assert coarse.errors.isfinite().all() and coarse.scales.isfinite().all()
    assert coarse.bytes.any(dim=1).sum() == 297


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("in_bytes", [True, False])
def test_a_scan_finds_what_is_there(kind: str, order: str, in_bytes: bool, tmp_path: Path) -> None:
    keys = rows_of(kind, 900, 24, 5)
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    asked = torch.cat([rows_of("gaussian", 20, 24, 6).to(keys.dtype), keys[:4] * (1e30 if kind == "denormal" else 1)])
    asked = asked[asked.norm(dim=1) > 0]
    with (
        mock.patch.object(Search, "_worth", return_value=0),
        mock.patch.object(Index, "has_coarse", return_value=in_bytes),
    ):
        for queries in (asked, asked[:1], asked[:7]):
            attention = memory.attend(None, {"": queries})[""]
            answered = same(attention, 7, order)
            same(attention.where(label=[0, 2]), 3, order)
            assert answered or kind in ("denormal", "fp64 tiny", "constant", "huge", "one huge", "wide range")
    if not in_bytes:
        assert not list((tmp_path / "run/derived/shadow").glob("bytes-*"))


def test_bytes_are_kept_and_made_anew_where_they_are_damaged_or_stale(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, rows_of("gaussian", 400, 8, 0))
    memory = dualform.open(path)

    def ask() -> None:
        with mock.patch.object(Search, "_worth", return_value=0):
            assert same(memory.attend(None, {"": torch.ones(2, 8)})[""], 5, "largest")

    ask()
    (file,) = (path / "derived/shadow").glob("bytes-*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    memory = dualform.open(path)
    ask()
    assert file.read_bytes() == whole
    record(tmp_path / "other", rows_of("gaussian", 400, 8, 1))
    (tmp_path / "other/derived/shadow").mkdir(parents=True)
    (tmp_path / "other/derived/shadow" / file.name).write_bytes(whole)
    memory = dualform.open(tmp_path / "other")
    ask()
    assert (tmp_path / "other/derived/shadow" / file.name).read_bytes() != whole
    assert not dualform.open(path).verify().damaged


def test_bytes_of_segments_that_grew_together_go(tmp_path: Path) -> None:
    path, keys = tmp_path / "run", rows_of("gaussian", 600, 12, 0)
    model = torch.nn.Linear(12, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = []
    with dualform.record(model, optimizer, path) as recorder:
        for part in keys.split(200):
            with recorder.batch(torch.arange(len(part))):
                model(part).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.commit()
            memory = dualform.open(path)
            with mock.patch.object(Search, "_worth", return_value=0):
                assert same(memory.attend(None, {"": torch.ones(1, 12)})[""], 5, "largest")
            names.append(sorted(file.name for file in (path / "derived/shadow").glob("bytes-*")))
    assert names == [
        ["bytes-w0-000000-000001.safetensors"],
        ["bytes-w0-000000-000002.safetensors"],
        ["bytes-w0-000000-000002.safetensors", "bytes-w0-000002-000003.safetensors"],
    ]


def test_there_are_no_bytes_without_room_for_them(tmp_path: Path) -> None:
    record(tmp_path / "run", rows_of("gaussian", 400, 8, 0))
    index = index_of(memory := dualform.open(tmp_path / "run"))
    assert index.has_coarse(0)
    with mock.patch.object(memory, "resident", 400 * 16 * 3 - 1):
        assert not index.has_coarse(0)


def test_with_and_without_compiled_loops(tmp_path: Path) -> None:
    record(tmp_path / "run", rows_of("gaussian", 900, 24, 5))
    memory = dualform.open(tmp_path / "run")
    for module in (None, compiled):
        with loops(module), always():
            assert memory.attend(None, {"": torch.ones(3, 24)})[""].top(5).explain().startswith("certified shadow")
