"""Files as dualform writes them: plain safetensors that any reader opens, atomic, checked at first touch."""

import json
import os
from pathlib import Path

import hypothesis
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import strategies as st

from dualform.errors import DamagedMemory
from dualform.memory.disk import disk
from dualform.memory.files import CHUNK, tensor_hash, write_sealed, write_tensors
from dualform.memory.mapped import TensorFile
from small import run

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def parts(draw: st.DrawFn) -> list[torch.Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    inner = draw(st.lists(st.integers(0, 3), max_size=2))
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    return [torch.randint(0, 2, (n, *inner)).to(dtype) for n in rows]


@hypothesis.given(st.dictionaries(st.text("abc/0", min_size=1, max_size=5), parts(), min_size=1, max_size=5))
def test_the_safetensors_library_reads_what_we_write(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> None:
    root = tmp_path_factory.mktemp("files")
    record = write_tensors(root, "a.safetensors", tensors)
    theirs = safetensors.torch.load_file(root / "a.safetensors")
    ours = TensorFile(root, record)
    for name, pieces in tensors.items():
        truth = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        assert theirs[name].equal(truth)
        assert ours.read(name).equal(truth)
        if truth.ndim and len(truth):
            assert ours.read(name, 1, 3).equal(truth[1:3])
    assert set(ours.names()) == set(tensors)


def test_the_safetensors_library_reads_a_segment(tmp_path: Path) -> None:
    _, memory = run(tmp_path / "run", steps=3)
    tensors = safetensors.torch.load_file(tmp_path / "run/segments/r000-000000.safetensors")
    (block,) = memory.blocks(0, 3)
    assert tensors["w0/keys"].equal(block.keys)
    assert tensors["w0/gradients"].equal(block.gradients)
    assert tensors["w0/examples"].equal(block.examples)


def test_checksums_are_xxh3_of_every_megabyte(tmp_path: Path) -> None:
    record = write_tensors(tmp_path, "a.safetensors", {"x": [torch.randn(700_000)]})
    content = (tmp_path / "a.safetensors").read_bytes()
    assert record.bytes == len(content)
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    assert record.checksums == tuple(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks)
    assert len(chunks) == 3


def test_a_chunk_is_checked_at_its_first_touch(tmp_path: Path) -> None:
    record = write_tensors(tmp_path, "a.safetensors", {"x": [torch.zeros(700_000)]})
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[2 * CHUNK + 5] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    file = TensorFile(tmp_path, record)
    assert file.read("x", 0, 1000).sum() == 0
    with pytest.raises(DamagedMemory, match=r"bytes 2,097,152 to 3,145,728"):
        file.read("x", 600_000, 600_001)
    assert file.damaged_chunks() == [2]


def test_every_flipped_bit_of_a_sealed_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "column.safetensors"
    write_sealed(path, {"values": torch.arange(5)}, {"categories": json.dumps(['"checksum":"0000000000000000"'])})
    content = path.read_bytes()
    assert TensorFile(tmp_path, file="column.safetensors").read("values").tolist() == [0, 1, 2, 3, 4]
    for at in range(len(content)):
        for bit in (1, 128):
            changed = bytearray(content)
            changed[at] ^= bit
            path.write_bytes(changed)
            with pytest.raises(DamagedMemory):
                TensorFile(tmp_path, file="column.safetensors")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        disk.commit(tmp_path / "a", [memoryview(b"new")])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_equal_bits_have_equal_hashes() -> None:
    x = torch.randn(10, 4)
    assert tensor_hash(x) == tensor_hash(x.T.contiguous().T)
    y = x.clone()
    y[3, 2] = torch.nextafter(y[3, 2], torch.tensor(9.0))
    assert tensor_hash(x) != tensor_hash(y)
    assert tensor_hash(torch.tensor(0.0)) != tensor_hash(torch.tensor(-0.0))
