"""The writer: collects whole steps and commits them as segments, while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dualform.memory.arena import Shape, Staging
from dualform.memory.directory import SEGMENT, next_segment
from dualform.memory.files import Tensors, write_tensors
from dualform.memory.journal import Call, StepRow
from dualform.memory.ledger import Ledger
from dualform.memory.manifest import Finding, Manifest, SegmentRecord, write_manifest
from dualform.memory.segment import Entry, segment_tensors

COMMIT_BYTES = 128 << 20
COMMIT_SECONDS = 10.0
LARGEST_ARENA = 1 << 30  # a single step beyond this is copied to memory made for it


@dataclass
class _Gathered:
    """The steps since the last commit."""

    rows: list[StepRow] = field(default_factory=list)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    bytes: int = 0


class Writer:
    """Gathers steps and commits them: one rename of the manifest makes a segment part of the memory.

    A thread writes one arena while training fills the other. One commit is under way at a time: the next one waits
    for it, so that a disk slower than training slows training instead of filling the memory.
    """

    def __init__(self, path: Path, manifest: Manifest, ledgers: Sequence[Ledger]) -> None:
        self.path = path
        self.manifest = manifest
        self.waited = 0.0
        self._ledgers = ledgers
        self._staging = Staging()
        self._gathered = _Gathered()
        self._steps = manifest.steps
        self._number = next_segment(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualform-writer")
        self._under_way: Future[None] | None = None
        self._last_commit = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether enough has gathered, or enough time has passed, for a commit."""
        waited = time.monotonic() - self._last_commit
        return bool(self._gathered.rows) and (self._gathered.bytes >= COMMIT_BYTES or waited >= COMMIT_SECONDS)

    @property
    def gathered(self) -> int:
        """The bytes that the next commit will write."""
        return self._gathered.bytes

    def hold(self, weight: int, part: str, rows: Tensor) -> Tensor:
        """A copy of keys or gradients of a weight, where the next commit can write them from."""
        return self._staging.hold(f"w{weight}/{part}", rows)

    def append(self, row: StepRow) -> None:
        """Take one finished step."""
        if self._under_way is not None and self._under_way.done():
            self._settle()
        self._staging.wait()
        self._steps += 1
        gathered = self._gathered
        for weight, calls in row.calls.items():
            entered = gathered.entries.setdefault(weight, [])
            for call in calls:
                entry = self._enter(weight, call)
                entered.append(entry)
                gathered.bytes += entry.keys.nbytes + 2 * call.examples.nbytes
                gathered.bytes += 0 if call.gradients is None else call.gradients.nbytes
        gathered.rows.append(row)
        if not self._staging.ready and gathered.bytes >= COMMIT_BYTES // 32:
            self._make_arenas()  # a run that small needs none

    def _enter(self, weight: int, call: Call) -> Entry:
        """Number the keys of a call, and leave out those that are stored already."""
        ledger = self._ledgers[weight]
        if not call.fixed:
            return Entry(self._steps, call, call.keys, ledger.append(len(call.keys)))
        new, numbers = ledger.enter(call.keys, call.examples.numpy(), call.positions.numpy())
        if new.all():
            return Entry(self._steps, call, call.keys, numbers)
        keys = call.keys[torch.from_numpy(new)]
        self._staging.release(f"w{weight}/keys", call.keys)
        return Entry(self._steps, call, keys, numbers)

    def _make_arenas(self) -> None:
        """Room for as many steps like those so far as one commit takes."""
        gathered = self._gathered
        steps = COMMIT_BYTES // max(gathered.bytes, 1) * len(gathered.rows) + 2
        shapes: dict[str, Shape] = {}
        for weight, entries in gathered.entries.items():
            for part in ("keys", "gradients"):
                tensors = [tensor for entry in entries if (tensor := getattr(entry.call, part)) is not None]
                if tensors:
                    rows = -(-sum(len(tensor) for tensor in tensors) // len(gathered.rows))
                    shapes[f"w{weight}/{part}"] = Shape(rows * steps, tensors[0].shape[1], tensors[0].dtype)
        if sum(shape.bytes for shape in shapes.values()) <= LARGEST_ARENA:
            self._staging.make(shapes)

    def commit(self, extra: Tensors, findings: Sequence[Finding], told: Sequence[str], wait: bool) -> None:
        """Commit every step so far, with what `extra` says of the weights as they are now; durable after `wait`."""
        self._settle()
        gathered, self._gathered = self._gathered, _Gathered()
        self._staging.turn()
        self._last_commit = time.monotonic()
        self._under_way = self._thread.submit(self._commit, gathered, extra, tuple(findings), tuple(told))
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
        self, gathered: _Gathered, extra: Tensors, findings: tuple[Finding, ...], told: tuple[str, ...]
    ) -> None:
        manifest = dataclasses.replace(self.manifest, findings=findings, told=told)
        if gathered.rows:
            manifest = self._write_segment(manifest, gathered, extra)
        if manifest != self.manifest:
            write_manifest(self.path, manifest)
            self.manifest = manifest

    def _write_segment(self, manifest: Manifest, gathered: _Gathered, extra: Tensors) -> Manifest:
        first, last = manifest.steps + 1, manifest.steps + len(gathered.rows)
        tensors = {**segment_tensors(gathered.rows, gathered.entries, first, manifest.every_step), **extra}
        record = write_tensors(self.path, SEGMENT.format(self._number), tensors, paged=True)
        self._number += 1
        entries = [gathered.entries.get(weight, []) for weight in range(len(manifest.weights))]
        calls = [entry.call for entered in entries for entry in entered if len(entry.numbers)]
        before = manifest.segments[-1] if manifest.segments else None
        segment = SegmentRecord(
            file=record,
            first_step=first,
            last_step=last,
            first_events=before.next_events if before else (0,) * len(entries),
            events=tuple(sum(len(entry.numbers) for entry in entered) for entered in entries),
            first_keys=before.next_keys if before else (0,) * len(entries),
            keys=tuple(sum(len(entry.keys) for entry in entered) for entered in entries),
            sketched=last,
            nonfinite=sum(call.nonfinite for call in calls),
        )
        return dataclasses.replace(
            manifest,
            steps=last,
            segments=(*manifest.segments, segment),
            examples=max([manifest.examples, *(int(call.examples.numpy().max()) + 1 for call in calls)]),
            positions=max([manifest.positions, *(int(call.positions.numpy().max()) + 1 for call in calls)]),
        )

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Store the weights as they are at the end of recording."""
        self._settle()
        record = write_tensors(self.path, "final.safetensors", {name: [t] for name, t in final.items()})
        manifest = dataclasses.replace(self.manifest, final=record)
        write_manifest(self.path, manifest)
        self.manifest = manifest
        self._thread.shutdown()

    def fail(self, reason: str) -> None:
        """Say in the manifest why recording stopped before the training did."""
        with contextlib.suppress(Exception):
            self._settle()
        self._thread.shutdown()
        manifest = dataclasses.replace(self.manifest, failure=reason)
        write_manifest(self.path, manifest)
        self.manifest = manifest
