"""The arena in a forked process, such as a worker of a DataLoader."""

import mmap
import os

import pytest
import torch

from dualform.memory.arena import Arena, Shape


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_lets_go_of_the_arena_and_of_nothing_else() -> None:
    """What it unmaps must not be the memory that took the arena's place, as a new thread's stack may."""
    made = [Arena({"rows": Shape(16 << 20, 1, torch.float32)}, pinned=False)]
    process = os.fork()
    if process == 0:
        code = 1
        try:
            others = [mmap.mmap(-1, 16 << 20) for _ in range(32)]
            made.clear()
            code = sum(other[5] for other in others)
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    assert status == 0
    held = made[0].hold("rows", torch.ones(1000, 1))
    assert held is not None and bool((held == 1).all())
