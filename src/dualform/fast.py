"""The compiled loops, where numba (the extra `fast`) is installed, and the threads that run them.

Loading them takes most of a second, so a process does it once it had work that they would have done in a fraction of
the time; until then, and without numba, torch does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

logger = logging.getLogger("dualform")

PAYS = 1 << 23  # numbers read without the loops, after which loading them pays
TURNS = 8  # parts of a large loop for each thread
# The blocks of rows that the loops know.
CUTS = (7, 15, 30)  # of the first columns, each with a tail of its own, for the bounds that most rows fail
SPANS = tuple(zip((0, *CUTS), CUTS, strict=False))
LANES = 32  # rows of a block, in which a column is contiguous
T = TypeVar("T")


class _State:
    loops: ModuleType | None = None
    missing = False
    done = 0
    pool: ThreadPoolExecutor | None = None


def compiled(work: int) -> ModuleType | None:
    """The compiled loops for work on so many numbers; None as long as loading them does not pay, or without numba."""
    if _State.loops is None and not _State.missing:
        _State.done += work
        if _State.done > PAYS:
            _State.loops = load("dualform.compiled")
            _State.missing = _State.loops is None
    return _State.loops


def load(name: str) -> ModuleType | None:
    """A module of compiled loops; None, and told where that is a surprise, where it cannot be had."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except Exception as error:  # numba is there, but cannot work: no place for its cache, say
        logger.info("numba cannot be used (%s: %s); torch does its work, more slowly", type(error).__name__, error)
        return None


def in_parts(loop: Callable[..., T], parts: int, *arguments: Any, short: bool = False) -> list[T]:
    """Run a loop in about so many parts, by as many threads as torch has; each part's result.

    A `short` one shares the cores with torch's idle threads.
    """
    threads = max(min(parts, torch.get_num_threads()), 1)
    parts = min(parts, TURNS * threads) if threads > 1 else 1
    if parts == 1:
        return [loop(*arguments, 0, 1)]
    if _State.pool is None:
        _State.pool = ThreadPoolExecutor(max(os.cpu_count() or 1, threads), thread_name_prefix="dualform")
    if not short:
        _end_idle()
    turns = itertools.count()  # threads take the next part when they are done with one: a core may be busy
    results: list[T | None] = [None] * parts

    def work() -> None:
        while (part := next(turns)) < parts:
            results[part] = loop(*arguments, part, parts)

    others = [_State.pool.submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()
    return cast(list[T], results)


@functools.cache
def _openmp(name: str) -> Callable[[int], int] | None:
    try:
        return cast(Callable[[int], int], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError, TypeError):
        return None  # another OpenMP, or none


def work_alone() -> None:
    """Have torch use no other threads for what this thread asks of it; other threads are not concerned."""
    limit = _openmp("omp_set_num_threads")
    if limit is not None:
        torch.get_num_threads()  # at a thread's first work torch sets the number itself
        limit(1)


def _end_idle() -> None:
    """End torch's idle threads, which would keep a core busy for some milliseconds; torch makes new ones by itself."""
    pause = _openmp("omp_pause_resource_all")
    if pause is not None:
        pause(1)  # omp_pause_soft, of the threads that this one has


def _forget() -> None:
    _State.pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a child has none of its parent's threads
