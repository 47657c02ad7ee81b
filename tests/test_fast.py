"""The threads of the compiled loops, and torch's own beside them."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch

from dualform import fast

pytest.importorskip("numba")

OPENMP = "OpenMP" in torch.__config__.parallel_info()

THREADS = """
import os, torch
from dualform import fast

torch.set_num_threads(3)
fast.compiled(fast.PAYS + 1)
rows = torch.ones(400, 400)

def tasks():
    return len(os.listdir("/proc/self/task"))

def work(part=0):
    (rows @ rows).topk(5, dim=1)
    return (torch.ones(1 << 21) + 1).sum()

fast._end_idle()
before = tasks()
with fast.alone():
    work()
    print(tasks() - before, torch.get_num_threads(), fast.threads())
fast.spread(work, range(8))
print(tasks() - before <= 2, torch.get_num_threads())  # two helpers, and none of torch's
work()
print(tasks() - before > 2)
"""


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(fast._State, "loops", fast)  # as if they were there
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not OPENMP, reason="torch has other threads here")
def test_alone_holds_for_this_thread_and_ends(three_threads: None) -> None:
    elsewhere: list[int] = []
    with fast.alone():
        assert torch.get_num_threads() == 1 and fast.threads() == 3
        with fast.alone():
            assert fast.threads() == 3
        assert torch.get_num_threads() == 1, "the inner one ends nothing"
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert elsewhere == [3] and torch.get_num_threads() == 3 == fast.threads()
    with pytest.raises(KeyError), fast.alone():
        raise KeyError
    assert torch.get_num_threads() == 3 == fast.threads()


def test_without_loops_torch_keeps_its_threads(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast._State, "loops", None)
    with fast.alone():
        assert torch.get_num_threads() == 3


def test_work_is_spread_in_order_and_errors_come_out(three_threads: None) -> None:
    seen: set[str] = set()
    gate = threading.Barrier(3, timeout=60)

    def square(number: int) -> int:
        seen.add(threading.current_thread().name)
        if number < 3:
            gate.wait()  # three threads are at work
        return number * number

    assert fast.spread(square, range(50)) == [number * number for number in range(50)]
    assert len(seen) == 3
    assert fast.spread(square, []) == []
    with pytest.raises(ZeroDivisionError):
        fast.spread(lambda number: 1 // (number - 7), range(20))
    assert torch.get_num_threads() == 3 == fast.threads()


@pytest.mark.skipif(not OPENMP or not sys.platform.startswith("linux"), reason="counts OpenMP's threads in /proc")
def test_torch_makes_no_threads_of_its_own_meanwhile() -> None:
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=free, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 1 3", "True 3", "True"]


def test_products_are_in_full_precision_meanwhile() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with contextlib.suppress(KeyError), fast.in_full_precision():
                assert torch.get_float32_matmul_precision() == "highest"
                raise KeyError
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
