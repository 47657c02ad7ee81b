"""Safetensors files as dualform writes and reads them: atomically, checksummed per 1 MB, mapped.

A file is committed by write, fsync, rename, fsync of its directory. Reading maps the file and checks a chunk
at its first touch, so that a damaged byte is told before it can become a wrong answer.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from dualform.errors import DamagedMemory

CHUNK = 1 << 20
_ZEROS = "0" * 16
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
    return int.from_bytes(xxhash.xxh3_64_digest(tensor_bytes(tensor)), "big", signed=True)


def storable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be stored in a memory."""
    return dtype in _NAMES


class _Checksummer:
    """xxh3 of every 1 MB chunk of a stream of bytes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + CHUNK - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            at += len(part)
            if self._filled == CHUNK:
                self._close()

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._filled = 0

    def result(self) -> tuple[str, ...]:
        if self._filled:
            self._close()
        return tuple(self._done)


def _encode(tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """A safetensors file, piece by piece; each tensor comes in parts that follow each other along dim 0."""
    # Wide types first, so that every tensor in the mapped file is aligned to its own item size.
    order = sorted(tensors, key=lambda name: -tensors[name][0].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        parts = tensors[name]
        length = sum(part.numel() * part.element_size() for part in parts)
        first = parts[0]
        shape = list(first.shape) if len(parts) == 1 else [sum(len(p) for p in parts), *first.shape[1:]]
        header[name] = {
            "dtype": _NAMES[first.dtype], "shape": shape, "data_offsets": [offset, offset + length],
        }  # fmt: skip
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        for part in tensors[name]:
            if part.numel():
                yield tensor_bytes(part)


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, pieces: Iterable[memoryview | bytes]) -> None:
    """Write a file so that it is there whole and durable, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # on a full disk its room is needed
        raise
    sync_directory(path.parent)


def write_tensors(root: Path, file: str, tensors: Mapping[str, Sequence[Tensor]]) -> FileRecord:
    """Commit a safetensors file below `root`; the record belongs into the manifest."""
    checksummer = _Checksummer()
    total = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal total
        for piece in _encode(tensors, {}):
            checksummer.update(piece)
            total += len(piece)
            yield piece

    write_atomically(root / file, pieces())
    return FileRecord(file, total, checksummer.result())


def seal(text: bytes) -> bytes:
    """Fill in the checksum of a text that carries one: sixteen zeros stand for it while it is computed."""
    marker = f'"checksum":"{_ZEROS}"'.encode()
    return text.replace(marker, f'"checksum":"{xxhash.xxh3_64_hexdigest(text)}"'.encode(), 1)


def unseal(text: bytes, where: Path) -> None:
    """Check a sealed text; DamagedMemory where a bit of it differs from what was written."""
    at = text.find(b'"checksum":"')
    start = at + len(b'"checksum":"')
    found = text[start : start + 16]
    blank = text[:start] + _ZEROS.encode() + text[start + 16 :]
    if at < 0 or xxhash.xxh3_64_hexdigest(blank).encode() != found:
        raise DamagedMemory(
            f"{where} is damaged: its checksum does not match its content. Restore the file from a copy."
        )


