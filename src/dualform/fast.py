"""The compiled loops, where numba (the extra `fast`) is installed, and the threads that run them.

Loading them takes most of a second, so a process does it once it had work that they would have done in a fraction of
the time; until then, and without numba, torch does the same work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch

logger = logging.getLogger("dualform")

PAYS = 1 << 23  # numbers read without the loops, after which loading them pays
TURNS = 8  # parts of a large loop for each thread
# The blocks of rows that the loops know.
CUTS = (7, 15, 30)  # of the first columns, each with a tail of its own, for the bounds that most rows fail
SPANS = tuple(zip((0, *CUTS), CUTS, strict=False))
LANES = 32  # rows of a block, in which a column is contiguous
S = TypeVar("S")
T = TypeVar("T")


class _State:
    loops: ModuleType | None = None
    missing = False
    done = 0
    pool: ThreadPoolExecutor | None = None


_own = threading.local()  # `threads`: how many torch has outside of `alone`


def compiled(work: int) -> ModuleType | None:
    """The compiled loops for work on so many numbers; None as long as loading them does not pay, or without numba."""
    if _State.loops is None and not _State.missing:
        _State.done += work
        if _State.done > PAYS:
            _State.loops = load("dualform.compiled")
            _State.missing = _State.loops is None
    return _State.loops


def load(name: str) -> ModuleType | None:
    """A module of compiled loops; None without numba, and told where numba is there but cannot work."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # not made for this numpy, no place for its cache, …
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            why = f"{type(error).__name__}: {error}"
            logger.warning("numba is installed but cannot be used (%s); torch does its work, more slowly", why)
        return None


def in_parts(loop: Callable[..., T], parts: int, *arguments: Any, short: bool = False) -> list[T]:
    """Run a loop in about so many parts, by as many threads as torch has; each part's result.

    A `short` one shares the cores with torch's idle threads.
    """
    if parts <= 1 or threads() == 1:
        return [loop(*arguments, 0, 1)]
    parts = min(parts, TURNS * min(parts, threads()))
    return spread(lambda part: loop(*arguments, part, parts), range(parts), short)


def spread(function: Callable[[S], T], parts: Sequence[S], short: bool = False) -> list[T]:
    """Call a function for every part, by as many threads as torch has; what it returned for each."""
    helpers = min(len(parts), threads()) - 1
    if helpers < 1:
        return [function(part) for part in parts]
    if _State.pool is None:
        most = max(os.cpu_count() or 1, threads())
        _State.pool = ThreadPoolExecutor(most, thread_name_prefix="dualform", initializer=work_alone)
    if not short:
        _end_idle()
    turns = itertools.count()  # threads take the next part when they are done with one: a core may be busy
    results: list[T | None] = [None] * len(parts)

    def work() -> None:
        while (turn := next(turns)) < len(parts):
            results[turn] = function(parts[turn])

    others = [_State.pool.submit(work) for _ in range(helpers)]
    with alone():
        work()
    for other in others:
        other.result()
    return cast(list[T], results)


def threads() -> int:
    """How many threads work is spread over: as many as torch has, outside of `alone`."""
    return getattr(_own, "threads", 0) or torch.get_num_threads()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have torch use no threads of its own for what this thread asks of it meanwhile, where there are compiled loops.

    Those have threads of ours. Torch's would have to be ended before, and be made again after every loop: now and then
    they then wait for each other on one core, some milliseconds each time.
    """
    before = torch.get_num_threads()
    if _State.loops is None or before == 1 or _openmp("omp_set_num_threads") is None:
        yield
        return
    _own.threads = before
    own = _limit(1, 1)
    try:
        yield
    finally:
        _own.threads = 0
        _limit(before, own)


@contextlib.contextmanager
def in_full_precision() -> Iterator[None]:
    """Have torch form products in fp32 as such meanwhile, and not in fewer bits as a program may have asked it to."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def _openmp(name: str) -> Callable[[int], int] | None:
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(AttributeError, OSError, TypeError):
            return cast(Callable[[int], int], getattr(ctypes.CDLL(library), name))
    return None  # another OpenMP, or none


class Threads(NamedTuple):
    """The addresses of what GNU's OpenMP offers, as far as the compiled loops need it.

    The number of a thread, and what has all of them run a function. These threads wait awake for the next operation of
    the thread that trains; others would have to take their cores.
    """

    number: int
    parallel: int


@functools.cache
def threads_of_torch() -> Threads | None:
    """Torch's own threads; None where its OpenMP is neither GNU's nor offers the same."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(AttributeError, OSError, TypeError):
            loaded = ctypes.CDLL(library)
            names = "omp_get_thread_num", "GOMP_parallel"
            places = (ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in names)
            return Threads(*(place or 0 for place in places))
    return None


def work_alone() -> None:
    """Have torch use no other threads for what this thread asks of it; other threads are not concerned."""
    torch.get_num_threads()  # at a thread's first work torch sets the number itself
    _limit(1, 1)


def _limit(threads: int, of_products: int) -> int:
    """How many threads torch uses for what this thread asks of it, and for its products; what held for these before.

    For products 0 means: as many as all threads have.
    """
    everything, products = _openmp("omp_set_num_threads"), _openmp("MKL_Set_Num_Threads_Local")
    if everything is not None:
        everything(threads)
    return 0 if products is None else products(of_products)


def _end_idle() -> None:
    """End torch's idle threads, which would keep a core busy for some milliseconds; torch makes new ones by itself."""
    pause = _openmp("omp_pause_resource_all")
    if pause is not None:
        pause(1)  # omp_pause_soft, of the threads that this one has


def _forget() -> None:
    _State.pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a child has none of its parent's threads
