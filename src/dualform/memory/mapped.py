"""Safetensors files as dualform reads them: mapped where they are looked at, and every 1 MB checked at its first touch.

A damaged byte is told before it can become a wrong answer. Few files stay open and little stays mapped between two
calls: a memory may have thousands of files and be larger than the machine's own memory.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import xxhash
from jaxtyping import Int64, UInt8
from torch import Tensor

from dualform.errors import DamagedMemory
from dualform.fast import compiled, in_parts
from dualform.memory.files import CHUNK, DTYPES, ZEROS, FileRecord
from dualform.memory.windows import Bytes, Descriptor, Windows, copied, descriptors, fill, fill_at_once, window

SMALL = 256 << 10  # up to here a copy is faster than a mapping and its page faults
FEW = 256  # rows up to which reading one by one is faster than mapping all between the first and the last
PART = 1 << 20  # bytes for which a thread of its own pays
TILE = 8 << 20  # bytes that are read at a time where they cannot stay mapped
WINDOW = 32 << 20  # bytes that `gather` maps at a time
_MARK = b'"checksum":"'

Rows = UInt8[np.ndarray, "rows bytes"]
Read = Callable[[int, int], bytes | memoryview]
Entry = tuple[torch.dtype, list[int], int]


def unseal(text: bytes, where: Path) -> None:
    """Check a sealed text; DamagedMemory where a bit of it differs from what was written."""
    _unseal(lambda begin, end: text[begin:end], len(text), where)


def _unseal(read: Read, size: int, where: Path) -> None:
    """Check a sealed text that is read in pieces."""
    start = _after_mark(read, size)
    if start >= 0:
        digest = xxhash.xxh3_64()
        for piece in chain(_pieces(read, 0, start), [ZEROS.encode()], _pieces(read, start + 16, size)):
            digest.update(piece)
        if digest.hexdigest().encode() == bytes(read(start, min(start + 16, size))):
            return
    raise DamagedMemory(f"{where} is damaged: its checksum does not match its content. Restore the file from a copy.")


def _pieces(read: Read, begin: int, end: int) -> Iterator[bytes | memoryview]:
    return (read(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK))


def _after_mark(read: Read, size: int) -> int:
    for at in range(0, size, CHUNK):
        place = bytes(read(at, min(at + CHUNK + len(_MARK) - 1, size))).find(_MARK)
        if place >= 0:
            return at + place + len(_MARK)
    return -1


class TensorFile:
    """A safetensors file: `read` gives rows of a tensor, mapped as long as that tensor lives, their chunks checked."""

    def __init__(
        self,
        root: Path,
        record: FileRecord | None = None,
        file: str = "",
        check: bool = True,
        windows: Windows | None = None,
    ) -> None:
        self.path = root / (record.file if record else file)
        self._name, self._record, self._check, self._windows = str(self.path), record, check, windows
        self._seen: tuple[int, int, int] | None = None
        self._unchecked: set[int] = set()
        self.metadata: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        self._start = 0
        weakref.finalize(self, descriptors.drop, id(self), self._name).atexit = False
        self._open()

    def _open(self) -> Descriptor:
        """The file's descriptor for one call; a file that was written to since the last one is checked anew."""
        descriptor = descriptors.get(id(self), self._name)
        found = os.fstat(descriptor.number)
        now = (found.st_ino, found.st_size, found.st_mtime_ns)
        if now != self._seen:
            self._look(descriptor, found.st_size)
            self._seen = now
        return descriptor

    def _look(self, descriptor: Descriptor, size: int) -> None:
        if size < 8 or (self._record is not None and size != self._record.bytes):
            expected = f"{self._record.bytes:,}" if self._record else "at least 8"
            raise DamagedMemory(
                f"{self.path} is truncated or was edited: it should have {expected} bytes and has {size:,}."
            )
        self._size = size
        self._unchecked = set(range(-(-size // CHUNK))) if self._record else set()
        if not self._check:
            return
        if self._record is None:
            _unseal(lambda begin, end: copied(descriptor, begin, end).data, size, self.path)
        self.metadata, self._entries, self._start = self._header(descriptor)

    def _header(self, descriptor: Descriptor) -> tuple[dict[str, str], dict[str, Entry], int]:
        self._check_chunks(descriptor, self._untouched(0, 8))
        start = 8 + int.from_bytes(copied(descriptor, 0, 8).tobytes(), "little")
        if start > self._size:
            raise DamagedMemory(f"{self.path} is damaged: its header is longer than the file.")
        self._check_chunks(descriptor, self._untouched(8, start))
        text = copied(descriptor, 8, start).tobytes()
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__", {})
            entries = {}
            for name, entry in header.items():
                dtype, shape = DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
                begin, end = entry["data_offsets"]
                length = math.prod(shape) * dtype.itemsize
                if not 0 <= begin <= end <= self._size - start or end - begin != length:
                    raise ValueError(name)
                entries[name] = (dtype, shape, begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedMemory(f"{self.path} is damaged: its header cannot be read ({error}).") from None
        return metadata, entries, start

    def _bytes(self, descriptor: Descriptor, begin: int, end: int) -> Bytes:
        """Some bytes of the file after checking their chunks: copied where they are few, else a window."""
        chunks = self._untouched(begin, end)
        if end - begin < SMALL:
            self._check_chunks(descriptor, chunks)
            return copied(descriptor, begin, end)
        data = self._window(descriptor, begin, end)
        inside = range(-(-begin // CHUNK), end // CHUNK)
        self._check_chunks(descriptor, (chunk for chunk in chunks if chunk not in inside))
        for chunk in (chunk for chunk in chunks if chunk in inside):
            self._check_chunk(chunk, data[chunk * CHUNK - begin : (chunk + 1) * CHUNK - begin])
        return data

    def _window(self, descriptor: Descriptor, begin: int, end: int) -> Bytes:
        if self._windows is None:
            return window(descriptor, begin, end)
        return self._windows.get((self._name, self._seen, begin, end), descriptor, begin, end)

    def _untouched(self, begin: int, end: int) -> list[int]:
        if not self._unchecked:
            return []
        return [chunk for chunk in range(begin // CHUNK, -(-end // CHUNK)) if chunk in self._unchecked]

    def _chunk(self, descriptor: Descriptor, chunk: int) -> Bytes:
        return copied(descriptor, chunk * CHUNK, min((chunk + 1) * CHUNK, self._size))

    def _check_chunks(self, descriptor: Descriptor, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._check_chunk(chunk, self._chunk(descriptor, chunk))

    def _check_chunk(self, chunk: int, data: Bytes) -> None:
        if not self._is_whole(chunk, data):
            raise DamagedMemory(
                f"{self.path} is damaged in its bytes {chunk * CHUNK:,} to {(chunk + 1) * CHUNK:,}: "
                "the checksum does not match. `dualform verify` lists all damage."
            )
        self._unchecked.discard(chunk)

    def _is_whole(self, chunk: int, data: Bytes) -> bool:
        assert self._record is not None
        expected = self._record.checksums[chunk] if chunk < len(self._record.checksums) else ""
        return xxhash.xxh3_64_hexdigest(data.data) == expected

    def damaged_chunks(self) -> list[int]:
        """Every chunk whose checksum does not match, all of them read anew."""
        if self._record is None:
            return []
        descriptor, chunks = self._open(), range(-(-self._size // CHUNK))
        return [chunk for chunk in chunks if not self._is_whole(chunk, self._chunk(descriptor, chunk))]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """The tensors of this file, without what only fills its pages."""
        return [name for name in self._entries if not name.startswith("padding/")]

    def rows(self, name: str) -> int:
        """The length of a tensor's first dimension."""
        return self._entry(name)[1][0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._entry(name)[0]

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise DamagedMemory(f"{self.path} has no tensor {name!r}, which its manifest promises.")
        return self._entries[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start…stop of a tensor; the whole tensor by default. Many bytes are mapped while the result lives."""
        descriptor = self._open()
        dtype, shape, begin = self._entry(name)
        at, length = self._start + begin, math.prod(shape) * dtype.itemsize
        if start != 0 or stop is not None:
            stop = shape[0] if stop is None else min(stop, shape[0])
            width = math.prod(shape[1:]) * dtype.itemsize
            shape = [max(stop - start, 0), *shape[1:]]
            at, length = at + start * width, shape[0] * width
        if length == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._bytes(descriptor, at, at + length)).view(dtype).reshape(shape)

    def tiles(self, name: str, rows: int, read: bool = False) -> Iterator[tuple[int, Tensor]]:
        """All rows of a tensor, at most so many at a time, with the number of the first.

        A tile is there until the next one is asked for. With `read`, what cannot stay mapped is read into memory that
        the next tile uses again: that costs less than mapping it for a moment.
        """
        self._open()
        dtype, shape, begin = self._entry(name)
        width = math.prod(shape[1:]) * dtype.itemsize
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            if not read or self._stays(*(self._start + begin + row * width for row in (start, stop))):
                yield start, self.read(name, start, stop)
            else:
                yield from self._read_tiles(name, start, stop, max(TILE // width, 1))

    def _stays(self, begin: int, end: int) -> bool:
        """Whether bytes are better mapped: few, not checked yet, or such as can stay mapped."""
        if self._windows is None or end - begin < TILE or self._untouched(begin, end):
            return True
        return self._windows.fits((self._name, self._seen, begin, end), begin, end)

    def _read_tiles(self, name: str, start: int, stop: int, rows: int) -> Iterator[tuple[int, Tensor]]:
        descriptor = self._open()
        dtype, shape, begin = self._entry(name)
        width = math.prod(shape[1:]) * dtype.itemsize
        buffer = np.empty(rows * width, dtype=np.uint8)
        for at in range(start, stop, rows):
            data = buffer[: min(rows, stop - at) * width]
            fill_at_once(descriptor, data, self._start + begin + at * width)
            yield at, torch.from_numpy(data).view(dtype).reshape(-1, *shape[1:])

    def gather(self, name: str, rows: Int64[Tensor, " rows"]) -> Tensor:
        """Some rows of a tensor, in any order."""
        dtype, shape, _ = self._entry(name)
        return torch.from_numpy(self.gather_bytes(name, rows.numpy()).reshape(-1)).view(dtype).reshape(-1, *shape[1:])

    def gather_bytes(self, name: str, rows: Int64[np.ndarray, " rows"], into: Rows | None = None) -> Rows:
        """The bytes of some rows of a tensor, where they are wanted if that is possible."""
        descriptor = self._open()
        dtype, shape, begin = self._entry(name)
        width = math.prod(shape[1:]) * dtype.itemsize
        numbers = rows.tolist()
        if not numbers or width == 0:
            return np.empty((len(numbers), width), dtype=np.uint8)
        if min(numbers) < 0 or max(numbers) >= shape[0]:
            raise IndexError(f"{name} has the rows 0 to {shape[0] - 1}")
        at = self._start + begin
        found = self._at_once(descriptor, at + rows * width, width, into)
        if found is not None:
            return found
        if len(numbers) <= FEW:
            return self._few(descriptor, at, width, numbers)
        return self._many(descriptor, at, width, rows, shape[0])

    def _at_once(
        self, descriptor: Descriptor, places: Int64[np.ndarray, " rows"], width: int, into: Rows | None
    ) -> Rows | None:
        """Rows that were checked before, by one compiled loop; None where it is not at hand, or something is wrong."""
        loops = compiled(len(places) * width)
        if loops is None or width > CHUNK:
            return None
        if self._unchecked:
            chunks = np.unique(np.concatenate([places // CHUNK, (places + width - 1) // CHUNK]))
            if not self._unchecked.isdisjoint(chunks.tolist()):
                return None
        data: Rows = np.empty((len(places), width), dtype=np.uint8) if into is None else into
        arguments = descriptor.number, places, data
        return data if all(in_parts(loops.read_rows, data.nbytes // PART, *arguments)) else None

    def _few(self, descriptor: Descriptor, at: int, width: int, rows: list[int]) -> Rows:
        """Rows read one by one; those that follow each other at once."""
        data = np.empty(len(rows) * width, dtype=np.uint8)
        filled = 0
        first = last = rows[0]
        for row in (*rows[1:], -1):
            if row != last + 1:
                begin, length = at + first * width, (last + 1 - first) * width
                self._check_chunks(descriptor, self._untouched(begin, begin + length))
                fill(descriptor, data[filled : filled + length], begin)
                filled, first = filled + length, row
            last = row
        return data.reshape(-1, width)

    def _many(self, descriptor: Descriptor, at: int, width: int, rows: Int64[np.ndarray, " rows"], count: int) -> Rows:
        """Rows picked out of windows over all that lies between them."""
        if self._unchecked:
            chunks = -(-self._size // CHUNK) + 1
            begun = np.bincount((at + rows * width) // CHUNK, minlength=chunks)
            ended = np.bincount((at + (rows + 1) * width - 1) // CHUNK + 1, minlength=chunks)
            touched = np.flatnonzero(np.cumsum(begun - ended) > 0).tolist()
            self._check_chunks(descriptor, (chunk for chunk in touched if chunk in self._unchecked))
        most = max(1, WINDOW // width)
        places = rows // most
        result: Rows = np.empty((len(rows), width), dtype=np.uint8)
        for place in np.unique(places).tolist():
            low, high = place * most, min((place + 1) * most, count)
            seen = self._window(descriptor, at + low * width, at + high * width).reshape(-1, width)
            inside = np.flatnonzero(places == place)
            if len(inside) == len(rows):
                np.take(seen, rows - low, axis=0, out=result, mode="clip")  # the mode that takes no copy first
            else:
                result[inside] = np.take(seen, rows[inside] - low, axis=0)
        return result
