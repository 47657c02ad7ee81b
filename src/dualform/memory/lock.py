"""The lock: one writer at a time in a memory's directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from pathlib import Path

from dualform.errors import BadMemory, MemoryInUse

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock-r000"
logger = logging.getLogger("dualform")
_held: set[int] = set()


class Lock:
    """Held from when it is made until `release`; the system releases it when the process dies, however it dies."""

    def __init__(self, root: Path) -> None:
        try:
            self._handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadMemory(f"cannot write into {root}: {error.strerror}.") from error
        try:
            if fcntl is not None:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 200, 0).decode(errors="replace").strip()
            os.close(self._handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):
                logger.warning("%s cannot be locked (%s): nothing keeps a second writer out", root, error.strerror)
                self._handle = -1
                return
            raise MemoryInUse(
                f"{root} is being written by another recorder ({holder or 'unknown'}). "
                "Wait until it is closed, or record into another directory."
            ) from None
        _held.add(self._handle)
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise BadMemory(f"cannot write into {root}: {error.strerror}.") from error

    def release(self) -> None:
        """Let another writer in."""
        if self._handle >= 0:
            _held.discard(self._handle)
            os.close(self._handle)
            self._handle = -1


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
