"""What questions to a memory take, and whether the answers are right: the paper's MNIST network, 384,000 events × 800.

    python benchmarks/queries.py [--run DIR] [--steps 3000] [--rounds 7] [--threads N] [--queries 1 16 100 1000]
        [--layers fc1 fc2] [--rows 384000] [--only PART ...] [--json F] [--quick]

--run is the memory; where there is none it is made first (5.1 GB), by default in the user's cache, and kept. The parts:

    top            exact top 10 through the public API against a tiled fp32 torch scan and faiss-cpu's exact search
    growth         the same at 1/8, 1/4, 1/2 and all of the steps (until=)
    within         the top 500 of every label
    contributions  the top 10 contributions to a unit, against a plain fp64 scan
    flat           top 10 where little prunes: Gaussian keys, and keys of norm 1 (memories made for it, and deleted)
    totals         Table 1: totals by label of all test images, in all layers
    output         output(), initial() and the sum of the contributions against the model
    start          a fresh process: opening, the first questions with and without derived files, peak memory

All engines of a table run in turns in one process with the same number of threads, in rotating order, after a round
that is not counted; every round has other queries; times are medians. Before every turn there is a short pause: the
threads of faiss and of torch wait awake for some milliseconds after their work. A turn with one query asks several in a
row, and the first of them, which finds the caches full of another engine's data, is also reported alone. Between the
turns, our answers for the first test images (1,000 in top and flat, 100 in growth and contributions, 16 within) are
compared with the full exact scan, and every answer of a baseline with ours. Goals are DESIGN's, for 384,000 events.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import ExactScan, FaissFlat, Found, Fp64Scan, TorchScan, TotalsScan, WithinScan
from machine import processor
from torch import Tensor, nn

import dualform
from dualform.experiments.recipes import recipe
from dualform.experiments.training import batches, train
from dualform.queries.attend import uses_of
from dualform.queries.reducers import GroupSums, Top
from dualform.queries.scorers import AttentionScorer, DirectionScorer
from dualform.queries.selection import Grouping
from dualform.queries.values import Coefficients

K = 10
FASTER = {"torch": {1: 30.0, 100: 25.0, 1000: 30.0}, "faiss": {1: 60.0, 100: 250.0, 1000: 100.0}}
FLAT = 1.2  # ours may take so much of the torch scan's time where nothing prunes
TABLE_1 = 20.0
RIGHT = 1e-4  # outputs, relative to the largest
ROUNDING = 1e-5  # scores of fp32 engines, relative
EXACTLY = 1000  # queries that are compared with the full exact scan
UNITS = 10
CALM = 0.05  # seconds
PARTS = ("top", "growth", "within", "contributions", "flat", "totals", "output", "start")

# A process of its own, so that no baseline is in its memory; what it found is its last line.
CHILD = """
import json, sys, time
import numpy, torch
import dualform
path, queries, layer, count, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
asked = torch.from_numpy(numpy.load(queries))
def status(name):
    with open("/proc/self/status") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
def ask(queries):
    return memory.attend(None, {layer: queries})[layer].top(10)
found = {"imported": status("VmRSS")}
times = [time.perf_counter()]
memory = dualform.open(path)
times.append(time.perf_counter())
for at in range(3):
    answer = ask(asked[at : at + 1])
    times.append(time.perf_counter())
for _ in range(2):
    answer = ask(asked[: int(count)])
    times.append(time.perf_counter())
