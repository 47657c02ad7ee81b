"""The writer's thread stays out of the way of those that train, and writes the rows it has to."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.memory import writer

ALONE = """
import sys, torch
from torch import nn
import dualform

torch.set_num_threads(3)
model = nn.Linear(4, 2)
with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), sys.argv[1]) as recorder:
    pool = recorder._writer._thread
    tasks = lambda: len(list(__import__("pathlib").Path("/proc/self/task").iterdir()))
    (torch.ones(1 << 22) + 1).sum()  # torch's own threads
    pool.submit(int).result()
    before = tasks()
    pool.submit(lambda: (torch.ones(1 << 22) + 1).sum()).result()
    print(torch.get_num_threads(), pool.submit(torch.get_num_threads).result(), tasks() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="torch has other threads here")
def test_the_writer_makes_no_threads_of_torch(tmp_path: Path) -> None:
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "run")]
    done = subprocess.run(command, env=free, capture_output=True, text=True, check=True)
    # Where it did, torch's threads would sleep and be woken at every product from then on.
    assert done.stdout.split() == ["3", "1", "0"]


def test_the_writer_goes_last(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run") as recorder:
        assert recorder._writer is not None
        priority = recorder._writer._thread.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    assert priority > os.getpriority(os.PRIO_PROCESS, 0)


@given(runs=st.lists(st.integers(0, 4), max_size=40), first=st.booleans(), large=st.booleans())
def test_the_chosen_rows_are_those_of_the_mask(runs: list[int], first: bool, large: bool) -> None:
    mask = np.array([first ^ bool(at % 2) for at, run in enumerate(runs) for _ in range(run)], dtype=bool)
    rows = torch.arange(len(mask))[:, None].expand(-1, (writer.LARGE >> 3) // max(len(mask), 1) + large).contiguous()
    parts = writer._chosen(rows, mask)
    assert torch.equal(torch.cat([rows[:0], *parts]), rows[torch.from_numpy(mask)])
    assert all(len(part) for part in parts)
    if large and np.diff(mask).sum() < writer.STRETCHES:
        assert all(part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for part in parts)
