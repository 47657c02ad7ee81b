"""The writer: collects whole steps and commits them as segments."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualform.errors import BadMemory, MemoryExists
from dualform.memory.files import FileRecord, sync_directory, write_tensors
from dualform.memory.journal import StepRow
from dualform.memory.manifest import (
    MANIFEST,
    Finding,
    Manifest,
    SegmentRecord,
    write_manifest,
)
from dualform.memory.segment import segment_tensors, sketch_tensors

COMMIT_BYTES = 128 << 20
COMMIT_SECONDS = 10.0


def prepare_directory(path: Path) -> None:
    """Make sure that recording may start in `path`: new, empty, or nothing was ever committed there."""
    if path.exists() and not path.is_dir():
        raise MemoryExists(f"{path} is a file; record() needs a directory that is new or empty.")
    if (path / MANIFEST).exists():
        raise MemoryExists(
            f"{path} already holds a memory. Choose another directory for this run, or delete that one first."
        )
    leftovers = {"segments", "examples", "derived", "initial.safetensors"}
    if path.exists():
        foreign = [item.name for item in path.iterdir() if item.name not in leftovers and item.suffix != ".tmp"]
        if foreign:
            raise MemoryExists(
                f"{path} is not empty (it holds {foreign[0]!r}, for one) and is not a memory. "
                "Choose a directory that is new or empty."
            )
    try:
        for part in ("segments", "examples"):
            (path / part).mkdir(parents=True, exist_ok=True)
        for leftover in (path / "examples").glob("*.safetensors"):
            leftover.unlink()  # a column of a run that never began
        sync_directory(path)
    except OSError as error:
        raise BadMemory(f"cannot make the directory {path}: {error.strerror}.") from error


class Writer:
    """Buffers steps and commits them: one rename of the manifest makes a segment part of the memory.

    A thread writes while training goes on. One commit is under way at a time: the next one waits for it, so that a
    disk slower than training slows training instead of filling the memory.
    """

    def __init__(
        self,
        path: Path,
        manifest: Callable[[FileRecord], Manifest],
        initial: Mapping[str, Tensor],
    ) -> None:
        self.path = path
        record = write_tensors(path, "initial.safetensors", {name: [t] for name, t in initial.items()})
        self.manifest = manifest(record)
        write_manifest(path, self.manifest)
        self._rows: list[StepRow] = []
        self._bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualform-writer")
        self._under_way: Future[None] | None = None
        self.waited = 0.0
        self._events = [0] * len(self.manifest.weights)
        self._last_commit = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether enough has gathered, or enough time has passed, for a commit."""
        waited = time.monotonic() - self._last_commit
        return bool(self._rows) and (self._bytes >= COMMIT_BYTES or waited >= COMMIT_SECONDS)

    def append(self, row: StepRow) -> None:
        """Take one finished step."""
        if self._under_way is not None and self._under_way.done():
            self._settle()
        self._rows.append(row)
        for calls in row.calls.values():
            for call in calls:
                self._bytes += call.keys.nbytes + call.gradients.nbytes + 2 * call.examples.nbytes

    def commit(
        self,
        sketches: Mapping[int, Tensor],
        hashes: Sequence[int],
        others: Mapping[str, Tensor],
        findings: Sequence[Finding],
        told: Sequence[str],
        wait: bool,
    ) -> None:
        """Commit every step so far, with the weights' sketches and hashes as they are now; durable after `wait`."""
        self._settle()
        rows, self._rows, self._bytes = self._rows, [], 0
        self._last_commit = time.monotonic()
        extra = sketch_tensors(sketches, hashes) | {f"other/{name}": [tensor] for name, tensor in others.items()}
        self._under_way = self._thread.submit(self._commit, rows, extra, tuple(findings), tuple(told))
        if wait:
            self._settle()

    def _settle(self) -> None:
        """Wait for the commit under way; what failed in it is raised here, in the training thread."""
        if self._under_way is not None:
            start = time.monotonic()
            under_way, self._under_way = self._under_way, None
            under_way.result()
            self.waited += time.monotonic() - start

    def _commit(
        self,
        rows: list[StepRow],
        extra: dict[str, list[Tensor]],
        findings: tuple[Finding, ...],
        told: tuple[str, ...],
    ) -> None:
        manifest = dataclasses.replace(self.manifest, findings=findings, told=told)
        if rows:
            manifest = self._write_segment(manifest, rows, extra)
        if manifest != self.manifest:
            write_manifest(self.path, manifest)
            self.manifest = manifest

    def _write_segment(self, manifest: Manifest, rows: list[StepRow], extra: dict[str, list[Tensor]]) -> Manifest:
        first_step = manifest.steps + 1
        weights = len(manifest.weights)
        tensors = segment_tensors(rows, first_step, weights, manifest.keep == "all", manifest.every_step) | extra
        name = f"segments/r000-{len(manifest.segments):06d}.safetensors"
        record = write_tensors(self.path, name, tensors)
        calls = [call for row in rows for group in row.calls.values() for call in group if len(call.keys)]
        events = tuple(
            sum(len(call.keys) for row in rows for call in row.calls.get(weight, [])) for weight in range(weights)
        )
        segment = SegmentRecord(record, first_step, first_step + len(rows) - 1, tuple(self._events), events)
        self._events = [before + new for before, new in zip(self._events, events, strict=True)]
        return dataclasses.replace(
            manifest,
            steps=segment.last_step,
            segments=(*manifest.segments, segment),
            examples=max([manifest.examples, *(int(call.examples.max()) + 1 for call in calls)]),
            positions=max([manifest.positions, *(int(call.positions.max()) + 1 for call in calls)]),
            nonfinite=manifest.nonfinite + sum(_nonfinite(call.keys, call.gradients) for call in calls),
        )

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Store the weights as they are at the end of recording."""
        self._settle()
        record = write_tensors(self.path, "final.safetensors", {name: [t] for name, t in final.items()})
        self.manifest = dataclasses.replace(self.manifest, final=record)
        write_manifest(self.path, self.manifest)
        self._thread.shutdown()

    def fail(self, reason: str) -> None:
        """Say in the manifest why recording stopped before the training did."""
        with contextlib.suppress(Exception):
            self._settle()
        self._thread.shutdown()
        self.manifest = dataclasses.replace(self.manifest, failure=reason)
        write_manifest(self.path, self.manifest)


def _nonfinite(*tensors: Tensor) -> int:
    """How many rows of these tensors hold a NaN or an infinity; a sum is finite where all its terms are."""
    # By numpy, which keeps to this thread: torch would call up the cores that are training.
    plain = [tensor.numpy() for tensor in tensors if tensor.dtype in (torch.float32, torch.float64)]
    with np.errstate(over="ignore", invalid="ignore"):
        if len(plain) == len(tensors) and all(np.isfinite(array.sum()) for array in plain):
            return 0
    bad = [~tensor.isfinite().all(dim=1) for tensor in tensors]
    return int((bad[0] | bad[1]).sum())
