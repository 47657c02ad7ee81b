"""The paper's MNIST network with its settings: accuracy, certificate, and the dual model against the primal.

    python benchmarks/mnist.py [--steps 3000] [--out DIR] [--attend 20]

Prints every figure that the README and the docs quote for it, with the machine. Without --out the memory
(5.1 GB at 3,000 steps, and 0.6 GB of keyframes) goes into a temporary directory and is deleted at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import machine

import dualform
from dualform.experiments.recipes import recipe
from dualform.experiments.training import accuracy, batches, train


@dataclass(frozen=True)
class Figures:
    """What one run measured."""

    steps: int
    seconds: float
    accuracy: float
    certificate: dualform.Certificate
    certificate_seconds: float
    folded: float
    attending: float
    bytes: int
    segments: int
    keyframes_seconds: float
    weights_seconds: list[float]
    dual_seconds: list[float]


def travel(path: Path, model: torch.nn.Module, steps: int) -> tuple[float, list[float], list[float]]:
    """What going back in time takes: making the keyframes, then weights(until=) and dual(until=) of 20 steps each."""
    memory = dualform.open(path)
    start = time.perf_counter()
    memory.weights(until=steps)
    made = time.perf_counter() - start
    seconds: tuple[list[float], list[float]] = ([], [])
    for at in range(40):  # never the same step twice, so nothing is remembered
        start = time.perf_counter()
        if at % 2:
            memory.dual(model, until=(2 * at + 1) * steps // 80)
        else:
            memory.weights(until=(2 * at + 1) * steps // 80)
        seconds[at % 2].append(time.perf_counter() - start)
    return made, *seconds


@torch.no_grad()
def measure(path: Path, steps: int, attend: int, seed: int = 0) -> Figures:
    """Train with a memory at `path`, then compare the dual model with the primal on the test images.

    `folded` and `attending` are the largest difference of a logit, relative to the largest logit: over all test
    images with the events folded into weights, and over the first `attend` by really attending over the memory.
    """
    chosen = recipe("mnist")
    data = chosen.load()
    torch.manual_seed(seed)
    model = chosen.model()
    start = time.perf_counter()
    with torch.enable_grad():
        train(model, chosen, data, path, list(batches(len(data.train), steps, seed)))
    seconds = time.perf_counter() - start
    memory = dualform.open(path)
    start = time.perf_counter()
    certificate = memory.certificate()
    certificate_seconds = time.perf_counter() - start
    images = chosen.preprocess(data.test.images)
    logits = model(images)
    few = images[:attend]
    folded = (memory.dual(model)(images) - logits).abs().max() / logits.abs().max()
    attending = (memory.dual(model, fold=False)(few) - logits[:attend]).abs().max() / logits.abs().max()
    return Figures(
        steps,
        seconds,
        accuracy(model, chosen, data.test),
        certificate,
        certificate_seconds,
        float(folded),
        float(attending),
        memory.bytes,
        sum(file.stat().st_size for file in (path / "segments").iterdir()),
        *travel(path, model, steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--attend", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(options.out or Path(directory) / "run", options.steps, options.attend)
    print(f"machine: {machine()}")
    print(f"{figures.steps:,} steps with recording in {figures.seconds:.0f} s")
    print(f"{figures.bytes / 1e9:.3f} GB in all, {figures.segments / 1e9:.3f} GB in segments/")
    print(f"test accuracy {100 * figures.accuracy:.2f} %")
    print(figures.certificate)
    print(f"certificate measured in {figures.certificate_seconds:.0f} s")
    print(f"dual logits, folded:    within {figures.folded:.1e} of the largest logit (10,000 images)")
    print(f"dual logits, attending: within {figures.attending:.1e} of the largest logit ({options.attend} images)")
    print(f"keyframes made in {figures.keyframes_seconds:.0f} s; then, of 20 steps each:")
    for name, seconds in (("weights", figures.weights_seconds), ("dual", figures.dual_seconds)):
        print(f"  {name}(until=s): median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
