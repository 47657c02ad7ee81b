"""A disk on which any operation may be the last, or may fail; and a short run that can be gone on with from any step.

`faulty(Fault(…))` replaces the operations of dualform's disk for a while: the n-th one raises, and those after it may
do so too. `dying(root, …)` copies a directory before every operation, as a process that dies there would leave it.

`loaded(step)` is the model and the optimiser of the run after a step, `trained` goes on with them, and `contents` is
everything that two memories of the run must agree in, bit for bit. `compiled` has a run as short as this recorded as
long ones in fp32 are: by compiled loops, into arenas, many steps worked out at once.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.memory import writer
from dualform.memory.disk import Disk, disk
from dualform.memory.manifest import MANIFEST
from dualform.recording import stepping, swift
from small import network

OPERATIONS = ("create", "write", "truncate", "sync", "rename", "remove", "make_directory", "sync_directory")
STEPS = 6
EXAMPLES = 8
COLUMNS = {"label": np.arange(EXAMPLES) % 4}


class Stopped(BaseException):
    """The process is killed here: nothing that it does afterwards reaches the disk."""


def system_error(code: int) -> Callable[[], OSError]:
    """An error of the operating system."""
    return lambda: OSError(code, os.strerror(code))


@dataclass(frozen=True)
class Fault:
    """What the operation number `at`, counted from 1, raises, and all those after it unless it is for `once`.

    A `torn` write gets half of its data through first.
    """

    at: int
    error: Callable[[], BaseException] = Stopped
    once: bool = False
    torn: bool = False


@dataclass
class Log:
    """The operations in their order, how often the manifest got its name, and how often that was made durable.

    `struck` are these two numbers when the fault struck.
    """

    operations: list[str] = field(default_factory=list)
    renamed: int = 0
    durable: int = 0
    struck: tuple[int, int] | None = None


class FaultyDisk(Disk):
    """Counts its operations and carries them out until a fault strikes. A sync is noted, and only that."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.log, self._fault = Log(), fault
        self.files: dict[int, Path] = {}
        self.unsynced: set[Path] = set()
        self.renames: list[tuple[Path, Path, bytes | None]] = []

    def create(self, path: Path, direct: bool) -> int:
        self.meet("create")
        handle = super().create(path, direct)
        self.files[handle] = path
        self.unsynced.add(path)
        return handle

    def write(self, handle: int, data: memoryview) -> None:
        path = self.files[handle]
        try:
            self.meet("write", path, data)
        except BaseException:
            if self._fault and self._fault.torn:
                tear(path, data)
            raise
        super().write(handle, data)
        self.unsynced.add(path)

    def truncate(self, handle: int, size: int) -> None:
        self.meet("truncate")
        super().truncate(handle, size)
        self.unsynced.add(self.files[handle])

    def sync(self, handle: int) -> None:
        self.meet("sync")
        self.unsynced.discard(self.files[handle])

    def rename(self, source: Path, target: Path) -> None:
        self.meet("rename")
        self.renames.append((source, target, target.read_bytes() if target.exists() else None))
        super().rename(source, target)
        if source in self.unsynced:
            self.unsynced.add(target)
        self.log.renamed += target.name == MANIFEST

    def remove(self, path: Path) -> None:
        self.meet("remove")
        super().remove(path)

    def make_directory(self, path: Path) -> None:
        self.meet("make_directory")
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.meet("sync_directory")
        self.log.durable += sum(target == path / MANIFEST for _, target, _ in self.renames)
        self.renames = [one for one in self.renames if one[1].parent != path]

    def meet(self, name: str, path: Path | None = None, data: memoryview | None = None) -> None:
        """An operation is about to be made."""
        self.log.operations.append(name)
        at, fault = len(self.log.operations), self._fault
        if fault and (at == fault.at or (at > fault.at and not fault.once)):
            self.log.struck = self.log.struck or (self.log.renamed, self.log.durable)
            raise fault.error()


