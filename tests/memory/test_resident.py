"""Questions to a memory that is larger than they may take: nothing of it is ever loaded, or mapped, as a whole."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import BadCall, DamagedMemory
from dualform.memory import mapped, windows, writer
from dualform.memory.files import CHUNK, FileRecord, write_tensors
from dualform.memory.mapped import TensorFile
from dualform.memory.windows import Windows
from small import run

DIM_IN, DIM_OUT, ROWS, STEPS = 4096, 16, 2048, 21  # 0.7 GB
ROOM = 300 << 20

ASK = f"""
import resource, sys
sys.modules["numba"] = None  # compiling takes memory of its own
import dualform, torch

def ask(path, count):
    memory = dualform.open(path, resident=128 << 20)
    shape = count, memory.manifest.weights[0].dim_in
    queries = torch.randint(8, shape, generator=torch.Generator().manual_seed(0)).float()
    attention = memory.attend(None, {{"": queries}})[""]
    attention.top(10)
    attention.totals(by="label")
    attention.contributions(unit=0).top(5)
    weights = memory.weights()
    assert memory.certificate().exact
    expected = attention.queries.double() @ weights["weight"].double().T + weights["bias"].double()
    assert (attention.output() - expected).abs().max() < 1e-4 * expected.abs().max()

def used(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10

ask(sys.argv[2], 500)
before = used("VmHWM")
limit = used("VmSize") + {ROOM}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
ask(sys.argv[1], 3)
print(used("VmHWM") - before)
"""


def record(path: Path, dim_in: int, rows: int, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(dim_in, DIM_OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    labels = torch.arange(rows * steps) % 4
    keys = torch.randint(8, (rows, dim_in)).float()  # whole numbers, whose scores are certain: this is not about them
    with dualform.record(model, optimizer, path, examples={"label": labels}, on_error="raise") as recorder:
        for step in range(steps):
            ids = torch.arange(step * rows, (step + 1) * rows)
            with recorder.batch(ids):
                F.cross_entropy(model(keys * 2.0 ** -(step % 8)), ids % DIM_OUT).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    try:
        record(tmp_path / "large", DIM_IN, ROWS, STEPS)
        yield tmp_path / "large"
    finally:
        shutil.rmtree(tmp_path / "large")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says in /proc what a process has used")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space of a process (RLIMIT_AS)")
def test_questions_take_no_more_than_they_may(large: Path, tmp_path: Path) -> None:
    record(tmp_path / "small", 16, 1000, 3)
    assert dualform.open(large).bytes > 2 * ROOM
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(large), str(tmp_path / "small")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the stacks of threads are address space too
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < ROOM


@pytest.mark.parametrize("resident", [0, -1, (64 << 20) - 1, True])
def test_a_setting_that_is_too_small(tmp_path: Path, resident: int) -> None:
    run(tmp_path / "run", steps=1)
    with pytest.raises(BadCall, match=r"a whole number of at least 67,108,864 \(64 MB\)"):
        dualform.open(tmp_path / "run", resident=resident)


def test_blocks_are_smaller_where_rows_are_wide(tmp_path: Path) -> None:
    record(tmp_path / "run", 1000, 50, 2)
    wide = dualform.open(tmp_path / "run")
    assert wide.resident == 1 << 30
    assert [len(block) for block in wide.blocks(0, 2)] == [100]
    narrow = dualform.open(tmp_path / "run", resident=64 << 20)
    assert narrow.resident == 64 << 20
    assert narrow.block_rows(0) == (64 << 20) // 8 // (6 * 4 * (1000 + DIM_OUT)) == 344
    whole = torch.cat([block.keys for block in narrow.blocks(0, 2)])
    for rows in (1, 7, 99):
        blocks = list(narrow.blocks(0, 2, rows=rows))
        assert all(len(block) <= rows for block in blocks)
        assert torch.cat([block.keys for block in blocks]).equal(whole)


def a_file(root: Path, rows: int = 300, width: int = 7000) -> tuple[FileRecord, torch.Tensor]:
    tensor = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return write_tensors(root, "a.safetensors", {"x": [tensor], "y": [torch.arange(3)]}), tensor


@pytest.mark.parametrize("kept", [None, Windows(1 << 30), Windows(3 << 20)])
@pytest.mark.parametrize("most", [1 << 15, 1 << 20, 1 << 30])
def test_rows_in_any_order(kept: Windows | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, tensor = a_file(tmp_path)
    monkeypatch.setattr(mapped, "WINDOW", most)
    file = TensorFile(tmp_path, record, windows=kept)
    generator = torch.Generator().manual_seed(1)
    for few in (0, 300):  # one by one, or out of windows
        monkeypatch.setattr(mapped, "FEW", few)
        for rows in (
            [],
            [299],
            [5, 6, 7],
            [7, 6, 5, 5],
            list(range(300)),
            torch.randint(300, (500,), generator=generator),
        ):
            chosen = torch.as_tensor(rows, dtype=torch.int64)
            assert file.gather("x", chosen).equal(tensor[chosen])
        for outside in (-1, 300):
            with pytest.raises(IndexError):
                file.gather("x", torch.tensor([0, outside]))
    for start, stop in ((0, 300), (1, 2), (17, 290), (200, 900)):
        assert file.read("x", start, stop).equal(tensor[start:stop])


@pytest.mark.parametrize("few", [0, 300])
def test_damage_inside_a_wide_row_is_found(few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, tensor = a_file(tmp_path, rows=3, width=1 << 20)  # a row has four chunks of its own
    monkeypatch.setattr(mapped, "FEW", few)
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[6 * CHUNK + 9] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    file = TensorFile(tmp_path, record)
    for row in (0, 2):
        assert file.gather("x", torch.tensor([row])).equal(tensor[[row]])
    with pytest.raises(DamagedMemory, match=r"bytes 6,291,456 to 7,340,032"):
        file.gather("x", torch.tensor([2, 1]))


@pytest.mark.parametrize("kept", [None, Windows(1 << 30)])
def test_a_file_that_changes_while_it_is_open_is_told(kept: Windows | None, tmp_path: Path) -> None:
    record, tensor = a_file(tmp_path)
    path = tmp_path / "a.safetensors"
    content = path.read_bytes()
    file = TensorFile(tmp_path, record, windows=kept)
    assert file.read("x").equal(tensor)
    with path.open("r+b") as other:
        other.seek(5_000_000)
        other.write(b"changed")
    with pytest.raises(DamagedMemory, match="bytes 4,194,304 to 5,242,880"):
        file.read("x")
    os.truncate(path, 6_000_000)
    for ask in (lambda: file.read("x"), lambda: file.gather("x", torch.tensor([1])), lambda: file.read("y")):
        with pytest.raises(DamagedMemory, match="truncated or was edited.* and has 6,000,000"):
            ask()
    path.write_bytes(content)
    assert file.read("x").equal(tensor)


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)
    monkeypatch.setattr(windows.descriptors, "_most", 3)
    _, memory = run(tmp_path / "run", steps=8)
    truth = [block.keys.clone() for block in memory.blocks(0, 8)]
    assert len(truth) == 8
    assert len(windows.descriptors._kept) == 3

    def read(_: int) -> bool:
        blocks = [block.keys for block in memory.blocks(0, 8)]
        return all(map(torch.equal, blocks, truth))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(200)))
    assert len(open_below(tmp_path)) <= 4
    shutil.rmtree(tmp_path / "run" / "segments")
    with pytest.raises(DamagedMemory, match=r"r000-00000\d.safetensors is missing"):
        list(memory.blocks(0, 8))
    assert len(open_below(tmp_path)) <= 4


def open_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open, as far as the system says."""
    there = []
    for number in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []:
        with suppress(OSError):  # the listing's own
            there.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in there if name.startswith(str(folder))]