def write_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Commit a small safetensors file that carries its own checksum."""
    sealed = {**metadata, "checksum": _ZEROS}
    whole = b"".join(_encode({name: [tensor] for name, tensor in tensors.items()}, sealed))
    write_atomically(path, [seal(whole)])


class TensorFile:
    """A mapped safetensors file: `read` gives rows of a tensor without a copy, after checking their chunks."""

    def __init__(self, root: Path, record: FileRecord | None = None, file: str = "", check: bool = True) -> None:
        self.path = root / (record.file if record else file)
        self._record = record
        self._map = self._open()
        self._unchecked = set(range(-(-len(self._map) // CHUNK)))
        if not check:
            return
        if record is None:
            unseal(bytes(self._raw(0, len(self._map))), self.path)
        else:
            self._check(0, 8)
        self.metadata, self._entries, self._start = self._header()

    def _open(self) -> Tensor:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise DamagedMemory(f"{self.path} is missing: the manifest names it ({error.strerror}).") from None
        if size < 8 or (self._record is not None and size != self._record.bytes):
            expected = f"{self._record.bytes:,}" if self._record else "at least 8"
            raise DamagedMemory(
                f"{self.path} is truncated or was edited: it should have {expected} bytes and has {size:,}."
            )
        # A private mapping that keeps no descriptor open: a long run has thousands of segments.
        try:
            storage = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=size)
        except RuntimeError as error:
            raise DamagedMemory(f"{self.path} cannot be mapped: {error}.") from None
        assert isinstance(storage, torch.UntypedStorage)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)

    def _raw(self, begin: int, end: int) -> memoryview:
        return self._map[begin:end].numpy().data

    def _header(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, list[int], int]], int]:
        length = int.from_bytes(self._raw(0, 8), "little")
        start = 8 + length
        if start > len(self._map):
            raise DamagedMemory(f"{self.path} is damaged: its header is longer than the file.")
        self._check(0, start)
        try:
            header = json.loads(bytes(self._raw(8, start)))
            metadata = header.pop("__metadata__", {})
            entries = {}
            for name, entry in header.items():
                dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
                begin, end = entry["data_offsets"]
                count = 1
                for size in shape:
                    count *= size
                if not 0 <= begin <= end <= len(self._map) - start or end - begin != count * dtype.itemsize:
                    raise ValueError(name)
                entries[name] = (dtype, shape, begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedMemory(f"{self.path} is damaged: its header cannot be read ({error}).") from None
        return metadata, entries, start

    def _check(self, begin: int, end: int) -> None:
        if self._record is None or begin == end:
            return
        for chunk in range(begin // CHUNK, -(-end // CHUNK)):
            if chunk in self._unchecked:
                if not self._chunk_is_whole(chunk):
                    raise DamagedMemory(
                        f"{self.path} is damaged in its bytes {chunk * CHUNK:,} to {(chunk + 1) * CHUNK:,}: "
                        "the checksum does not match. `dualform verify` lists all damage."
                    )
                self._unchecked.discard(chunk)

    def _chunk_is_whole(self, chunk: int) -> bool:
        assert self._record is not None
        data = self._raw(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self._map)))
        expected = self._record.checksums[chunk] if chunk < len(self._record.checksums) else ""
        return xxhash.xxh3_64_hexdigest(data) == expected

    def damaged_chunks(self) -> list[int]:
        """Every chunk whose checksum does not match, all of them read anew."""
        if self._record is None:
            return []
        return [chunk for chunk in range(-(-len(self._map) // CHUNK)) if not self._chunk_is_whole(chunk)]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """The tensors of this file."""
        return list(self._entries)

    def rows(self, name: str) -> int:
        """The length of a tensor's first dimension."""
        return self._entry(name)[1][0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._entry(name)[0]

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], int]:
        if name not in self._entries:
            raise DamagedMemory(f"{self.path} has no tensor {name!r}, which its manifest promises.")
        return self._entries[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start…stop of a tensor, mapped; the whole tensor by default."""
        dtype, shape, begin = self._entry(name)
        if stop is None and start == 0:
            rows, inner = None, shape
        else:
            stop = shape[0] if stop is None else min(stop, shape[0])
            rows, inner = max(stop - start, 0), shape[1:]
        width = dtype.itemsize
        for size in inner:
            width *= size
        at = self._start + begin + (0 if rows is None else start * width)
        length = width if rows is None else rows * width
        result_shape = shape if rows is None else [rows, *inner]
        if length == 0:
            return torch.empty(result_shape, dtype=dtype)
        self._check(at, at + length)
        return self._map[at : at + length].view(dtype).reshape(result_shape)
