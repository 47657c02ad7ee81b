"""Real kills: a process that records is killed at any instant, and nothing is lost that it had committed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dualform
from dualform.errors import BadMemory
from dualform.fast import load
from dualform.memory import writer
from faults import COLUMNS, compiled, contents, differences, distance, loaded, trained

TESTS = Path(__file__).parents[1]
CHILD = "import sys; from memory.test_kill import record_for_ever; record_for_ever(*sys.argv[1:])"


def prepared(way: str, patch: pytest.MonkeyPatch) -> torch.dtype:
    """Set everything as it is for a way to record; what the weights are then."""
    if way == "compiled":
        compiled(patch)
        assert load("dualform.recording.loops")  # which would take most of the time that a child has
    patch.setattr(writer, "COMMIT_BYTES", 3000)  # every third step or so, without being asked
    return torch.float32 if way == "compiled" else torch.float64


def record_for_ever(path: str, since: str, way: str) -> None:
    """What the child does: go on with the run, and say after every commit of its own which step is durable."""
    dtype = prepared(way, pytest.MonkeyPatch())
    first, last = int(since), int(since) + 10_000
    model, optimizer = loaded(first, dtype=dtype)
    print("loaded", flush=True)
    with dualform.record(model, optimizer, path, examples=COLUMNS, resume_at=first, on_error="raise") as recorder:
        for step in trained(model, optimizer, recorder, first, last):
            if step % 7 == 0:
                recorder.commit()
                print(step, flush=True)


def killed(path: Path, since: int, way: str, delay: float) -> int:
    """Record in a process of its own and kill it after a while; the last step that it said was durable."""
    command = [sys.executable, "-c", CHILD, str(path), str(since), way]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loaded\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        *said, _ = child.stdout.read().split("\n")
    assert child.returncode == -signal.SIGKILL
    return int(said[-1]) if said else since


def check(path: Path, said: int, dtype: torch.dtype) -> int:
    """The memory is in order, and has every step that was said to be durable; how many it has."""
    try:
        memory = dualform.open(path)
    except BadMemory:
        assert said == 0  # it never began
        return 0
    assert memory.steps >= said
    assert memory.verify().ok
    assert distance(memory.weights(), memory.steps) < (1e-10 if dtype == torch.float64 else 1e-4)
    if memory.steps and not memory.certificate().exact:
        # It was killed before it had stored any weights of the step at which it went on.
        assert all("the run was cut" in row.reason for row in memory.certificate())
    return memory.steps


def is_undisturbed(path: Path, other: Path, dtype: torch.dtype) -> None:
    """Whether a memory is the same, bit for bit, as that of a run that was never killed."""
    memory = dualform.open(path)
    model, optimizer = loaded(0, dtype=dtype)
    with dualform.record(model, optimizer, other, examples=COLUMNS, on_error="raise") as recorder:
        list(trained(model, optimizer, recorder, until=memory.steps))
    assert differences(memory, contents(dualform.open(other))) == []
    assert memory.certificate().exact


def kill_again_and_again(path: Path, times: int, seed: int, way: str) -> None:
    chance = random.Random(seed)
    since = 0
    with pytest.MonkeyPatch.context() as patch:
        dtype = prepared(way, patch)
        for at in range(times):
            said = killed(path / "run", since, way, chance.random())
            steps = check(path / "run", said, dtype)
            since = chance.choice([steps, chance.randint(0, steps)])  # the last commit, or any step of the run so far
            if at % 5 == 4 or at == times - 1:
                model, optimizer = loaded(since, dtype=dtype)
                with dualform.record(model, optimizer, path / "run", resume_at=since, on_error="raise") as recorder:
                    list(trained(model, optimizer, recorder, since, since + 5))
                since += 5
                is_undisturbed(path / "run", path / f"undisturbed-{at}", dtype)


@pytest.mark.parametrize("times, seed, way", [(3, 0, "by torch"), (2, 1, "compiled")])
def test_a_killed_run_keeps_every_commit_and_is_gone_on_with(tmp_path: Path, times: int, seed: int, way: str) -> None:
    kill_again_and_again(tmp_path, times, seed, way)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    kill_again_and_again(tmp_path, 10, seed, "compiled" if seed % 2 else "by torch")
