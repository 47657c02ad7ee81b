"""The disk: whatever way a file is written, its bytes are those that were given; and one writer at a time."""

import errno
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.errors import MemoryInUse
from dualform.memory import disk as module
from dualform.memory import files, lock, writer
from dualform.memory.arena import Arena, Shape, Staging, held
from dualform.memory.disk import PAGE, Disk
from dualform.memory.files import checksums, write_tensors
from dualform.memory.lock import LOCK, Lock
from dualform.memory.mapped import TensorFile
from small import batch, network

SIZES = [0, 1, 7, 8, 511, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 20_000, 5 * PAGE + 8]


class Strict(Disk):
    """A file system that takes direct writes of whole pages only, wherever the tests run."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = True
        self.directly: set[int] = set()
        self.written: list[int] = []

    def create(self, path: Path, direct: bool) -> int:
        handle = super().create(path, False)
        self.directly.discard(handle)
        if direct:
            self.directly.add(handle)
        return handle

    def write(self, handle: int, data: memoryview) -> None:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        at = os.lseek(handle, 0, os.SEEK_CUR)
        if handle in self.directly and any(number % PAGE for number in (address, at, len(data))):
            raise OSError(errno.EINVAL, "Invalid argument")
        self.written.append(len(data))
        super().write(handle, data)


@st.composite
def pieces(draw: st.DrawFn) -> list[memoryview]:
    """Some pieces of memory, on a page of their own or not."""
    generator = np.random.default_rng(draw(st.integers(0, 2**20)))
    drawn = draw(st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from([0, 0, 1, 8])), max_size=8))
    return [_memory(size, start, generator) for size, start in drawn]


def _memory(size: int, start: int = 0, generator: np.random.Generator | None = None) -> memoryview:
    """Random bytes that begin `start` bytes behind the beginning of a page."""
    whole = np.frombuffer(mmap.mmap(-1, size + start + 1), dtype=np.uint8)
    whole[:] = (generator or np.random.default_rng(0)).integers(0, 256, len(whole), dtype=np.uint8)
    return whole[start : start + size].data


@pytest.mark.parametrize("kind", [Disk, Strict])
@hypothesis.given(given=pieces(), piece=st.sampled_from([PAGE, 2 * PAGE, 8 << 20]), large=st.booleans())
def test_a_file_is_what_was_given(
    kind: type[Disk], given: list[memoryview], piece: int, large: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("disk") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        disk = kind()
        for _ in range(2):  # the second time over the first, with the same buffer
            disk.commit(path, given, large=large)
            assert path.read_bytes() == b"".join(given)
    assert [one.name for one in path.parent.iterdir()] == ["file"]
    if isinstance(disk, Strict):
        assert disk.direct
        assert bool(disk.directly) == large


def test_whole_pages_go_to_the_disk_from_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 4 * PAGE)
    disk = Strict()
    disk.commit(tmp_path / "file", [_memory(PAGE, 1), _memory(10 * PAGE), _memory(5)], large=True)
    assert disk.written == [PAGE, 4 * PAGE, 4 * PAGE, 2 * PAGE, PAGE]
    assert (tmp_path / "file").stat().st_size == 11 * PAGE + 5


def test_a_system_that_writes_less_than_asked_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:PAGE]))
    given = [_memory(3 * PAGE + 5), _memory(2 * PAGE)]
    for large in (False, True):
        Disk().commit(tmp_path / "file", given, large=large)
        assert (tmp_path / "file").read_bytes() == b"".join(given)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["create", "first write", "second write", "sync"])
def test_where_direct_writes_are_refused_ordinary_ones_follow_from_then_on(
    when: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PIECE", PAGE)
    tried: list[str] = []

    class Refusing(Strict):
        def _refuse(self, name: str) -> None:
            tried.append(name)
            if name == when.split()[-1] and tried.count(name) == 1 + when.startswith("second"):
                raise OSError(code, os.strerror(code))

        def create(self, path: Path, direct: bool) -> int:
            if direct:
                self._refuse("create")
            return super().create(path, direct)

        def write(self, handle: int, data: memoryview) -> None:
            if handle in self.directly:
                self._refuse("write")
            super().write(handle, data)

        def sync(self, handle: int) -> None:
            if handle in self.directly:
                self._refuse("sync")
            super().sync(handle)

    disk = Refusing()
    given = [_memory(3 * PAGE), _memory(9, 1)]
    with caplog.at_level(logging.INFO, "dualform"):
        disk.commit(tmp_path / "file", given, large=True)
    assert (tmp_path / "file").read_bytes() == b"".join(given)
    assert "direct writes are refused here" in caplog.text
    assert not disk.direct
    tried.clear()
    disk.commit(tmp_path / "again", given, large=True)
    assert (tmp_path / "again").read_bytes() == b"".join(given)
    assert not tried


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("operation", ["create", "write", "truncate", "sync", "rename"])
def test_a_failing_operation_leaves_the_old_file_and_nothing_else(
    operation: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operation == "truncate" and not large:
        pytest.skip("only a direct write ends beyond its last byte")
    disk = Strict()
    disk.commit(tmp_path / "file", [memoryview(b"old")])

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, operation, fail)
    with pytest.raises(OSError, match="No space left"):
        disk.commit(tmp_path / "file", [_memory(PAGE), _memory(3)], large=large)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
    assert disk.direct


def test_no_descriptor_stays_open_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Strict()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "sync", fail)
    before = len(os.listdir("/proc/self/fd"))
    for large in (False, True) * 5:
        with pytest.raises(OSError, match="Input/output"):
            disk.commit(tmp_path / "file", [_memory(PAGE)], large=large)
    assert len(os.listdir("/proc/self/fd")) == before


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def parts(draw: st.DrawFn) -> list[Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.integers(1, 40))
    rows = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    whole = torch.randint(0, 2, (sum(rows), width)).to(dtype)
    split = list(whole.split(rows))
    return split if draw(st.booleans()) else [part.clone() for part in split]


@hypothesis.given(st.dictionaries(st.text("abc/0", min_size=1, max_size=5), parts(), min_size=1, max_size=6))
def test_large_tensors_begin_on_a_page_and_any_reader_reads_the_file(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, list[Tensor]]
) -> None:
    root = tmp_path_factory.mktemp("paged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LARGE", 512)
        record = write_tensors(root, "a.safetensors", tensors, paged=True)
    content = (root / "a.safetensors").read_bytes()
    assert record.bytes == len(content)
    assert record.checksums == checksums([memoryview(content)])
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    theirs, ours = safetensors.torch.load_file(root / "a.safetensors"), TensorFile(root, record)
    for name, given in tensors.items():
        truth = torch.cat(given)
        assert theirs[name].equal(truth)
        assert ours.read(name).equal(truth)
        at = torch.randperm(len(truth))[:5]
        assert ours.gather(name, at).equal(truth[at])
        start = 8 + length + header[name]["data_offsets"][0]
        assert start % truth.element_size() == 0
        if truth.nbytes >= 512:
            assert start % PAGE == 0
    assert all(name in tensors or name.removeprefix("padding/") in tensors for name in theirs)


def test_only_large_tensors_take_pages(tmp_path: Path) -> None:
    tensors = {"large": [torch.randn(files.LARGE // 4)], "small": [torch.randn(files.LARGE // 4 - 1)]}
    record = write_tensors(tmp_path, "a.safetensors", tensors, paged=True)
    assert record.bytes == PAGE + 2 * files.LARGE - 4
    record = write_tensors(tmp_path, "a.safetensors", {"small": tensors["small"]}, paged=True)
    assert record.bytes < PAGE + files.LARGE


def test_rows_are_held_one_behind_the_other_until_they_do_not_fit() -> None:
    arena = Arena({"keys": Shape(10, 3, torch.float32), "gradients": Shape(4, 1000, torch.float64)}, pinned=False)
    x = torch.randn(9, 3)
    held = [arena.hold("keys", x[:4]), arena.hold("keys", x[4:9])]
    assert all(part is not None for part in held)
    assert held[0].data_ptr() % PAGE == 0
    assert held[1].data_ptr() == held[0].data_ptr() + held[0].nbytes
    assert torch.cat(held).equal(x)
    assert arena.hold("keys", x[:2]) is None
    assert arena.hold("keys", x[:1]).equal(x[:1])
    assert arena.hold("keys", x[:0]).shape == (0, 3)
    g = torch.randn(4, 1000, dtype=torch.float64)
    assert arena.hold("gradients", g).equal(g)
    assert arena.hold("gradients", g[:1]) is None
    assert torch.cat(held).equal(x)
    arena.reset()
    assert arena.hold("keys", x[5:]).data_ptr() == held[0].data_ptr()


def test_rows_of_another_kind_are_not_held() -> None:
    arena = Arena({"keys": Shape(10, 3, torch.float32)}, pinned=False)
    assert arena.hold("keys", torch.zeros(2, 3, dtype=torch.float64)) is None
    assert arena.hold("keys", torch.zeros(2, 4)) is None
    assert arena.hold("other", torch.zeros(2, 3)) is None
    assert arena.hold("keys", torch.randn(3, 2).T) is not None
    twice = arena.reserve([("keys", Shape(1, 3, torch.float32))] * 2)
    assert twice is not None
    first, second = held(twice)
    assert second.start == first.start + 1, "a weight that is used twice"


def test_a_held_row_is_a_copy() -> None:
    staging = Staging()
    x = torch.randn(4, 3)
    for ready in (False, True):
        assert staging.ready is ready
        held = [staging.hold("keys", x[:2]), staging.hold("keys", x.T[:, :2])]
        before = x.clone()
        x += 1
        assert held[0].equal(before[:2])
        assert held[1].equal(before.T[:, :2])
        assert all(part.is_contiguous() for part in held)
        staging.make({"keys": Shape(3, 3, torch.float32)})


def test_what_was_held_before_a_turn_stays_until_the_next_one() -> None:
    staging = Staging()
    staging.turn()
    staging.make({"keys": Shape(4, 2, torch.float32)})
    first = staging.hold("keys", torch.full((4, 2), 1.0))
    staging.turn()
    second = staging.hold("keys", torch.full((4, 2), 2.0))
    assert (first == 1).all()
    assert (second == 2).all()
    beyond = staging.hold("keys", torch.full((1, 2), 9.0))
    staging.turn()
    third = staging.hold("keys", torch.full((4, 2), 3.0))
    assert third.data_ptr() == first.data_ptr()
    assert (second == 2).all()
    assert (beyond == 9).all()


def _recorded(path: Path) -> dualform.Memory:
    """A run in which batches grow and shrink, a step takes two passes, and a commit comes between them."""
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(model, optimizer, path, on_error="raise") as recorder:
        for step in range(1, 16):
            for part in range(2):
                ids, x, y = batch(2 * step + part, size=5 + 60 * (step % 7 == 0) - step % 3, dtype=torch.float32)
                with recorder.batch(ids), torch.autocast("cpu", torch.bfloat16, enabled=step in (8, 9)):
                    F.cross_entropy(model(x), y).backward()
                if step % 5 == 0 and part == 0:
                    recorder.commit()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path)


def test_a_memory_gathered_in_arenas_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _recorded(tmp_path / "plain")
    made: list[int] = []
    make = Staging.make
    monkeypatch.setattr(writer, "COMMIT_BYTES", 8000)
    monkeypatch.setattr(Staging, "make", lambda self, shapes: made.append(len(shapes)) or make(self, shapes))
    monkeypatch.setattr(files, "LARGE", 256)
    staged = _recorded(tmp_path / "staged")
    assert made == [4]
    assert len(staged.manifest.segments) > len(plain.manifest.segments)
    for weight in range(2):
        for name in ("keys", "gradients", "examples", "steps", "backwards"):
            one, other = (
                torch.cat([getattr(block, name).double() for block in memory.blocks(weight, 15)])
                for memory in (plain, staged)
            )
            assert one.equal(other), name
    assert staged.verify().ok
    for segment in staged.manifest.segments:
        safetensors.torch.load_file(tmp_path / "staged" / segment.file.file)


def test_a_step_too_large_for_any_arena_is_recorded_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 8000)
    monkeypatch.setattr(writer, "LARGEST_ARENA", 100)
    monkeypatch.setattr(Staging, "make", lambda *_: pytest.fail("an arena was made"))
    assert _recorded(tmp_path / "run").verify().ok


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    held = Lock(tmp_path)
    with pytest.raises(MemoryInUse, match=f"process {os.getpid()} on ") as refused:
        Lock(tmp_path)
    assert str(tmp_path) in str(refused.value)
    held.release()
    held.release()
    again = Lock(tmp_path)
    with pytest.raises(MemoryInUse):
        Lock(tmp_path)
    again.release()
    assert not lock._held


def test_a_second_recorder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    def step() -> None:
        with recorder.batch([0]):
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, other = network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        step()
        second = dualform.record(other, torch.optim.SGD(other.parameters(), lr=0.1), tmp_path / "run", resume_at=0)
        with pytest.raises(MemoryInUse):
            second.start()
        assert not other._forward_hooks
        step()
    assert dualform.open(tmp_path / "run").certificate().exact
    assert dualform.open(tmp_path / "run").steps == 2


HOLD = """
import os, sys, time
from pathlib import Path
from dualform.memory.lock import Lock
lock = Lock(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["kill", "fork"])
def test_a_lock_dies_with_its_process(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        holder = int(other.stdout.readline())
        try:
            if how == "kill":
                with pytest.raises(MemoryInUse, match=f"process {holder} on "):
                    Lock(tmp_path)
                other.send_signal(signal.SIGKILL)
            other.wait()  # of a fork the child lives on: the lock was its parent's
            Lock(tmp_path).release()
        finally:
            if how == "fork":
                os.kill(holder, signal.SIGKILL)


def test_where_nothing_can_be_locked_recording_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    held = Lock(tmp_path)
    assert "nothing keeps a second writer out" in caplog.text
    held.release()
    assert not lock._held
    assert (tmp_path / LOCK).exists()
