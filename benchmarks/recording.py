"""What recording costs: training the paper's MNIST network plain, with keep="keys" and with keep="all".

    python benchmarks/recording.py [--batch 128 32 512] [--rounds 9] [--steps 210] [--threads N] [--out DIR] [--json F]

All ways train in turn in one process, in alternating order, each between two turns of plain training; a round compares
it with the mean of the two, and the ratio is the median over the rounds. Probe and checksums are on, and the memory is
written to disk: past the page cache ("direct") and through it ("fallback"). A turn begins with steps that are not
timed, until every way has made its first commit, so that commits are under way when the clock starts as when it stops;
by default it then goes on for two commits of keep="keys" and three to four of keep="all". --steps is for batch 128, and
other batches take steps for as many examples. What is left to write is waited for outside the clock, and reported as
the time a closing run waits. Inputs are random: the time of a dense layer does not depend on them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.experiments.recipes import recipe
from dualform.memory.disk import disk

EXAMPLES = 40_053
WARM_UP = 120
BOUNDS = {"keys": 1.10, "all": 1.15}


@dataclass
class Way:
    """One way to train, and what its turns took."""

    name: str
    keep: str | None
    direct: bool
    steps: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    bytes: float = 0.0


def ways() -> list[Way]:
    """Plain training first; the others are compared with it."""
    recorded = [Way(f"{keep}, {'direct' if direct else 'fallback'}", keep, direct)
                for keep in ("keys", "all") for direct in (True, False)]  # fmt: skip
    return [Way("plain", None, True), *recorded]


def batches(size: int) -> Iterator[Tensor]:
    """Example ids without replacement within an epoch, for ever."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(EXAMPLES, generator=generator)
        yield from order[: EXAMPLES // size * size].split(size)


def turn(way: Way, inputs: Tensor, labels: Tensor, size: int, steps: int, root: Path) -> None:
    """Train with one way for some steps and note what a step took."""
    warm_up, steps = max(WARM_UP * 128 // size, 1), max(steps * 128 // size, 1)
    torch.manual_seed(0)
    model = recipe("mnist").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    path = root / "run"
    disk.direct = way.direct
    with contextlib.ExitStack() as stack:
        options = {"keep": way.keep, "on_error": "raise"}  # a recording that stopped would cost nothing
        recorder = way.keep and stack.enter_context(dualform.record(model, optimizer, path, **options))
        for step, ids in zip(range(warm_up + steps), batches(size), strict=False):
            if step == warm_up:
                start = time.perf_counter()
            with recorder.batch(ids) if recorder else contextlib.nullcontext():
                F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        stop = time.perf_counter()
    way.steps.append((stop - start) / steps)
    way.waits.append(time.perf_counter() - stop)
    if way.keep:
        written = sum(file.stat().st_size for file in (path / "segments").iterdir())
        way.bytes = written / (warm_up + steps)
        shutil.rmtree(path)


def measure(size: int, rounds: int, steps: int, root: Path) -> list[Way]:
    """All ways in turn, in alternating order, each between two turns of plain training."""
    inputs, labels = torch.rand(EXAMPLES, 784), torch.randint(10, (EXAMPLES,))
    plain, *recorded = measured = ways()
    turn(plain, inputs, labels, size, steps, root)
    for number in range(rounds):
        for way in recorded if number % 2 == 0 else reversed(recorded):
            turn(way, inputs, labels, size, steps, root)
            turn(plain, inputs, labels, size, steps, root)
            way.beside.append((plain.steps[-2] + plain.steps[-1]) / 2)
    return measured


def ratios(way: Way) -> list[float]:
    """A way's time against the plain training beside it, in every round, in ascending order."""
    return sorted(own / beside for own, beside in zip(way.steps, way.beside, strict=True)) if way.keep else [1.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 32, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="where every number goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"machine: {arguments.threads} threads, {platform.machine()}, torch {torch.__version__}")
    print(f"{arguments.rounds} rounds of {arguments.steps} steps at batch 128, medians\n")
    results: dict[str, list[dict[str, object]]] = {}
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    for size in arguments.batch:
        with tempfile.TemporaryDirectory(dir=arguments.out) as root:
            measured = measure(size, arguments.rounds, arguments.steps, Path(root))
        print(f"batch {size:4d}            ms a step   / plain   (all rounds)     MB a step   wait at close, ms")
        for way in measured:
            each = ratios(way)
            bound = BOUNDS.get(way.keep or "") if size == 128 and way.direct else None
            against = f"  bound {bound:.2f}" if bound else ""
            print(
                f"  {way.name:16s} {1e3 * statistics.median(way.steps):12.2f} {statistics.median(each):9.3f}   "
                f"({each[0]:.2f} to {each[-1]:.2f}) {way.bytes / 1e6:12.2f} "
                f"{1e3 * statistics.median(way.waits):12.0f}{against}"
            )
        results[str(size)] = [asdict(way) | {"ratio": statistics.median(ratios(way))} for way in measured]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
