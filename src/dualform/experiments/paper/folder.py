"""The directory of one run: its memory and checkpoint while they are needed, and a file for every part's result."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import dualform
from dualform.errors import DamagedMemory, DualformError, EmptyMemory
from dualform.experiments.asking.models import rebuilt_model
from dualform.experiments.datasets import Dataset
from dualform.experiments.paper import store
from dualform.experiments.paper.parts import Part, parts_of
from dualform.experiments.paper.results import RunResults
from dualform.experiments.paper.run import Run
from dualform.experiments.paper.settings import Experiment
from dualform.experiments.training import checkpoint_step, train


@dataclass(frozen=True)
class Trained:
    """How training went: the step at which it was last taken up again, 0 for a run in one piece."""

    resumed_at: int


@dataclass(frozen=True)
class RunFolder:
    """One run of an experiment in a directory of its own."""

    path: Path
    experiment: Experiment
    seed: int
    first: bool

    @classmethod
    def of(cls, out: Path, experiment: Experiment, seed: int, first: bool) -> RunFolder:
        """The directory of a run: other steps or seeds have others."""
        steps = "-".join(str(phase.steps) for phase in experiment.phases)
        return cls(out / "runs" / f"{experiment.name}-{steps}-seed-{seed}", experiment, seed, first)

    @property
    def memory(self) -> Path:
        """The memory's directory."""
        return self.path / "memory"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that this run has."""
        return parts_of(self.experiment, self.first)

    def missing(self) -> tuple[Part, ...]:
        """The parts whose results are not there."""
        return tuple(part for part in self.parts if self._read(part) is None)

    def is_done(self, keep_memories: bool) -> bool:
        """Whether nothing is left to do, not even a memory to delete."""
        if self.missing():
            return False
        return self.is_trained() if keep_memories else self._kept.exists() or not self.memory.exists()

    def is_trained(self) -> bool:
        """Whether the memory of the whole training is there."""
        try:
            memory = dualform.open(self.memory)
        except (DualformError, OSError):
            return False
        return memory.manifest.final is not None and memory.steps == self.experiment.steps

    def finish(self, data: Dataset, keep_memories: bool) -> None:
        """Do what is left: train, analyse, and delete the memory unless it is kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.missing() or keep_memories:
            self._analyse(data)
        if keep_memories:
            self._kept.touch()
        elif not self._kept.exists():
            shutil.rmtree(self.memory)
            self._checkpoint.unlink(missing_ok=True)

    def _analyse(self, data: Dataset) -> None:
        if not self.is_trained():
            self._train(data)
        memory = dualform.open(self.memory)
        run = Run(self.experiment, memory, rebuilt_model(memory, self.experiment.recipe.model, None), data)
        with tqdm(self.missing(), unit="part", disable=None) as progress:
            for part in progress:
                progress.set_description(f"Analysing ({part.title})")
                started = time.perf_counter()
                result = part.compute(run)
                store.write(self._file(part.name), result, time.perf_counter() - started)

    def results(self) -> RunResults:
        """The results of all parts; they must be there."""
        found: dict[str, Any] = {}
        seconds = {}
        trained = store.read(Trained, self._file("training"))
        if trained is not None:
            seconds["training"] = trained[1]
        for part in self.parts:
            there = self._read(part)
            assert there is not None, part.name
            found[part.name], seconds[part.name] = there
        return RunResults(self.seed, seconds, **found)

    def _train(self, data: Dataset) -> None:
        self._drop_unusable()
        torch.manual_seed(self.seed)
        model = self.experiment.recipe.model()
        batches = list(self.experiment.batches(data.train, self.seed))
        resumed_at = checkpoint_step(self._checkpoint)
        started = time.perf_counter()
        train(model, self.experiment.recipe, data, self.memory, batches, checkpoint=self._checkpoint)
        store.write(self._file("training"), Trained(resumed_at), time.perf_counter() - started)

    def _drop_unusable(self) -> None:
        """Begin anew where there is nothing to go on from: no whole checkpoint, or a memory that does not reach it."""
        try:
            there = dualform.open(self.memory).steps if self.memory.exists() else 0
        except (EmptyMemory, DamagedMemory):
            there = 0
        if not 0 < checkpoint_step(self._checkpoint) <= there:
            shutil.rmtree(self.memory, ignore_errors=True)
            self._checkpoint.unlink(missing_ok=True)

    @property
    def _kept(self) -> Path:
        """Says that the memory was asked for, so that no later call deletes it."""
        return self.path / "memory-is-kept"

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def _read(self, part: Part) -> tuple[Any, float] | None:
        return store.read(part.kind, self._file(part.name))
