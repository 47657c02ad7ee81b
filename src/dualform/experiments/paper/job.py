"""`dualform reproduce`: the runs of some experiments, and a report of them."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dualform.errors import BadCall
from dualform.experiments.datasets import Dataset
from dualform.experiments.paper import store
from dualform.experiments.paper.folder import RunFolder
from dualform.experiments.paper.results import Results
from dualform.experiments.paper.settings import Experiment, chosen
from dualform.experiments.recipes import recipe
from dualform.experiments.runs import check_room, command
from dualform.experiments.training import BATCH

DERIVED = 1.3  # a memory and what is derived from it, against its keys and gradients


@dataclass(frozen=True)
class Job:
    """What is asked for; `steps` are those of every phase of training, None the paper's."""

    name: str
    out: Path
    runs: int = 5
    seed: int = 0
    steps: int | None = None
    keep_memories: bool = False

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        """The experiments, with the steps that are asked for."""
        return tuple(experiment.shortened(self.steps) for experiment in chosen(self.name))

    @property
    def folders(self) -> tuple[tuple[Experiment, tuple[RunFolder, ...]], ...]:
        """For every experiment the directories of its runs."""
        seeds = range(self.seed, self.seed + self.runs)
        return tuple(
            (one, tuple(RunFolder.of(self.out, one, seed, seed == self.seed) for seed in seeds))
            for one in self.experiments
        )

    @property
    def request(self) -> dict[str, Any]:
        """What decides about the report."""
        return {"experiments": self.name, "runs": self.runs, "seed": self.seed, "steps": self.steps}

    def check(self) -> None:
        """BadCall for what cannot be done."""
        if self.runs < 1:
            raise BadCall(f"--runs must be at least 1, not {self.runs}.")
        if self.seed < 0:
            raise BadCall(f"--seed must be at least 0, not {self.seed}.")
        if self.seed + self.runs > 1 << 31:
            raise BadCall(f"--seed must be below 2³¹, not {self.seed}.")
        if self.out.exists() and not self.out.is_dir():
            raise BadCall(f"--out {self.out} is a file; give a directory.")
        assert self.experiments  # raises for names and steps that do not exist


def reproduce(job: Job, console: Console) -> Path:
    """Do what is left of a job and return its report; interrupted, the same call goes on where it stopped."""
    job.check()
    report = job.out / "report.html"
    todo = [folder for _, folders in job.folders for folder in folders if not folder.is_done(job.keep_memories)]
    earlier = _earlier(job)
    same = earlier.get("request") == job.request and earlier.get("format") == store.FORMAT
    if not todo and report.is_file() and same:
        console.print(f"Everything is there already: {report}", soft_wrap=True)
        return report
    load = cache(lambda name: recipe(name).load())
    if todo:
        try:
            _run(job, todo, load, console)
        except KeyboardInterrupt:
            console.print("Stopped. The same command goes on where it stopped.")
            raise
    results = [Results(one, tuple(folder.results() for folder in folders)) for one, folders in job.folders]
    sources = list(dict.fromkeys(load(one.recipe_name).source for one in job.experiments))
    about = {
        "format": store.FORMAT,
        "request": job.request,
        "dualform": version("dualform"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {torch.get_num_threads()} threads",
        # Joint training's sentence holds the single task's.
        "data": " ".join(one for one in sources if not any(one in other for other in sources if other != one)),
    }
    from dualform.experiments.paper.report import write_report

    with console.status("Drawing the figures"):
        data = {one.recipe_name: load(one.recipe_name) for one in job.experiments}
        figures = write_report(job.out, results, data, about, _names(earlier.get("figures")))
    store.write_json(
        job.out / "results.json",
        about
        | {
            "experiments": {
                one.experiment.name: {
                    "settings": store.plain(one.experiment),
                    "summary": store.plain(one.summary),
                    "runs": store.plain(one.runs),
                }
                for one in results
            },
            "figures": figures,
        },
    )
    console.print(f"The report is {report}; every number of it is in {job.out / 'results.json'}.", soft_wrap=True)
    if job.keep_memories:
        kept = job.folders[0][1][0].memory
        console.print(f"Ask the memories:  {command()} query {kept}", soft_wrap=True)
    return report


def _run(job: Job, todo: list[RunFolder], load: Any, console: Console) -> None:
    steps = [folder.experiment.steps for folder in todo]
    model = todo[0].experiment.recipe.model()
    needed = sum(steps) if job.keep_memories else max(steps)
    for name in dict.fromkeys(folder.experiment.recipe_name for folder in todo):
        load(name)  # what is missing is told before anything is trained
    job.out.mkdir(parents=True, exist_ok=True)
    check_room(job.out / "runs", model, round(DERIVED * needed * BATCH), console)
    told: set[str] = set()
    started = time.perf_counter()
    for number, folder in enumerate(todo):
        one = folder.experiment
        data: Dataset = load(one.recipe_name)
        if data.source not in told:
            told.add(data.source)
            console.print(f"Data: {data.source}", soft_wrap=True)
        console.print(f"{one.title}, seed {folder.seed} ({number + 1} of {len(todo)} runs), {one.steps:,} steps")
        folder.finish(data, job.keep_memories)
        left, seconds = sum(steps[number + 1 :]), time.perf_counter() - started
        if left:
            minutes = seconds / sum(steps[: number + 1]) * left / 60
            console.print(f"About {max(1, round(minutes))} min remain.")


def _earlier(job: Job) -> dict[str, Any]:
    """The results that are there, of this request or another; empty where there are none."""
    try:
        content = json.loads((job.out / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _names(figures: Any) -> set[str]:
    """The names of an earlier report's figures, none of which leads out of their directory."""
    names = figures if isinstance(figures, list) else []
    return {name for name in names if isinstance(name, str) and name == Path(name).name}
