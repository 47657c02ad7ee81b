"""The disk: every operation that changes a file of a memory, and the one way to commit a file.

A file is committed by write, sync, rename, sync of its directory: it is there whole and durable, or not at all.
Large files go past the page cache (O_DIRECT) where the file system allows it: the copy into the cache is what
recording would cost most. `disk` is the one object that does it, so that tests can stop or fail every operation.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger("dualform")

PAGE = 4096
_PIECE = 8 << 20  # bytes that go to the disk in one direct write
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class Disk:
    """The operations, each as small as a test needs it, and `commit`, which is made of them."""

    def __init__(self) -> None:
        self.direct = bool(_O_DIRECT)
        self._own = threading.local()  # every writer has a thread, and a buffer, of its own

    def create(self, path: Path, direct: bool) -> int:
        """Open a new file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (_O_DIRECT if direct else 0), 0o666)

    def write(self, handle: int, data: memoryview) -> None:
        """Write all of `data` at the end of what was written so far."""
        while len(data):
            data = data[os.write(handle, data) :]

    def truncate(self, handle: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        """Make what was written durable."""
        os.fsync(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name, over whatever had it before."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def make_directory(self, path: Path) -> None:
        """Make a directory, with those above it."""
        path.mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make renames inside a directory durable."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def commit(self, path: Path, pieces: Sequence[memoryview], large: bool = False) -> None:
        """Write a file so that it is there whole and durable, or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        try:
            if not (large and self.direct and self._written_direct(temporary, pieces)):
                handle = self.create(temporary, False)
                try:
                    for piece in pieces:
                        self.write(handle, piece)
                    self.sync(handle)
                finally:
                    os.close(handle)
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(temporary)  # on a full disk its room is needed
            raise
        self.sync_directory(path.parent)

    def _written_direct(self, path: Path, pieces: Sequence[memoryview]) -> bool:
        """Write past the page cache; False, from then on, where the file system refuses that."""
        try:
            handle = self.create(path, True)
            try:
                self._write_pages(handle, pieces)
                self.sync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.direct = False
            logger.info("%s: direct writes are refused here (%s); ordinary writes from now on", path, error.strerror)
            return False
        return True

    def _write_pages(self, handle: int, pieces: Sequence[memoryview]) -> None:
        """Whole pages from where they are, everything else through a page-aligned buffer."""
        if len(getattr(self._own, "bounce", b"")) != _PIECE:
            self._own.bounce = mmap.mmap(-1, _PIECE)
        bounce = memoryview(self._own.bounce)
        filled = total = 0
        for piece in pieces:
            total += len(piece)
            if filled % PAGE == 0 and len(piece) >= PAGE and _address(piece) % PAGE == 0:
                if filled:
                    self.write(handle, bounce[:filled])
                    filled = 0
                pages = len(piece) // PAGE * PAGE
                for at in range(0, pages, _PIECE):
                    self.write(handle, piece[at : min(at + _PIECE, pages)])
                piece = piece[pages:]
            while len(piece):
                part = piece[: _PIECE - filled]
                np.copyto(_array(bounce[filled : filled + len(part)]), _array(part))  # without the interpreter's lock
                filled += len(part)
                piece = piece[len(part) :]
                if filled == _PIECE:
                    self.write(handle, bounce)
                    filled = 0
        if filled:
            end = -(-filled // PAGE) * PAGE
            bounce[filled:end] = bytes(end - filled)
            self.write(handle, bounce[:end])
        self.truncate(handle, total)


def _array(data: memoryview) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def _address(data: memoryview) -> int:
    return int(_array(data).ctypes.data)


disk = Disk()
