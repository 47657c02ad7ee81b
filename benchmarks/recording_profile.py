"""Where the time of recording goes: what every part of the recorder takes in one training step.

    python benchmarks/recording_profile.py [--steps 400] [--keep all] [--out DIR]

Trains the paper's MNIST network plain and recorded in turn, ten steps at a time, with a clock around the parts of the
recorder. The clocks cost something too, so this is for shares, not for the ratio: that is benchmarks/recording.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine
from torch import nn

import dualform
from dualform.experiments.recipes import recipe
from dualform.memory.writer import Writer
from dualform.recording.capture import Capture
from dualform.recording.recorder import Recorder
from dualform.recording.routine import Sketching, Taking
from dualform.recording.stepping import Stepping

BATCH = 128
# The parts overlap: what is indented is inside the part above it.
PARTS: list[tuple[str, Any, str, str]] = [
    ("reading the ids", Recorder, "batch", "wall"),
    ("forward hooks", Capture, "saw_forward", "wall"),
    ("gradient hooks", Capture, "_saw_gradient", "wall"),
    ("end of backward", Capture, "_ended", "wall"),
    ("  keys and gradients copied and sketched", Taking, "take", "wall"),
    ("before the step", Stepping, "prepare", "wall"),
    ("  sketches of p.grad", Sketching, "sketch", "wall"),
    ("after the step", Recorder, "_after_step", "wall"),
    ("  judging, journal", Stepping, "_flush", "wall"),
    ("    watch: weights against prediction", Stepping, "_check", "wall"),
    ("  commit, in the training thread", Recorder, "_commit", "wall"),
    ("writer thread, processor time", Writer, "_commit", "cpu"),
]


@contextlib.contextmanager
def clocks() -> Iterator[Counter[str]]:
    """Put a clock around every part; what they add up to, in seconds."""
    spent: Counter[str] = Counter()
    before = [(kind, name, getattr(kind, name)) for _, kind, name, _ in PARTS]

    def clocked(label: str, function: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            start = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                spent[label] += clock() - start

        return run

    for label, kind, name, what in PARTS:
        clock = time.perf_counter if what == "wall" else time.thread_time
        setattr(kind, name, clocked(label, getattr(kind, name), clock))
    try:
        yield spent
    finally:
        for kind, name, function in before:
            setattr(kind, name, function)


class Training:
    """The paper's network on random inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = recipe("mnist").model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3, momentum=0.9)
        self.inputs, self.labels = torch.rand(40_053, 784), torch.randint(10, (40_053,))
        self.recorder: Recorder | None = None
        self._ids = itertools.chain.from_iterable(
            torch.randperm(40_053)[:39_936].split(BATCH) for _ in itertools.count()
        )

    def go(self, steps: int) -> float:
        """Train for some steps; the seconds it took."""
        start = time.perf_counter()
        for ids in itertools.islice(self._ids, steps):
            with self.recorder.batch(ids) if self.recorder else contextlib.nullcontext():
                F.cross_entropy(self.model(self.inputs[ids]), self.labels[ids]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--keep", choices=("all", "keys"), default="all")
    parser.add_argument("--out", type=Path, help="a directory on the disk to be measured")
    arguments = parser.parse_args()
    plain, recorded = Training(), Training()
    with tempfile.TemporaryDirectory(dir=arguments.out) as root, clocks() as spent:
        path = Path(root) / "run"
        with dualform.record(
            recorded.model, recorded.optimizer, path, keep=arguments.keep, on_error="raise"
        ) as recorder:
            recorded.recorder = recorder
            plain.go(80), recorded.go(80)
            spent.clear()
            seconds = [(plain.go(10), recorded.go(10)) for _ in range(arguments.steps // 10)]
            parts = dict(spent)
    without, with_it = (1e3 * sum(column) / len(seconds) / 10 for column in zip(*seconds, strict=True))
    print(f"machine: {machine()}")
    print(f"plain {without:.2f} ms a step, recorded (keep={arguments.keep!r}, with clocks) {with_it:.2f} ms a step\n")
    for label, *_ in PARTS:
        each = 1e3 * parts.get(label, 0.0) / (10 * len(seconds))
        print(f"{label:42s} {each:6.3f} ms {100 * each / without:5.1f} % of plain")


if __name__ == "__main__":
    main()
