"""Keys in bytes: their error is what they say, and a scan of them finds what a scan of every event finds."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import dualform
from dualform import compiled
from dualform.queries import best, search, whole
from dualform.queries.coarse import Coarse
from dualform.queries.index import Index, index_of
from dualform.queries.search import Search
from dualform.queries.selection import Grouping
from queries.test_shadow import KINDS, OUT_OF_RANGE, always, loops, record, rows_of, same


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index also for memories so small that a scan would do."""
    monkeypatch.setattr(best, "FEW", 1)
    monkeypatch.setattr(search, "SEED", 16)


def coarse_of(keys: torch.Tensor, block: int = 100) -> Coarse:
    numbers = torch.arange(40, 40 + len(keys))
    return Coarse.of(lambda: zip(numbers.split(block), keys.split(block), strict=True), *keys.shape)


@contextmanager
def whole_numbers(wanted: bool) -> Iterator[None]:
    """Products of whole numbers, exact as torch's are where they suit, or none."""

    def multiply(rows: torch.Tensor, queries: torch.Tensor, result: torch.Tensor) -> None:
        result.copy_(rows.double() @ queries.double().T)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(whole, "suits", return_value=wanted))
        if wanted and not whole.are_fast():
            stack.enter_context(mock.patch.object(whole, "multiply", multiply))
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("way", ["torch", "loops", "whole numbers"])
def test_no_product_is_further_off_than_its_error(kind: str, queries: int, way: str) -> None:
    keys = rows_of(kind, 700, 30, 1)
    asked = torch.nn.functional.normalize(rows_of("gaussian", queries, 30, 2).double())
    exact, sizes = keys.double() @ asked.T, asked.norm(dim=1)
    norms = keys.double().norm(dim=1)
    in_memory = torch.cat([torch.zeros(40), norms.float() * (1 + 1e-6) + 1e-44])
    module = None if way == "torch" else compiled
    with mock.patch("dualform.queries.coarse.compiled", return_value=module), whole_numbers(way == "whole numbers"):
        tile = coarse_of(keys).tile(asked, in_memory)
        values = torch.empty(len(keys), queries, dtype=tile.dtype)
        for at in range(0, len(keys), 256):  # of which the last are fewer
            tile.fill(slice(at, min(at + 256, len(keys))), values[at : at + 256])
    assert (tile.first, len(tile)) == (40, 700)
    near = (values.float() * tile.scales[:, None]).double() * tile.units
    off = tile.errors[:, None] * sizes + (tile.norms.double() + tile.errors)[:, None] * tile.lost
    assert ((near - exact).abs() <= off + 30 * 1e-40).all()
    # And not much further than half of a step in every column, of the key and of the query.
    steps = keys.double().abs().amax(dim=1)[:, None] * sizes
    if way == "whole numbers":
        assert values.dtype == torch.int32
        steps = steps + norms[:, None] * asked.abs().amax(dim=1)
    assert (off <= 0.65 * 30**0.5 * steps / 127 + 2e-30).all()


@pytest.mark.skipif(not whole.are_fast(), reason="this processor has no instructions for products of bytes")
@pytest.mark.parametrize(("rows", "dim_in", "queries"), [(256, 2, 2), (256, 30, 5), (8192, 17, 3), (512, 800, 100)])
def test_products_of_whole_numbers_are_exact(rows: int, dim_in: int, queries: int) -> None:
    assert whole.suits(rows, dim_in, queries)
    random = torch.Generator().manual_seed(0)
    keys, asked = (torch.randint(-127, 128, (some, dim_in), generator=random) for some in (rows, queries))
    result = torch.empty(rows, queries, dtype=torch.int32)
    whole.multiply(keys.to(torch.int8), asked.to(torch.int8), result)
    assert torch.equal(result.long(), keys @ asked.T)


def test_products_that_are_wrong_are_not_used() -> None:
    def saturated(rows: torch.Tensor, queries: torch.Tensor, result: torch.Tensor) -> None:
        """As by instructions that add two products in 16 bits, of which one factor has no sign."""
        shifted = rows.long()[:, None] + 128
        pairs = (shifted * queries.long()).view(len(rows), len(queries), -1, 2).sum(dim=3)
        result.copy_(pairs.clamp(-(2**15), 2**15 - 1).sum(dim=2) - 128 * queries.long().sum(dim=1))

    def nothing_done(rows: torch.Tensor, queries: torch.Tensor, result: torch.Tensor) -> None:
        result.zero_()

    with mock.patch.object(whole, "are_fast", return_value=True):
        for multiply in (saturated, nothing_done):
            with mock.patch.object(whole, "multiply", multiply):
                assert not whole.suits.__wrapped__(16, 8, 3)
        with mock.patch.object(whole, "multiply", side_effect=RuntimeError("no such product")):
            assert not whole.suits.__wrapped__(16, 8, 3)
        assert not whole.suits.__wrapped__(256, 1, 5)  # where torch's was wrong
        assert not whole.suits.__wrapped__(256, 30, 1)
    with mock.patch.object(whole, "are_fast", return_value=False):
        assert not whole.suits.__wrapped__(256, 30, 5)


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
@pytest.mark.parametrize("way", ["whole numbers", "bytes", "keys"])
def test_a_scan_finds_what_is_there(kind: str, order: str, way: str, tmp_path: Path) -> None:
    keys = rows_of(kind, 900, 24, 5)
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    asked = torch.cat([rows_of("gaussian", 20, 24, 6).to(keys.dtype), keys[:4] * (1e30 if kind == "denormal" else 1)])
    asked = asked[asked.norm(dim=1) > 0]
    with (
        mock.patch.object(Search, "_worth", return_value=0),
        mock.patch.object(Index, "has_coarse", return_value=way != "keys"),
        whole_numbers(way == "whole numbers"),
    ):
        for queries in (asked, asked[:1], asked[:7]):
            attention = memory.attend(None, {"": queries})[""]
            answered = [
                same(attention, 7, order),
                same(attention.where(label=[0, 2]), 3, order),
                same(attention, 6, order, Grouping.by(memory, "label")),
                same(attention.where(label=[0, 2]), 6, order, Grouping.by(memory, "step")),
            ]
            assert all(answered) or kind in OUT_OF_RANGE
    if way == "keys":
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


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_all_groups_are_scanned_at_once(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "run", rows_of("relu", 900, 24, 5))
    memory = dualform.open(tmp_path / "run")
    attention = memory.attend(None, {"": rows_of("gaussian", 30, 24, 6)})[""]
    grouping = Grouping.by(memory, "label")
    monkeypatch.setattr(best, "HELD", 8 * 7 * len(grouping.groups))  # some queries after the others
    assert same(attention, 7, order, grouping)
    assert attention.top(7, within="label", order=order).explain().startswith("flat scan, 900 rows bounded")
    monkeypatch.setattr(best, "MANY", 0)
    assert "shadow" in attention.top(7, within="label", order=order).explain()


@pytest.mark.parametrize("size", [1e34, 3e35, 9.9e35])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("wanted", [True, False])
def test_keys_so_large_that_products_before_their_units_would_overflow(
    size: float, order: str, wanted: bool, tmp_path: Path
) -> None:
    keys, asked = (torch.nn.functional.normalize(rows_of("gaussian", count, 64, count) + 2) for count in (900, 20))
    record(tmp_path / "run", keys * size)
    attention = dualform.open(tmp_path / "run").attend(None, {"": asked})[""]
    with mock.patch.object(Search, "run", return_value=False), whole_numbers(wanted):
        assert same(attention, 7, order)
        assert attention.top(7, order=order).explain().startswith("flat scan")
