"""The three small experiments, two runs of each, with a report; every test of this folder sees them as the paper's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dualform
import tiny
from dualform.experiments.asking.models import rebuilt_model
from dualform.experiments.paper import Job, reproduce, store
from dualform.experiments.paper.folder import RunFolder
from dualform.experiments.paper.parts import PARTS
from dualform.experiments.paper.run import Run


@cache
def _read(path: Path, part: str) -> Any:
    found = store.read(next(one.kind for one in PARTS if one.name == part), path / f"{part}.json")
    assert found is not None
    return found[0]


@dataclass(frozen=True)
class Paper:
    """A finished job, with its memories."""

    job: Job
    said: str

    @property
    def out(self) -> Path:
        return self.job.out

    def folder(self, name: str, seed: int = 0) -> RunFolder:
        found = {one.name: folders for one, folders in self.job.folders}
        return found[name][seed]

    def memory(self, name: str, seed: int = 0) -> dualform.Memory:
        return dualform.open(self.folder(name, seed).memory)

    def run(self, name: str, seed: int = 0) -> Run:
        experiment, memory = tiny.EXPERIMENTS[name], self.memory(name, seed)
        return Run(experiment, memory, rebuilt_model(memory, experiment.recipe.model, None), tiny.twin(name, seed).data)

    def part(self, name: str, part: str, seed: int = 0) -> Any:
        """The result of a part as its file has it."""
        return _read(self.folder(name, seed).path, part)

    def raw(self, name: str, part: str, seed: int = 0) -> Any:
        """The same without any code of ours."""
        file = self.folder(name, seed).path / f"{part}.json"
        return json.loads(file.read_text(encoding="utf-8"))["result"]


@pytest.fixture(autouse=True)
def small_experiments() -> Iterator[None]:
    with tiny.registered():
        yield


@pytest.fixture(scope="session")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Paper:
    job, console = Job("images", tmp_path_factory.mktemp("paper"), runs=2, keep_memories=True), tiny.quiet()
    with tiny.registered():
        reproduce(job, console)
    return Paper(job, tiny.said(console))
