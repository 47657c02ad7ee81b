"""The writer: collects whole steps and commits them as segments."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
    """Buffers steps and commits them: one rename of the manifest makes a segment part of the memory."""

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
        self._events = [0] * len(self.manifest.weights)
        self._last_commit = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether enough has gathered, or enough time has passed, for a commit."""
        waited = time.monotonic() - self._last_commit
        return bool(self._rows) and (self._bytes >= COMMIT_BYTES or waited >= COMMIT_SECONDS)

    def append(self, row: StepRow) -> None:
        """Take one finished step."""
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
    ) -> None:
        """Make every step so far durable, with the weights' sketches and hashes as they are now."""
        manifest = dataclasses.replace(self.manifest, findings=tuple(findings), told=tuple(told))
        if self._rows:
            manifest = self._write_segment(manifest, sketches, hashes, others)
        if manifest != self.manifest:
            write_manifest(self.path, manifest)
            self.manifest = manifest
        self._rows, self._bytes = [], 0
        self._last_commit = time.monotonic()

    def _write_segment(
        self,
        manifest: Manifest,
        sketches: Mapping[int, Tensor],
        hashes: Sequence[int],
        others: Mapping[str, Tensor],
    ) -> Manifest:
        first_step = manifest.steps + 1
        weights = len(manifest.weights)
        tensors = segment_tensors(
            self._rows, first_step, weights, manifest.keep == "all", manifest.every_step
        ) | sketch_tensors(sketches, hashes)
        for name in manifest.at_commits:
            tensors[f"other/{name}"] = [others[name]]
        name = f"segments/r000-{len(manifest.segments):06d}.safetensors"
        record = write_tensors(self.path, name, tensors)
        calls = [call for row in self._rows for group in row.calls.values() for call in group if len(call.keys)]
        events = tuple(
            sum(len(call.keys) for row in self._rows for call in row.calls.get(weight, [])) for weight in range(weights)
        )
        segment = SegmentRecord(record, first_step, first_step + len(self._rows) - 1, tuple(self._events), events)
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
        record = write_tensors(self.path, "final.safetensors", {name: [t] for name, t in final.items()})
        self.manifest = dataclasses.replace(self.manifest, final=record)
        write_manifest(self.path, self.manifest)

    def fail(self, reason: str) -> None:
        """Say in the manifest why recording stopped before the training did."""
        self.manifest = dataclasses.replace(self.manifest, failure=reason)
        write_manifest(self.path, self.manifest)


def _nonfinite(*tensors: Tensor) -> int:
    """How many rows of these tensors hold a NaN or an infinity; a sum is finite where all its terms are."""
    if all(bool(tensor.sum(dtype=tensor.dtype).isfinite()) for tensor in tensors):
        return 0
    bad = [~tensor.isfinite().all(dim=1) for tensor in tensors]
    return int((bad[0] | bad[1]).sum())
