"""Windows: stretches of a file that are mapped only as long as something looks through them, or might soon.

And the few descriptors through which that is done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
from jaxtyping import UInt8

from dualform.errors import DamagedMemory
from dualform.fast import in_parts, threads
from dualform.memory.room import Room

HUGE = 2 << 20
# Python's own mmap keeps a descriptor open for every mapping, and a list of blocks may hold thousands.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

Bytes = UInt8[np.ndarray, " bytes"]


class Descriptor:
    """An open file, closed when nobody uses it any more: whoever reads holds it, so it is never closed meanwhile."""

    number = -1

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # A pipe in the place of a file must not block.
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedMemory(f"{path} is missing: the manifest names it ({error.strerror}).") from None
        except OSError as error:
            raise DamagedMemory(f"{path} cannot be opened: {error.strerror}.") from None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound: at exit the module may be gone
        if self.number >= 0:
            close(self.number)


class Descriptors:
    """The files that were used last, kept open: a run that is resumed may remove what an open memory still reads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[int, str], Descriptor] = OrderedDict()

    def get(self, owner: int, path: str) -> Descriptor:
        """The descriptor of an owner, opened anew where it was not kept."""
        key = owner, path
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = Descriptor(path)
        try:
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        except KeyError:
            pass  # another thread has dropped it
        return found

    def drop(self, owner: int, path: str) -> None:
        """Close the file of an owner that is gone."""
        self._kept.pop((owner, path), None)


# At most a quarter of what a process may have: the rest is the user's own. No limit is told as a negative one.
_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
descriptors = Descriptors(min(256, _allowed // 4) if _allowed > 0 else 256)


def fill(descriptor: Descriptor, data: Bytes, begin: int) -> None:
    """Read as many bytes of a file as `data` has room for."""
    filled = 0
    while filled < len(data):  # once, but for a signal, or more than the system reads at once
        try:
            more = os.preadv(descriptor.number, (data[filled:].data,), begin + filled)
        except OSError as error:
            raise DamagedMemory(f"{descriptor.path} cannot be read: {error.strerror}.") from None
        if more == 0:
            raise DamagedMemory(f"{descriptor.path} is truncated: it is shorter than it was a moment ago.")
        filled += more


def fill_at_once(descriptor: Descriptor, data: Bytes, begin: int) -> None:
    """The same by several threads."""

    def some(part: int, parts: int) -> None:
        first, last = (len(data) * edge // parts // 4096 * 4096 for edge in (part, part + 1))
        fill(descriptor, data[first : len(data) if part + 1 == parts else last], begin + first)

    in_parts(some, threads(), short=True)


def copied(descriptor: Descriptor, begin: int, end: int) -> Bytes:
    """Bytes begin…end of a file, read into memory of their own."""
    data = np.empty(end - begin, dtype=np.uint8)
    fill(descriptor, data, begin)
    return data


class _Mapping:
    """A private, writable mapping that ends with the last array or tensor that looks at it."""

    def __init__(self, descriptor: Descriptor, begin: int, length: int) -> None:
        writable = mmap.PROT_READ | mmap.PROT_WRITE  # a private page that is written to never reaches the file
        address = _libc.mmap(None, length, writable, mmap.MAP_PRIVATE, descriptor.number, begin)
        self._place = None if address == _FAILED else (address, length)
        if self._place is None:
            raise DamagedMemory(f"{descriptor.path} cannot be mapped: {os.strerror(ctypes.get_errno())}.")
        self.__array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}

    def __del__(self, unmap: Callable[[int, int], int] = _libc.munmap) -> None:
        if self._place is not None:
            unmap(*self._place)


def window(descriptor: Descriptor, begin: int, end: int) -> Bytes:
    """Bytes begin…end of a file, which must be that long, mapped until the array dies."""
    first, last = _edges(begin, end)
    return np.asarray(_Mapping(descriptor, first, last - first))[begin - first : end - first]


def _edges(begin: int, end: int) -> tuple[int, int]:
    """From where to where a window is mapped; a wide one by huge pages, so that those of the page cache are used."""
    size = HUGE if end - begin >= 8 * HUGE else mmap.ALLOCATIONGRANULARITY
    return begin // size * size, -(-end // size) * size


class Windows:
    """The windows that were looked through lately, together at most `most` bytes: mapping takes as long as reading.

    They also take what is left of a `room`. One that has to go is chosen at random: of a scan that is larger than all
    of that, the oldest ones would never be there when they come again.
    """

    def __init__(self, most: int, room: Room | None = None) -> None:
        self._least, self._room = most, room
        if room is not None:
            room.filled = weakref.WeakMethod(self._fit)
        self._kept: dict[Hashable, tuple[Bytes, int]] = {}
        self._random = random.Random(0)

    def __reduce__(self) -> tuple[type[Windows], tuple[int, Room | None]]:
        return Windows, (self._least, self._room)  # in another process all is mapped anew

    @property
    def _most(self) -> int:
        return self._least if self._room is None else self._least + max(self._room.most - self._room.used, 0)

    def fits(self, key: Hashable, begin: int, end: int) -> bool:
        """Whether the window of that key is kept, or can be without another one going."""
        first, last = _edges(begin, end)
        return key in self._kept or self._used() + last - first <= self._most

    def _used(self) -> int:
        return sum(size for _, size in list(self._kept.values()))

    def get(self, key: Hashable, descriptor: Descriptor, begin: int, end: int) -> Bytes:
        """The window of that key, mapped anew where it was not kept."""
        kept = self._kept.get(key)
        if kept is not None:
            return kept[0]
        first, last = _edges(begin, end)
        self._make_room(last - first)
        found = window(descriptor, begin, end)
        if last - first <= self._most:
            self._kept[key] = found, last - first
        return found

    def _fit(self) -> None:
        self._make_room(0)

    def _make_room(self, room: int) -> None:
        # Without a lock, which a forked process could inherit locked: threads may keep a window too many for a moment.
        while (keys := list(self._kept)) and self._used() + room > self._most:
            self._kept.pop(keys[self._random.randrange(len(keys))], None)
