"""What recording costs: training the paper's MNIST network plain, with keep="keys" and with keep="all".

    python benchmarks/recording.py [--batch 128 32 512] [--rounds 7] [--cycles 4] [--threads N] [--out DIR] [--json F]

All in one process. A round makes a plain and a recorded training anew for every way, trains both past the first commit,
and then lets them take turns: a turn of the recorded one lasts from the end of one commit to the end of the next, so
that it holds a whole commit and all steps for it, and lies between two turns of the plain one of as many steps. Its
time a step is compared with theirs; the ratio is the median over all such turns of all rounds. The order of the ways
alternates. Probe and checksums are on, and the memory is written to disk: past the page cache ("direct") and through it
("fallback"). What a run pays once is reported beside it: how much longer it takes to begin (starting and the steps up
to the end of the first commit), and how long it waits at the end for what is left to write. The first run of a process
also loads the compiled loops; that is a line of its own. Inputs are random: the time of a dense layer does not depend
on them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import machine
from torch import Tensor, nn

import dualform
from dualform.experiments.recipes import recipe
from dualform.memory.disk import disk
from dualform.memory.manifest import MANIFEST

EXAMPLES = 40_053
WARM_UP = 130  # steps at batch 128: longer than the first commit takes to come and go
BOUNDS = {"keys": 1.10, "all": 1.15}


@dataclass
class Way:
    """One way to record, and what its turns took a step, with the mean of the plain turns before and after each."""

    name: str
    keep: str
    direct: bool
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    bytes: float = 0.0

    @property
    def ratios(self) -> list[float]:
        """Every turn's time against the plain training beside it, in ascending order."""
        return sorted(own / beside for own, beside in zip(self.seconds, self.plain, strict=True))


def ways(only_direct: bool) -> list[Way]:
    """All ways to record."""
    kinds = (True,) if only_direct else (True, False)
    return [
        Way(f"{keep}, {'direct' if direct else 'fallback'}", keep, direct)
        for keep in ("keys", "all")
        for direct in kinds
    ]


class Training:
    """The paper's network, perhaps with a recorder."""

    def __init__(self, inputs: Tensor, labels: Tensor, size: int) -> None:
        torch.manual_seed(0)
        self.model = recipe("mnist").model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3, momentum=0.9)
        self.recorder: dualform.Recorder | None = None
        self.steps = 0
        self._inputs, self._labels, self._batches = inputs, labels, batches(size)

    def step(self) -> None:
        """One step of a training loop."""
        ids = next(self._batches)
        with self.recorder.batch(ids) if self.recorder else contextlib.nullcontext():
            F.cross_entropy(self.model(self._inputs[ids]), self._labels[ids]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def turn(self, steps: int) -> float:
        """Train for some steps; the seconds each took."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def cycle(self, path: Path) -> tuple[float, int]:
        """Train until the next commit has ended, which shows in the manifest; the seconds of a step, and the steps."""
        manifest = path / MANIFEST
        first, before = self.steps, manifest.stat().st_mtime_ns
        start = time.perf_counter()
        while manifest.stat().st_mtime_ns == before:
            self.step()
        return (time.perf_counter() - start) / (self.steps - first), self.steps - first


def batches(size: int) -> Iterator[Tensor]:
    """Example ids without replacement within an epoch, for ever."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(EXAMPLES, generator=generator)
        yield from order[: EXAMPLES // size * size].split(size)


def measure(way: Way, inputs: Tensor, labels: Tensor, size: int, cycles: int, path: Path) -> None:
    """A plain and a recorded training take turns."""
    plain, recorded = (Training(inputs, labels, size) for _ in range(2))
    warm_up = max(WARM_UP * 128 // size, 1)
    disk.direct = way.direct
    plain.turn(warm_up)
    start = time.perf_counter()
    # A recording that stopped would cost nothing.
    with dualform.record(recorded.model, recorded.optimizer, path, keep=way.keep, on_error="raise") as recorder:
        recorded.recorder = recorder
        recorded.turn(warm_up)
        _, steps = recorded.cycle(path)
        begin = time.perf_counter() - start
        before = plain.turn(steps)
        way.begins.append(begin - before * recorded.steps)
        for _ in range(cycles):
            seconds, steps = recorded.cycle(path)
            after = plain.turn(steps)
            way.seconds.append(seconds)
            way.plain.append((before + after) / 2)
            before = after
        stop = time.perf_counter()
    way.waits.append(time.perf_counter() - stop)
    way.bytes = sum(file.stat().st_size for file in (path / "segments").iterdir()) / recorded.steps
    shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 32, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only-direct", action="store_true", help="leave out the writes through the page cache")
    parser.add_argument("--out", type=Path, help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="where every number goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"machine: {machine()}")
    print(f"{arguments.rounds} rounds of {arguments.cycles} commits, medians\n")
    inputs, labels = torch.rand(EXAMPLES, 784), torch.randint(10, (EXAMPLES,))
    results: dict[str, list[dict[str, object]]] = {}
    first = 0.0
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    for size in arguments.batch:
        every = ways(arguments.only_direct)
        with tempfile.TemporaryDirectory(dir=arguments.out) as root:
            for number in range(arguments.rounds):
                for way in every if number % 2 == 0 else reversed(every):
                    measure(way, inputs, labels, size, arguments.cycles, Path(root) / "run")
        print(
            f"batch {size:4d}            ms a step   plain    ratio   (middle half)     MB a step   "
            "once, ms: to begin   at close"
        )
        for way in every:
            each = way.ratios
            bound = BOUNDS[way.keep] if size == 128 and way.direct else None
            every_ms = (way.seconds, way.plain, way.begins, way.waits)
            own, plain, begin, wait = (1e3 * statistics.median(of) for of in every_ms)
            print(
                f"  {way.name:16s} {own:12.2f} {plain:7.2f} "
                f"{statistics.median(each):8.3f}   ({each[len(each) // 4]:.3f} to {each[-1 - len(each) // 4]:.3f}) "
                f"{way.bytes / 1e6:12.2f} {begin:21.0f} {wait:10.0f}" + (f"  bound {bound:.2f}" if bound else "")
            )
        first = first or every[0].begins[0]
        results[str(size)] = [asdict(way) | {"ratio": statistics.median(way.ratios)} for way in every]
    print(f"\nthe first recording of this process took {1e3 * first:.0f} ms more to begin")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
