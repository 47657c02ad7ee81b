"""Questions to a memory that is larger than they may take: nothing of it is ever loaded, or mapped, as a whole."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import BadCall
from small import run

DIM_IN, DIM_OUT, ROWS, STEPS = 4096, 16, 2048, 21  # 0.7 GB
ROOM = 300 << 20

ASK = f"""
import resource, sys
sys.modules["numba"] = None  # compiling takes memory of its own
import dualform, torch

def ask(path, count):
    memory = dualform.open(path, resident=128 << 20)
    shape = count, memory.manifest.weights[0].dim_in
    queries = torch.randint(8, shape, generator=torch.Generator().manual_seed(0)).float()
    attention = memory.attend(None, {{"": queries}})[""]
    attention.top(10)
    attention.totals(by="label")
    attention.contributions(unit=0).top(5)
    weights = memory.weights()
    assert memory.certificate().exact
    expected = attention.queries.double() @ weights["weight"].double().T + weights["bias"].double()
    assert (attention.output() - expected).abs().max() < 1e-4 * expected.abs().max()

def used(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10

ask(sys.argv[2], 500)
before = used("VmHWM")
limit = used("VmSize") + {ROOM}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
ask(sys.argv[1], 3)
print(used("VmHWM") - before)
"""


def record(path: Path, dim_in: int, rows: int, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(dim_in, DIM_OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    labels = torch.arange(rows * steps) % 4
    keys = torch.randint(8, (rows, dim_in)).float()  # whole numbers, whose scores are certain: this is not about them
    with dualform.record(model, optimizer, path, examples={"label": labels}, on_error="raise") as recorder:
        for step in range(steps):
            ids = torch.arange(step * rows, (step + 1) * rows)
            with recorder.batch(ids):
                F.cross_entropy(model(keys * 2.0 ** -(step % 8)), ids % DIM_OUT).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    try:
        record(tmp_path / "large", DIM_IN, ROWS, STEPS)
        yield tmp_path / "large"
    finally:
        shutil.rmtree(tmp_path / "large")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says in /proc what a process has used")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space of a process (RLIMIT_AS)")
def test_questions_take_no_more_than_they_may(large: Path, tmp_path: Path) -> None:
    record(tmp_path / "small", 16, 1000, 3)
    assert dualform.open(large).bytes > 2 * ROOM
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(large), str(tmp_path / "small")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the stacks of threads are address space too
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < ROOM


@pytest.mark.parametrize("resident", [0, -1, (64 << 20) - 1, True])
def test_a_setting_that_is_too_small(tmp_path: Path, resident: int) -> None:
    run(tmp_path / "run", steps=1)
    with pytest.raises(BadCall, match=r"a whole number of at least 67,108,864 \(64 MB\)"):
        dualform.open(tmp_path / "run", resident=resident)


def test_blocks_are_smaller_where_rows_are_wide(tmp_path: Path) -> None:
    record(tmp_path / "run", 1000, 50, 2)
    wide = dualform.open(tmp_path / "run")
    assert wide.resident == 1 << 30
    assert [len(block) for block in wide.blocks(0, 2)] == [100]
    narrow = dualform.open(tmp_path / "run", resident=64 << 20)
    assert narrow.resident == 64 << 20
    assert narrow.block_rows(0) == (64 << 20) // 8 // (6 * 4 * (1000 + DIM_OUT)) == 344
    whole = torch.cat([block.keys for block in narrow.blocks(0, 2)])
    for rows in (1, 7, 99):
        blocks = list(narrow.blocks(0, 2, rows=rows))
        assert all(len(block) <= rows for block in blocks)
        assert torch.cat([block.keys for block in blocks]).equal(whole)