def tear(path: Path, data: memoryview) -> None:
    """Half of a write; a direct one could not write half a page."""
    with path.open("ab") as file:
        file.write(data[: len(data) // 2])


@dataclass(frozen=True)
class Death:
    """A directory as a process has left it that died: after how many manifests, and after which step of the training.

    The step is −1 before the recorder has started.
    """

    path: Path
    manifests: int
    step: int


class DyingDisk(FaultyDisk):
    """Keeps a copy of `root` for every way to die at every operation.

    "killed": what was written is there. "torn": half of a write, too. "power, names lost" and "power, names kept":
    files that were not synced lose what is in them, and so may directories that were not.
    """

    def __init__(self, root: Path, into: Path, made: Sequence[int]) -> None:
        super().__init__(None)
        self._root, self._into, self._made = root, into, made
        self.deaths: list[Death] = []

    def meet(self, name: str, path: Path | None = None, data: memoryview | None = None) -> None:
        super().meet(name)
        self._copy("killed", self.log.renamed)
        if path is not None and data is not None:
            tear(self._copy("torn", self.log.renamed) / path.relative_to(self._root), data)
        if self.unsynced or self.renames:
            self._empty(self._copy("power, names kept", self.log.renamed))
        if self.renames:
            copied = self._copy("power, names lost", self.log.durable)
            self._empty(copied)
            for source, target, before in reversed(self.renames):
                (copied / target.relative_to(self._root)).rename(copied / source.relative_to(self._root))
                if before is not None:
                    (copied / target.relative_to(self._root)).write_bytes(before)

    def _copy(self, kind: str, manifests: int) -> Path:
        name = f"{len(self.log.operations):03d} {kind}"
        death = Death(self._into / name / self._root.name, manifests, max(self._made, default=-1))
        if self._root.exists():
            shutil.copytree(self._root, death.path)
        self.deaths.append(death)
        return death.path

    def _empty(self, copied: Path) -> None:
        for path in self.unsynced:
            inside = copied / path.relative_to(self._root)
            if inside.exists():
                inside.write_bytes(bytes(inside.stat().st_size // 2))


@contextmanager
def faulty(fault: Fault | None = None) -> Iterator[Log]:
    """Inside, dualform's disk is one with that fault."""
    bad = FaultyDisk(fault)
    with _replaced(bad):
        yield bad.log


@contextmanager
def dying(root: Path, into: Path, made: Sequence[int]) -> Iterator[list[Death]]:
    """Inside, every way to die is kept as a copy of the directory; `made` are the steps of the training so far."""
    bad = DyingDisk(root, into, made)
    with _replaced(bad):
        yield bad.deaths


@contextmanager
def _replaced(other: Disk) -> Iterator[None]:
    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(disk, name, getattr(other, name)))
        yield


def batch(step: int, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, inputs and labels; an example looks the same whenever it comes."""
    table = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.randint(EXAMPLES, (rows,), generator=torch.Generator().manual_seed(1000 + step))
    return ids, table[ids], ids % 4


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: dualform.Recorder | None = None,
    since: int = 0,
    until: int = STEPS,
    commits: Collection[int] = (),
    rows: int = 5,
) -> Iterator[int]:
    """Make the steps since+1…until; yields the number of each, before a commit that follows it."""
    dtype = next(model.parameters()).dtype
    for step in range(since + 1, until + 1):
        ids, x, y = batch(step, rows)
        with recorder.batch(ids) if recorder else nullcontext():
            F.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step
        if recorder and step in commits:
            recorder.commit()


def fresh(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, torch.optim.SGD]:
    """The run's model and optimiser before the first step."""
    model = network(dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@cache
def _checkpoints(until: int, rows: int, dtype: torch.dtype) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    model, optimizer = fresh(dtype)
    kept = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
    for _ in trained(model, optimizer, until=until, rows=rows):
        kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return kept


def loaded(step: int, rows: int = 5, dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, torch.optim.SGD]:
    """Model and optimiser from a checkpoint of a step."""
    model, optimizer = fresh(dtype)
    state, momenta = _checkpoints(max(step, STEPS), rows, dtype)[step]
    model.load_state_dict(state)
    optimizer.load_state_dict(copy.deepcopy(momenta))
    return model, optimizer


def distance(found: dict[str, Tensor], step: int, rows: int = 5) -> float:
    """How far these weights are from those after a step of a training that nobody recorded; 0 where to the bit."""
    true = _checkpoints(max(step, STEPS), rows, next(iter(found.values())).dtype)[step][0]
    assert found.keys() == true.keys()
    return max(float((found[name] - true[name]).abs().max()) for name in true)


def compiled(patch: pytest.MonkeyPatch, room: int = 64 << 10) -> None:
    """The loops from the first step on, and stretches of steps and an arena of so many bytes after it."""
    patch.setattr(swift, "PAYS", 0)
    patch.setattr(stepping, "CALM", 1)
    patch.setattr(writer, "COMMIT_BYTES", room)


def hooks_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """How many hooks are on a model's modules and parameters, and on optimisers."""
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    steps = sum(len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks) for o in optimizers)
    return modules + parameters + steps


def contents(memory: dualform.Memory) -> dict[str, Any]:
    """Everything that is the same in two memories of one run, however and how often it was interrupted."""
    found: dict[str, Any] = {}
    columns = ("keys", "gradients", "events", "steps", "backwards", "examples", "positions", "uses")
    for weight in range(len(memory.manifest.weights)):
        blocks = list(memory.blocks(weight, memory.steps))
        for name in columns:
            parts = [getattr(block, name) for block in blocks]
            if parts and parts[0] is not None:
                found[f"{name} of weight {weight}"] = torch.cat(parts).numpy()
        found[f"stored keys of weight {weight}"] = sum(one.keys[weight] for one in memory.manifest.segments)
    for name in ("optimizers", "settings", "flags", "remainders", "digests"):
        found[name] = getattr(memory.journal, name)
    if memory.initial(memory.manifest.parameters[0].name).dtype == torch.float32:
        # How many steps are judged together, which a resumed run does otherwise, is seen in the rounding of this.
        found["remainders"] = found["remainders"].round(6)
    found["passes"], found["scales"] = memory.journal._passes
    for record in memory.manifest.parameters:
        found[f"first {record.name}"] = memory.initial(record.name).numpy()
        final = memory.final(record.name)
        found[f"final {record.name}"] = None if final is None else final.numpy()
    for name in memory.columns:
        found[f"column {name}"] = memory.column(name).values.numpy()
    for name in ("steps", "examples", "positions", "nonfinite", "findings", "told", "failure"):
        found[name] = getattr(memory.manifest, name)
    return found


def differences(memory: dualform.Memory, expected: dict[str, Any]) -> list[str]:
    """In what a memory is not the expected one."""
    found = contents(memory)
    return [name for name in found.keys() | expected.keys() if not _equal(found.get(name), expected.get(name))]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def files(root: Path) -> dict[str, bytes]:
    """Every file below a directory and what is in it, but for the lock, which says who had it last."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith("lock"))
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}