found["seconds"] = [b - a for a, b in zip(times, times[1:])]
found |= {name: status(name) for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}
print(json.dumps(found | {"way": answer.explain()}))
"""

Call = Callable[[], Any]
Engines = dict[str, Callable[[slice], Call]]


@dataclass
class Checks:
    """How the answers of a table compare: ours with the exact scan, the baselines' with ours."""

    exact: int = 0
    compared: int = 0
    other: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)

    def against_exact(self, ours: Any, exact: Found) -> None:
        """Count the queries whose events, order and bits of scores are those of the exact scan."""
        same = (ours.events == exact.events) & (ours.scores.view(torch.int32) == exact.scores.view(torch.int32))
        self.compared += len(same)
        self.exact += int(same.flatten(1).all(dim=1).sum())

    def against_ours(self, name: str, theirs: Found, ours: Any, truth: Callable[[int, Tensor], Tensor]) -> None:
        """Count answers with other events, and those whose true scores differ from ours by more than fp32 rounding.

        `truth` gives the fp64 scores of some events of a query.
        """
        groups = ours.events.shape[1] if ours.events.ndim == 3 else 1
        mine, events, found = (part.flatten(0, -2) for part in (ours.scores, ours.events, theirs.events))
        self.other[name] += int((found.sort().values != events.sort().values).any(dim=1).sum())
        for at in range(len(events)):
            there = events[at] >= 0
            true = truth(at // groups, found[at][there].clamp_min(0)).sort(descending=True).values
            far = (true - mine[at][there]).abs() > ROUNDING * mine[at][there].abs() + 1e-30
            self.wrong[name] += bool(far.any() or not there.equal(found[at] >= 0))

    def __str__(self) -> str:
        lines = [
            f"  ours: {self.exact:,} of {self.compared:,} answers are the exact scan's, in events and bits of scores"
        ]
        for name, other in self.other.items():
            far = f"{self.wrong[name]:,} answers are further from ours than {ROUNDING:g} of a score"
            lines.append(f"  {name}: {far}; {other:,} have other events")
        return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """What the engines took for some queries: every timed call, and those that came just after another engine's."""

    part: str
    data: str
    events: int
    queries: int
    seconds: dict[str, list[float]]
    first: dict[str, list[float]]
    way: str

    def ms(self, engine: str, first: bool = False) -> float:
        """The median time of a call."""
        return 1e3 * statistics.median((self.first if first else self.seconds)[engine])

    def ratios(self) -> str:
        """How engines compare, with the goals."""
        if self.part == "flat":
            return f"ours/torch {verdict(self.ms('ours') / self.ms('torch'), FLAT, at_most=True)}"
        goals = FASTER if self.part == "top" else {}
        against = {name: self.ms(name) / self.ms("ours") for name in ("torch", "faiss", "fp64") if name in self.seconds}
        return "  ".join(f"{n}/ours {verdict(r, goals.get(n, {}).get(self.queries))}" for n, r in against.items())

    def __str__(self) -> str:
        in_a_row = len(self.first["ours"]) < len(self.seconds["ours"])
        times = "".join(f"{self.ms(name):15.3f}" for name in self.seconds)
        after = "".join(f"{self.ms(name, first=True):15.3f}" for name in self.seconds)
        cold = f"\n  {'just after another':>18s} {after}" if in_a_row else ""
        return f"  {self.events:9,d} {self.queries:8,d} {times}   {self.ratios()}{cold}\n{'':21s} {self.way}"


def verdict(ratio: float, goal: float | None, at_most: bool = False) -> str:
    """A ratio, and its goal where it has one."""
    if goal is None:
        return f"{ratio:.3g}×"
    reached = ratio <= goal if at_most else ratio >= goal
    sign = "≤" if at_most else "≥"
    return f"{ratio:.3g}× ({sign} {goal:g}: {'reached' if reached else 'not reached'})"


@dataclass(frozen=True)
class Bench:
    """The memory, its model, the test images, and what was asked for and found."""

    path: Path
    memory: dualform.Memory
    model: nn.Module
    images: Tensor
    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


@dataclass
class Table:
    """Engines that answer the same questions in turns. An engine is given a part of the queries and returns a call."""

    bench: Bench
    part: str
    data: str
    events: int
    engines: Engines
    truth: Callable[[int, Tensor], Tensor]
    exact: Found | None = None
    checks: Checks = field(default_factory=Checks)

    def title(self, text: str) -> None:
        """Print the head of the table."""
        print(f"\n{self.data}: {text}")
        print("     events  queries " + "".join(f"{name + ', ms':>15s}" for name in self.engines))

    def race(self, count: int, of: int) -> None:
        """Time the engines with `count` queries a call, out of `of`. Round 0 is not counted."""
        names, in_a_row, way = list(self.engines), max(8 // count, 1), ""
        seconds: dict[str, list[float]] = {name: [] for name in names}
        first: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.bench.options.rounds + 1):
            starts = [(number * in_a_row + at) * count % (of - count + 1) for at in range(in_a_row)]
            answers: list[dict[str, Any]] = [{} for _ in starts]
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(CALM)
                for at, start in enumerate(starts):
                    call = self.engines[name](slice(start, start + count))
                    begun = time.perf_counter()
                    answers[at][name] = call()
                    took = time.perf_counter() - begun
                    if number:
                        seconds[name].append(took)
                        first[name] += [took] if at == 0 else []
            for start, answer in zip(starts, answers, strict=True):
                self._check(start, count, answer)
            way = answers[0]["ours"].explain()
        row = Row(self.part, self.data, self.events, count, seconds, first, way)
        self.bench.rows.append(row)
        print(row, flush=True)

    def _check(self, start: int, count: int, answers: dict[str, Any]) -> None:
        part = slice(start, start + count)
        for name, answer in answers.items():
            if not name.startswith("ours"):
                self.checks.against_ours(
                    name, answer, answers["ours"], lambda at, events: self.truth(start + at, events)
                )
            elif self.exact is not None and part.stop <= len(self.exact.events):
                self.checks.against_exact(answer, Found(self.exact.scores[part], self.exact.events[part]))

    def close(self) -> None:
        """Print and keep the checks."""
        print(self.checks)
        self.bench.found[f"{self.part}/{self.data}/checks"] = vars(self.checks)


def attended(keys: Tensor, asked: Tensor) -> Callable[[int, Tensor], Tensor]:
    """Scores in fp64."""
    return lambda at, events: keys[events].double() @ asked[at].double()


def top(
    bench: Bench, part: str, data: str, memory: dualform.Memory, layer: str, keys: Tensor, asked: Tensor
) -> TorchScan:
    """The top 10 of a layer for every number of queries."""
    scan, exact = TorchScan.build(keys), ExactScan.build(keys).search(asked[:EXACTLY], K)
    attention = memory.attend(None, {layer: asked})[layer]
    engines: Engines = {
        "ours": lambda part: lambda: memory.attend(None, {layer: asked[part]})[layer].top(K),
        "torch": lambda part: lambda: scan.search(asked[part], K),
        "ours (top)": lambda part: partial(attention[part].top, K),
    }
    if part == "top" and importlib.util.find_spec("faiss"):
        index = FaissFlat.build(keys)
        engines["faiss"] = lambda part: lambda: index.search(asked[part], K)
    table = Table(bench, part, data, len(keys), engines, attended(keys, asked), exact)
    table.title(f"the top {K}, keys of width {keys.shape[1]}")
    for count in bench.options.queries:
        scan.tune(asked[:count], K)
        table.race(count, len(asked))
    table.close()
    plans = {count: dataclasses.asdict(plan) for count, plan in scan.plans.items()}
    print("  torch, as tuned: " + "; ".join(f"{count:,} queries {plan}" for count, plan in plans.items()))
    bench.found[f"{part}/{data}/torch"] = plans
    return scan


def growth(bench: Bench, layer: str, scan: TorchScan, asked: Tensor) -> None:
    """How the top 10 grows with the events, by time travel to a part of the steps."""
    counts = sorted({1, 100} & set(bench.options.queries))
    for count in counts:
        scan.search(asked[:count], K)  # tuned on all events where it was not yet
    for share in (8, 4, 2, 1):
        until = bench.memory.steps // share
        _growth(bench, layer, scan.first(bench.memory.events(number(bench.memory, layer), until)), asked, until, counts)


def _growth(bench: Bench, layer: str, scan: TorchScan, asked: Tensor, until: int, counts: list[int]) -> None:
    engines: Engines = {
        "ours": lambda part: lambda: bench.memory.attend(None, {layer: asked[part]}, until=until)[layer].top(K),
        "torch": lambda part: lambda: scan.search(asked[part], K),
    }
    table = Table(bench, "growth", f"{layer} until step {until:,}", len(scan.keys), engines, attended(scan.keys, asked))
    table.exact = ExactScan.build(scan.keys).search(asked[:100], K)
    table.title(f"the top {K}")
    for count in counts:
        table.race(count, len(asked))
    table.close()


def within(bench: Bench, layer: str, keys: Tensor, asked: Tensor, k: int = 500) -> None:
    """The top 500 of every label, as in the paper's Figure 4."""
    attention = bench.memory.attend(None, {layer: asked})[layer]
    codes, groups = codes_of(bench.memory, layer)
    scan = WithinScan.build(keys, codes, groups)
    scores, events = [], []
    for members in ((codes == group).nonzero()[:, 0] for group in range(groups)):
        found = ExactScan.build(keys[members]).search(asked[:16], k)
        missing = (0, k - found.events.shape[1])
        scores.append(nn.functional.pad(found.scores, missing, value=torch.nan))
        events.append(nn.functional.pad(members[found.events], missing, value=-1))
    engines: Engines = {
        "ours": lambda part: partial(attention[part].top, k, within="label"),
        "torch": lambda part: lambda: scan.search(asked[part], k),
    }
    exact = Found(torch.stack(scores, dim=1), torch.stack(events, dim=1))
    table = Table(bench, "within", layer, len(keys), engines, attended(keys, asked), exact)
    table.title(f"the top {k} of each of {groups} labels")
    for count in (1, 16):
        table.race(count, len(asked))
    table.close()


def contributions(bench: Bench, layer: str, keys: Tensor, asked: Tensor, units: Tensor) -> None:
    """The top 10 contributions of every query to a unit, in every layer that of its predicted class's number."""
    memory, weight = bench.memory, number(bench.memory, layer)
    coefficients = Coefficients.of(memory, weight, uses_of(memory)[layer][2].bias, memory.steps)
    directions = nn.functional.one_hot(units[:100], memory.manifest.weights[weight].dim_out).double()
    reference = Top(DirectionScorer(asked[:100], coefficients, directions), K)
    values, biases = torch.empty(2, UNITS, len(keys), dtype=torch.float64)
    for block in memory.blocks(weight, memory.steps):
        of_weight, of_bias = coefficients.of_events(block)
        assert block.gradients is not None
        gradients = block.gradients[:, :UNITS].double().T
        values[:, block.events], biases[:, block.events] = gradients * of_weight, gradients * of_bias
        reference.update(block)
    scan = Fp64Scan.build(keys, values, biases)
    attention = memory.attend(None, {layer: asked})[layer]
    engines: Engines = {
        "ours": lambda part: lambda: attention[part].contributions(unit=units[part]).top(K),
        "fp64": lambda part: lambda: scan.search(asked[part], K, units[part]),
    }
    scores = attended(keys, asked)
    table = Table(
        bench,
        "contributions",
        layer,
        len(keys),
        engines,
        lambda at, events: scores(at, events) * values[units[at], events] + biases[units[at], events],
        Found(reference.result()[0], reference.result()[1][:, :, 0]),
    )
    table.title(f"the top {K} contributions to a unit")
    for count in sorted({1, 16, 100} & set(bench.options.queries)):
        table.race(count, len(asked))
    table.close()


def flat(bench: Bench, spotlight: Any) -> None:
    """Keys on which bounds prune little: ours must not be slower than the scan it falls back to."""
    rows, generator = bench.options.rows, torch.Generator().manual_seed(0)
    names = [
        "Gaussian keys",
        "Gaussian keys of norm 1",
        *(f"{layer}'s keys of norm 1" for layer in bench.options.layers),
    ]
    for name, layer in zip(names, [None, None, *bench.options.layers], strict=True):
        if layer is None:
            keys, asked = (torch.randn(count, 800, generator=generator) for count in (rows, 10_000))
        else:
            keys, asked = keys_of(bench.memory, layer)[:rows], spotlight[layer].queries
        keys = nn.functional.normalize(keys) if "norm" in name else keys
        with beside(bench.path) as directory:
            write_memory(directory / "run", keys)
            top(bench, "flat", name, dualform.open(directory / "run"), "rows", keys, asked)


def write_memory(path: Path, keys: Tensor, batch: int = 4096) -> None:
    """A memory whose keys are given rows, each its own example: a layer is fed them, and learns nothing."""
    model = nn.Sequential(collections.OrderedDict(rows=nn.Linear(keys.shape[1], 1, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.enable_grad(), dualform.record(model, optimizer, path, keep="keys") as recorder:
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            with recorder.batch(torch.arange(start, start + len(part))):
                model(part).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def totals(bench: Bench, spotlight: Any) -> None:
    """Table 1: Σ of scores by label for all test images, through the API and by scans of every event."""
    took: collections.Counter[str] = collections.Counter()
    print(f"\nTable 1: totals by label of {len(bench.images):,} test images; * extrapolated from 100 and 400 of them")
    print(
        f"  layer {'ours, s':>14s} {'fp64 scan, s':>14s} {'torch scan, s':>14s}   ours from the fp64 scan, of Σ|terms|"
    )
    for layer in spotlight:
        took.update(_totals(bench, layer, spotlight[layer]))
    for name in ("fp64", "torch"):
        print(f"  all layers: {name} scan/ours {verdict(took[name] / took['ours'], TABLE_1)}")
    bench.found["totals/all"] = dict(took)


def _totals(bench: Bench, layer: str, attention: Any) -> dict[str, float]:
    memory, limit, every = bench.memory, 6.0 if bench.options.quick else 40.0, len(attention)
    grouping, scan = Grouping.by(memory, "label"), TotalsScan.build(keys_of(memory, layer), *codes_of(memory, layer))

    def by_blocks(count: int, absolute: bool = False) -> Tensor:
        reducer = GroupSums(AttentionScorer(attention.queries[:count]), grouping, absolute)
        for block in memory.blocks(number(memory, layer), memory.steps):
            reducer.update(block)
        return reducer.result()[0]

    calls: dict[str, Callable[[int], Any]] = {
        "ours": lambda count: attention[:count].totals(by="label"),
        "fp64": by_blocks,
        "torch": lambda count: scan.search(attention.queries[:count]),
        # The paper sums magnitudes in the input layer, where keys are negative too; elsewhere it is the same.
        "ours, absolute": lambda count: attention[:count].totals(by="label", absolute=True),
        "torch, absolute": lambda count: scan.search(attention.queries[:count], absolute=True),
    }
    first = timed(lambda: calls["ours"](1))  # makes the sums where they are not there
    ways = {name: calls[name](16).explain() for name in calls if name.startswith("ours")}
    # Only a scan can take too long; the time of anything else is measured, never guessed from a few milliseconds.
    limits = {name: limit if "scan" in ways.get(name, "scan") else torch.inf for name in calls}
    times = {name: whole(call, every, limits[name]) for name, call in calls.items()}
    apart = float(((calls["ours"](100).values - by_blocks(100)).abs() / by_blocks(100, absolute=True)).max())
    shown = [f"{seconds:13.4g}{' ' if asked == every else '*'}" for seconds, asked in times.values()]
    print(f"  {layer:5s} {' '.join(shown[:3])}   {apart:.1e}   {ways['ours']}; the first question {first:.3f} s")
    print(f"    Σ|α|{shown[3]} {'':14s} {shown[4]}   {ways['ours, absolute']}", flush=True)
    bench.found[f"totals/{layer}"] = {"seconds, queries": times, "first": first, "apart": apart, "ways": ways}
    return {name: seconds for name, (seconds, _) in times.items()}


def whole(call: Callable[[int], Any], queries: int, limit: float) -> tuple[float, int]:
    """Seconds for all queries, and how many were really asked: fewer where all would take longer than `limit`.

    A line through 100 and 400 queries tells that, since a scan has a part that does not grow with them.
    """
    few, more = min(100, queries), min(400, queries)
    fewer, seconds = (min(timed(partial(call, count)) for _ in range(3)) for count in (few, more))
    estimate = seconds + (queries - more) * max(seconds - fewer, 0.0) / max(more - few, 1)
    if estimate > limit:
        return estimate, more
    took = [timed(lambda: call(queries))]
    while len(took) < 7 and sum(took) < 1.0:
        took.append(timed(lambda: call(queries)))
    return statistics.median(took), queries


def timed(call: Call) -> float:
    """The seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def output(bench: Bench, spotlight: Any) -> None:
    """The layers' outputs rebuilt from the events, and all logits in two ways."""
    outputs, found, few = layer_outputs(bench.model, list(spotlight), bench.images), {}, 200
    for layer in spotlight:
        found[f"{layer}, {few} images: output()"] = far(spotlight[layer][:few].output(), outputs[layer][:few])
    *_, last = spotlight
    attention, logits = spotlight[last], outputs[last].double()
    begun = time.perf_counter()
    summed = attention.initial() + attention.contributions().totals(by="label").values.sum(dim=1)
    middle = time.perf_counter()
    rebuilt = attention.output()
    seconds = {"initial() + contributions().totals()": middle - begun, "output()": time.perf_counter() - middle}
    every = f"{last}, {len(logits):,} images: "
    found[every + "output()"] = far(rebuilt, logits)
    found[every + "initial() + Σ contributions"] = far(summed, logits)
    found[every + "initial() + Σ contributions, against output()"] = far(summed, rebuilt)
    print(f"\nthe largest difference from the layer's output, of the largest output (goal ≤ {RIGHT:g})")
    for name, error in found.items():
        print(f"  {name:66s} {error:.1e}  {'reached' if error <= RIGHT else 'not reached'}")
    tolerance = RIGHT * float(logits.abs().max())
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > tolerance
    agree = (rebuilt.argmax(1) == logits.argmax(1)) & (summed.argmax(1) == logits.argmax(1))
    counts = {"clear": int(clear.sum()), "agree": int(agree[clear].sum()), "tolerance": tolerance}
    print("  the two largest logits of {clear:,} images differ by more than {tolerance:.1e}".format(**counts))
    print(f"  the class agrees for {counts['agree']:,} of them")
    print("  " + ", ".join(f"{name} of all: {took:.2f} s" for name, took in seconds.items()))
    bench.found["output"] = found | counts | {"seconds": seconds}


def layer_outputs(model: nn.Module, layers: list[str], images: Tensor) -> dict[str, Tensor]:
    """What every layer gives for some images."""
    outputs: dict[str, Tensor] = {}

    def keep(layer: str, _: nn.Module, __: Any, result: Tensor) -> None:
        outputs[layer] = result

    hooks = [model.get_submodule(layer).register_forward_hook(partial(keep, layer)) for layer in layers]
    model(images)
    for hook in hooks:
        hook.remove()
    return outputs


def far(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def start(bench: Bench, spotlight: Any) -> None:
    """A fresh process for each: opening, the first questions, and the memory they take."""
    print("\na fresh process, the files in the page cache; what is derived is made by the first that needs it")
    columns = ("2nd, ms", "3rd, ms", "100, ms", "again, ms", "peak, MB")
    print(f"{'open, ms':>40s} {'1st query, ms':>14s} " + " ".join(f"{name:>9s}" for name in columns))
    with beside(bench.path) as directory:
        # The same files under another name, without what is derived from them: nothing of the user's is deleted.
        bare = directory / "run"
        shutil.copytree(bench.path, bare, copy_function=os.link, ignore=shutil.ignore_patterns("derived"))
        for layer in bench.options.layers:
            np.save(directory / "queries.npy", spotlight[layer].queries[:1000].numpy())
            for derived in ("without", "with"):
                read_all(bare)
                found = child(bare, directory / "queries.npy", layer, bench.options.threads)
                opened, first, second, third, many, again = (1e3 * took for took in found["seconds"])
                print(
                    f"  {layer}, {derived + ' derived files':22s} {opened:11.1f} {first:14.1f} {second:9.2f} "
                    f"{third:9.2f} {many:9.1f} {again:9.1f} {found['VmHWM'] / 1e6:9,.0f}"
                )
                sizes = [f"{found[name] / 1e6:,.0f} MB" for name in ("imported", "RssAnon", "RssFile")]
                print("    {} when imported; at the end {} of its own and {} of files".format(*sizes))
                print(f"    {found['way']}", flush=True)
                bench.found[f"start/{layer}/{derived}"] = found
        size = sum(file.stat().st_size for file in (bare / "derived").rglob("*") if file.is_file())
    print(f"  derived files: {size / 1e6:,.0f} MB")
    bench.found["start/derived"] = size


def read_all(path: Path) -> None:
    """Read every file, so that the page cache has it."""
    for file in path.rglob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def child(path: Path, queries: Path, layer: str, threads: int) -> Any:
    """Run CHILD and return what it found."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", CHILD, str(path), str(queries), layer, "100", str(threads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary directory on the same disk as the memory."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="benchmark-") as directory:
        yield Path(directory)


def number(memory: dualform.Memory, layer: str) -> int:
    """The number of a layer's weight in the memory."""
    return uses_of(memory)[layer][0]


def keys_of(memory: dualform.Memory, layer: str) -> Tensor:
    """All keys of a layer in one tensor: row t is event t."""
    weight = number(memory, layer)
    keys = torch.empty(memory.events(weight, memory.steps), memory.manifest.weights[weight].dim_in)
    for block in memory.blocks(weight, memory.steps):
        keys[block.events] = block.keys
    return keys


def codes_of(memory: dualform.Memory, layer: str) -> tuple[Tensor, int]:
    """The number of every event's label among the groups, and how many groups there are."""
    grouping = Grouping.by(memory, "label")
    blocks = memory.blocks(number(memory, layer), memory.steps)
    return torch.cat([grouping.codes(block) for block in blocks]), len(grouping.groups)


def prepare(options: argparse.Namespace) -> Bench:
    """Open the memory, or train the recipe with one first; the model comes from its last weights."""
    chosen = recipe("mnist")
    data = chosen.load()
    path = options.run
    if not path.exists():
        print(f"Training {options.steps:,} steps to make the memory in {path}.", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        with beside(path) as directory, torch.enable_grad():
            train(chosen.model(), chosen, data, directory / "run", list(batches(len(data.train), options.steps, 0)))
            (directory / "run").rename(path)
    memory = dualform.open(path)
    if memory.manifest.recipe != "mnist" or memory.manifest.final is None:
        raise SystemExit(f"{path} is not a finished memory of the recipe mnist; name another with --run.")
    if not set(options.layers) <= set(uses_of(memory)):
        raise SystemExit(f"--layers takes some of {', '.join(uses_of(memory))}.")
    model = chosen.model()
    model.load_state_dict({name: memory.final(name) for name in model.state_dict()})
    return Bench(path, memory, model, chosen.preprocess(data.test.images), options)


def head(bench: Bench) -> None:
    """Print and keep where and with what this is measured."""
    versions = {}
    for name in ("torch", "numpy", "numba", "faiss-cpu", "dualform"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    bench.found["head"] = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": bench.options.threads,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
        "steps": bench.memory.steps,
        "rounds": bench.options.rounds,
    }
    print(
        "machine: {cpu}, {cores} cores, {threads} threads, load {load:.1f} at the start".format(**bench.found["head"])
    )
    print(
        f"python {platform.python_version()}, " + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    print(f"numba: {'yes' if 'numba' in versions else 'no'}; faiss: {'yes' if 'faiss-cpu' in versions else 'no'}")
    print(f"memory: {bench.path}, {bench.memory.steps:,} steps; {bench.options.rounds} rounds, medians")


def use_threads(count: int) -> None:
    """The same number of threads for every engine."""
    torch.set_num_threads(count)
    if importlib.util.find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(count)
    if importlib.util.find_spec("numba"):
        import numba

        numba.set_num_threads(min(count, numba.get_num_threads()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the memory; made where there is none")
    parser.add_argument("--steps", type=int, help="of the memory that is made (3000; 300 with --quick)")
    parser.add_argument("--rounds", type=int, help="of every table (7; 3 with --quick)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 16, 100, 1000])
    parser.add_argument("--layers", nargs="+", default=["fc1", "fc2"])
    parser.add_argument("--rows", type=int, help="of the keys made for the part flat (384000; 96000 with --quick)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--json", type=Path, help="where every number goes")
    parser.add_argument("--quick", action="store_true", help="a small memory, to see that all works")
    options = parser.parse_args()
    if not all(1 <= count <= 10_000 for count in options.queries):
        parser.error("--queries takes numbers from 1 to 10,000, the test images that there are")
    options.steps = options.steps or (300 if options.quick else 3000)
    options.rounds = options.rounds or (3 if options.quick else 7)
    options.rows = options.rows or (96_000 if options.quick else 384_000)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    options.run = (options.run or cache / "dualform" / "benchmarks" / f"mnist-{options.steps}").absolute()
    return options


@torch.no_grad()
def main() -> None:
    options = arguments()
    use_threads(options.threads)
    bench = prepare(options)
    head(bench)
    spotlight = bench.memory.attend(bench.model, bench.images)
    units = bench.model(bench.images).argmax(1)
    scans = [part for part in ("growth", "within", "contributions", "top") if part in options.only]
    for layer in options.layers if scans else ():
        keys, asked = keys_of(bench.memory, layer), spotlight[layer].queries
        scan = top(bench, "top", layer, bench.memory, layer, keys, asked) if "top" in scans else TorchScan.build(keys)
        if "growth" in scans:
            growth(bench, layer, scan, asked)
        if "within" in scans:
            within(bench, layer, keys, asked)
        if "contributions" in scans:
            contributions(bench, layer, keys, asked, units)
    for name, part in {"flat": flat, "totals": totals, "output": output, "start": start}.items():
        if name in options.only:
            part(bench, spotlight)
    if options.json:
        rows = [dataclasses.asdict(row) for row in bench.rows]
        options.json.write_text(json.dumps(bench.found | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