def test_little_stays_mapped(tmp_path: Path) -> None:
    record, tensor = a_file(tmp_path)
    kept = Windows(3 << 20)
    file = TensorFile(tmp_path, record, windows=kept)
    for _ in range(2):
        for at in range(0, 300, 20):
            assert file.read("x", at, at + 20).equal(tensor[at : at + 20])
            assert sum(size for _, size in kept._kept.values()) <= 3 << 20
    assert kept._kept
    assert file.read("x").equal(tensor)


@pytest.mark.parametrize("most", [1 << 16, 1 << 30])
@pytest.mark.parametrize("rows", [7, 64, 1000])
def test_tiles_are_all_rows(most: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "TILE", 1 << 18)
    monkeypatch.setattr(mapped, "SMALL", 1 << 10)
    record, tensor = a_file(tmp_path)
    file = TensorFile(tmp_path, record, windows=Windows(most))
    for _ in range(2):  # the second time all is checked
        at = 0
        for start, tile in file.tiles("x", rows, read=True):
            assert start == at and tile.equal(tensor[at : at + len(tile)])
            at += len(tile)
        assert at == len(tensor)


def test_rows_that_were_checked_are_read_by_one_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = pytest.importorskip("dualform.compiled")
    monkeypatch.setattr(mapped, "compiled", lambda work: loops)
    record, tensor = a_file(tmp_path)
    file = TensorFile(tmp_path, record)
    rows = torch.randint(len(tensor), (50,), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert file.gather("x", rows).equal(tensor[rows])
    with (tmp_path / "a.safetensors").open("r+b") as damaged:
        damaged.seek(-200, 2)
        damaged.write(b"x")
    with pytest.raises(DamagedMemory):
        file.gather("x", torch.arange(len(tensor))[-50:])
