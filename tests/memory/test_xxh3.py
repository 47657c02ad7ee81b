"""Checksums and hashes by compiled loops: those of the xxhash package, whatever was summed before."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.memory import ledger
from dualform.memory.blocksums import BLOCK, BlockSums
from dualform.memory.files import CHUNK, checksums
from dualform.memory.ledger import SHORTEST, Ledger
from dualform.recording import swift

xxh3 = pytest.importorskip("dualform.memory.xxh3")


def plainly(content: bytes) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_64_hexdigest(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK))


def arena(size: int, seed: int) -> tuple[np.ndarray, BlockSums]:
    """Random bytes that begin at a whole page, and room for their sums."""
    whole = np.random.default_rng(seed).integers(0, 256, size + 4096, dtype=np.uint8)
    start = -whole.ctypes.data % 4096
    part = whole[start : start + size]
    return part, BlockSums(part.ctypes.data, size)


def summed(sums: BlockSums, rows: np.ndarray, start: int, stop: int) -> None:
    """Have a copy of some of the bytes summed, as if they were copied to where they are."""
    source = rows[start:stop].copy()
    xxh3.copy_blocks(source.ctypes.data, rows.ctypes.data + start, len(source), sums.table)


@given(
    length=st.integers(CHUNK, 3 * CHUNK),
    before=st.sampled_from([0, 1, 100, BLOCK, 4096, CHUNK - 1, CHUNK]),
    after=st.sampled_from([0, 1, 5, 500, BLOCK, CHUNK]),
    cuts=st.lists(st.integers(0, CHUNK), max_size=4),
    parts=st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.integers(0, CHUNK)), min_size=1, max_size=4),
)
def test_checksums_are_those_of_the_package(
    length: int, before: int, after: int, cuts: list[int], parts: list[tuple[int, int]]
) -> None:
    rows, sums = arena(3 * CHUNK, 0)
    for start, size in parts:
        summed(sums, rows, start, min(start + size, len(rows)))
    edges = [0, *sorted(cuts), length]
    inner = [rows[start:stop].data for start, stop in itertools.pairwise(edges)]
    outer = [memoryview(np.random.default_rng(size).bytes(size)) for size in (before, after)]
    pieces = [outer[0], *inner, outer[1]]
    assert checksums(pieces, sums) == plainly(b"".join(map(bytes, pieces)))


@pytest.mark.parametrize("start, size", [(0, 4096), (1, 4096), (1023, 2), (1000, 24), (500, 100), (64, 3000), (5, 0)])
def test_the_whole_blocks_are_copied_and_nothing_else(start: int, size: int) -> None:
    place, sums = arena(8 * BLOCK, 0)
    source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    before = place.copy()
    first, stop = xxh3.copy_blocks(source.ctypes.data, place.ctypes.data + start, size, sums.table)
    assert (stop - first) % BLOCK == 0 and 0 <= first <= stop <= size
    assert first == stop or (start + first) % BLOCK == 0
    assert first < BLOCK or first == stop == size
    assert size - stop < BLOCK
    before[start + first : start + stop] = source[first:stop]
    np.testing.assert_array_equal(place, before)


def test_only_what_was_summed_is_believed() -> None:
    rows, sums = arena(2 * CHUNK, 1)
    summed(sums, rows, 0, CHUNK)
    rows[5] += 1  # behind the back of the sums
    rows[CHUNK + 5] += 1
    whole = bytes(rows)
    assert checksums([rows.data], sums)[0] != plainly(whole)[0]
    assert checksums([rows.data], sums)[1] == plainly(whole)[1]
    sums.reset()
    assert checksums([rows.data], sums) == plainly(whole)


@pytest.mark.parametrize("keep", ["all", "keys"])
def test_a_recording_sums_what_it_copies(keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift, "PAYS", 0)
    monkeypatch.setattr("dualform.memory.writer.COMMIT_BYTES", 3 << 20)
    believed = []
    compute = xxh3.checksum_chunks

    def counted(pieces: np.ndarray, result: np.ndarray) -> None:
        believed.append(np.count_nonzero(pieces[:, 2]))
        compute(pieces, result)

    monkeypatch.setattr(xxh3, "checksum_chunks", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 47), nn.ReLU(), nn.Linear(47, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run", keep=keep, on_error="raise") as recorder:
        for _ in range(120):
            ids = torch.randint(1000, (301,))
            with recorder.batch(ids):
                model(torch.randn(301, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(believed) > 1 and max(believed) > 0
    for segment in dualform.open(tmp_path / "run").manifest.segments:
        content = (tmp_path / "run" / segment.file.file).read_bytes()
        assert segment.file.checksums == plainly(content)


@pytest.mark.parametrize("width", [241, 256, 300, 1000, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 3136])
def test_the_hash_of_a_row_is_that_of_the_package(width: int) -> None:
    rows = np.random.default_rng(width).integers(0, 256, (20, width), dtype=np.uint8)
    rows[0], rows[1] = 0, 255
    result = np.empty((20, 2), dtype=np.uint64)
    xxh3.hash_rows(rows.ctypes.data, width, len(rows), result.ctypes.data)
    assert [f"{high:016x}{low:016x}" for high, low in result.tolist()] == list(map(xxhash.xxh3_128_hexdigest, rows))


@pytest.mark.parametrize(
    "width, dtype",
    [(1, torch.float32), (5, torch.float32), (8, torch.float64), (3, torch.bfloat16), (784, torch.float32)],
)
def test_a_ledger_finds_the_same_repeated_keys(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loop, without it, with the loop from the middle of a run on, and where there is none."""
    generator = torch.Generator().manual_seed(0)
    found = []
    examples = torch.randint(30, (6, 40), generator=generator).numpy()
    keys = torch.randn(30, width, generator=generator).to(dtype)
    for many, has_numba in [
        (0, True),
        (1 << 60, True),
        (100 * max(width * dtype.itemsize, SHORTEST), True),
        (0, False),
    ]:
        tried: list[str] = []
        monkeypatch.setattr(ledger, "MANY", many)
        monkeypatch.setattr(
            ledger, "load", lambda name, to=tried, found=xxh3 if has_numba else None: to.append(name) or found
        )
        book, answers = Ledger(), []
        for number, ids in enumerate(examples):
            rows = keys[torch.from_numpy(ids)].clone()
            if number == 3:
                rows[::4] += 1  # changed: new keys for these examples
            new, numbers = book.enter([rows[:10], rows[10:]], ids, np.zeros_like(ids))
            answers.append((new.tolist(), numbers.tolist()))
        found.append(answers)
        assert len(tried) == (many < 1 << 60), "the loop is asked for once"
        assert (book._loops is not None) == (has_numba and bool(tried))
    assert found[0] == found[1] == found[2] == found[3]
    assert not all(found[0][1][0]), "some keys came again"
