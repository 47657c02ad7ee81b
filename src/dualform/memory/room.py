"""Room for what is kept at hand between questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")
SMALL = 256  # what takes less than such a part of the room goes last


@dataclass(frozen=True)
class _Kept:
    thing: Any
    size: int
    needs: Hashable


class Room:
    """Things that can be made anew, together at most `most` bytes: what was not used for longest goes first.

    One thing alone may be larger. What needs another thing goes with it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[Hashable, _Kept] = {}
        self._making: dict[Hashable, threading.RLock] = {}
        self._lock = threading.RLock()
        self.filled: Callable[[], Callable[[], None] | None] = lambda: None  # whom to tell that there is less room

    def __reduce__(self) -> tuple[type[Room], tuple[int]]:
        return Room, (self.most,)  # in another process all is made anew

    @property
    def used(self) -> int:
        """The bytes of all that is kept."""
        return sum(kept.size for kept in list(self._kept.values()))

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int], needs: Hashable = None) -> T:
        """The thing of that key, made where it is not there, by one thread; it may have grown since.

        Who asks for something else meanwhile does not wait.
        """
        thing = cast(T | None, self.find(key))
        if thing is None:
            with self._lock:
                making = self._making.setdefault(key, threading.RLock())
            with making:
                thing = cast(T | None, self.find(key))
                if thing is None:
                    thing = make()
                self.keep(key, thing, size(thing), needs)
            with self._lock:
                self._making.pop(key, None)
        elif size(thing) != self._size(key):
            self.keep(key, thing, size(thing), needs)
        return thing

    def _size(self, key: Hashable) -> int | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.size

    def find(self, key: Hashable) -> Any:
        """The thing of that key, None where it is not there."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None:
                return None
            self._kept[key] = kept
            return kept.thing

    def keep(self, key: Hashable, thing: Any, size: int, needs: Hashable = None) -> None:
        """Keep a thing of so many bytes, and let go of others for it; not where what it needs is gone already."""
        with self._lock:
            self._kept.pop(key, None)
            if needs is not None and needs not in self._kept:
                return
            self._kept[key] = _Kept(thing, size, needs)
            while self.used > self.most and len(self._kept) > 1:
                self.drop(self._next())
        if tell := self.filled():
            tell()

    def _next(self) -> Hashable:
        """What goes first: of what takes much room what was not used for longest, before anything small."""
        large = (key for key, kept in self._kept.items() if kept.size > self.most // SMALL)
        return next(large, None) or next(iter(self._kept))

    def drop(self, key: Hashable) -> None:
        """Let go of a thing, and of what needs it."""
        with self._lock:
            self._kept.pop(key, None)
            for other in [other for other, kept in self._kept.items() if kept.needs == key]:
                self.drop(other)
