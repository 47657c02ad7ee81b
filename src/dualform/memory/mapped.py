"""Safetensors files as dualform reads them: mapped, and every 1 MB checked at its first touch.

A damaged byte is told before it can become a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import xxhash
from jaxtyping import Int64
from torch import Tensor

from dualform.errors import DamagedMemory
from dualform.memory.files import CHUNK, DTYPES, ZEROS, FileRecord


def unseal(text: bytes, where: Path) -> None:
    """Check a sealed text; DamagedMemory where a bit of it differs from what was written."""
    at = text.find(b'"checksum":"')
    start = at + len(b'"checksum":"')
    found = text[start : start + 16]
    blank = text[:start] + ZEROS.encode() + text[start + 16 :]
    if at < 0 or xxhash.xxh3_64_hexdigest(blank).encode() != found:
        raise DamagedMemory(
            f"{where} is damaged: its checksum does not match its content. Restore the file from a copy."
        )


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
                dtype, shape = DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
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
        if self._record is not None and self._unchecked and begin < end:
            self._check_chunks(range(begin // CHUNK, -(-end // CHUNK)))

    def _check_chunks(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
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

    def gather(self, name: str, rows: Int64[Tensor, " rows"]) -> Tensor:
        """Some rows of a tensor, in any order, copied out."""
        dtype, shape, begin = self._entry(name)
        width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        if len(rows) and self._unchecked:
            first = (self._start + begin + rows.numpy() * width) // CHUNK
            last = (self._start + begin + (rows.numpy() + 1) * width - 1) // CHUNK
            for low, high in np.unique(np.stack([first, last], axis=1), axis=0).tolist():
                self._check_chunks(range(low, high + 1))
        whole = self._map[self._start + begin : self._start + begin + width * shape[0]]
        return whole.view(dtype).reshape(shape)[rows]
