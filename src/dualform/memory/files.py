"""Safetensors files as dualform writes them, with a checksum for every 1 MB."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from jaxtyping import Int64
from torch import Tensor

from dualform.fast import load
from dualform.memory.blocksums import BlockSums
from dualform.memory.disk import PAGE, disk

CHUNK = 1 << 20
FINAL = "final.safetensors"
LARGE = 64 << 10  # tensors of at least this many bytes begin on a page of their own
ZEROS = "0" * 16
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Mapping[str, Sequence[Tensor]]
"""Tensors by name, each in parts that follow each other along dimension 0."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file: where it is, how long, and a checksum per chunk of 1 MB."""

    file: str
    bytes: int
    checksums: tuple[str, ...]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def tensor_hash(tensor: Tensor) -> int:
    """xxh3 of a tensor's bytes, as a signed 64-bit number: equal bits have equal hashes."""
    return bytes_hash(tensor_bytes(tensor))


def bytes_hash(data: memoryview) -> int:
    """xxh3 of some bytes, as a signed 64-bit number."""
    return int(bytes_hashes([data])[0])


def bytes_hashes(parts: Sequence[memoryview]) -> Int64[np.ndarray, " parts"]:
    """The same of each of these parts."""
    return np.array([xxhash.xxh3_64_intdigest(part) for part in parts], dtype=np.uint64).view(np.int64)


def storable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be stored in a memory."""
    return dtype in _NAMES


def checksums(pieces: Iterable[memoryview], sums: BlockSums | None = None) -> tuple[str, ...]:
    """xxh3 of every 1 MB chunk of what these pieces are one after another; `sums` may know a part of them."""
    if sums is not None and sums.any and (loops := load("dualform.memory.xxh3")) is not None:
        pieces = [piece for piece in pieces if len(piece)]
        chunks = np.empty(sum(map(len, pieces)) // CHUNK, dtype=np.uint64)
        loops.checksum_chunks(sums.pieces(pieces), chunks)
        return (*(f"{chunk:016x}" for chunk in chunks.tolist()), *checksums(_from(pieces, CHUNK * len(chunks))))
    digest, filled = xxhash.xxh3_64(), 0
    done: list[str] = []
    for piece in pieces:
        while len(piece):
            part = piece[: CHUNK - filled]
            digest.update(part)
            filled += len(part)
            piece = piece[len(part) :]
            if filled == CHUNK:
                done.append(digest.hexdigest())
                digest.reset()
                filled = 0
    return (*done, digest.hexdigest()) if filled else tuple(done)


def _from(pieces: Iterable[memoryview], start: int) -> Iterator[memoryview]:
    """What is left of pieces after so many bytes."""
    for piece in pieces:
        yield piece[start:]
        start = max(start - len(piece), 0)


def _encode(tensors: Tensors, metadata: Mapping[str, str], paged: bool) -> list[memoryview]:
    """A safetensors file in pieces; `paged` has the large tensors, and so their pieces, begin at whole pages."""
    sizes = {name: sum(part.nbytes for part in parts) for name, parts in tensors.items()}
    large = [name for name in tensors if paged and sizes[name] >= LARGE]
    # Of the others wide types first, so that every tensor in the mapped file is aligned to its own item size.
    small = sorted((name for name in tensors if name not in large), key=lambda name: -tensors[name][0].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    pieces: list[memoryview] = []
    offset = 0

    def add(name: str, dtype: torch.dtype, shape: Sequence[int], length: int) -> None:
        nonlocal offset
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length

    for name in (*large, *small):
        parts = tensors[name]
        shape = parts[0].shape if len(parts) == 1 else (sum(len(part) for part in parts), *parts[0].shape[1:])
        add(name, parts[0].dtype, shape, sizes[name])
        filled = [part for part in parts if part.numel()]
        pieces += [tensor_bytes(part) for part in _joined(filled)]
        if name in large and offset % PAGE:
            padding = -offset % PAGE  # safetensors allows no gaps
            add(f"padding/{name}", torch.uint8, [padding], padding)
            pieces.append(memoryview(bytes(padding)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % (PAGE if large else 8))
    return [memoryview(len(text).to_bytes(8, "little") + text), *pieces]


def _joined(parts: Sequence[Tensor]) -> list[Tensor]:
    """Parts that follow each other in memory as one tensor: what an arena gathered goes to the disk as it lies."""
    runs: list[list[Tensor]] = []
    storage, end = -1, -1
    for part in parts:
        if part.data_ptr() == end and part.untyped_storage().data_ptr() == storage and part.is_contiguous():
            runs[-1].append(part)
        else:
            runs.append([part])
            storage = part.untyped_storage().data_ptr()
        end = part.data_ptr() + part.nbytes
    return [run[0] if len(run) == 1 else _spanned(run) for run in runs]


def _spanned(run: Sequence[Tensor]) -> Tensor:
    first, rows = run[0], sum(len(part) for part in run)
    whole = torch.empty(0, dtype=first.dtype, device="cpu")
    return whole.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())


def write_tensors(
    root: Path, file: str, tensors: Tensors, paged: bool = False, sums: BlockSums | None = None
) -> FileRecord:
    """Commit a safetensors file below `root`; the record belongs into the manifest."""
    pieces = _encode(tensors, {}, paged)
    record = FileRecord(file, sum(len(piece) for piece in pieces), checksums(pieces, sums))
    disk.commit(root / file, pieces, large=paged)
    return record


def seal(text: bytes) -> bytes:
    """Fill in the checksum of a text that carries one: sixteen zeros stand for it while it is computed."""
    marker = f'"checksum":"{ZEROS}"'.encode()
    return text.replace(marker, f'"checksum":"{xxhash.xxh3_64_hexdigest(text)}"'.encode(), 1)


def write_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Commit a safetensors file that carries its own checksum; its large tensors begin at whole pages."""
    sealed = {**metadata, "checksum": ZEROS}
    header, *pieces = _encode({name: [tensor] for name, tensor in tensors.items()}, sealed, paged=True)
    digest = xxhash.xxh3_64(header)
    for piece in pieces:
        digest.update(piece)
    filled = bytes(header).replace(f'"checksum":"{ZEROS}"'.encode(), f'"checksum":"{digest.hexdigest()}"'.encode(), 1)
    disk.commit(path, [memoryview(filled), *pieces])
