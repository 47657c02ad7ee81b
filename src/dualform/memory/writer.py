"""The writer: collects whole steps and commits them as segments, while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dualform.errors import RecordingFailed
from dualform.fast import work_alone
from dualform.memory.arena import Shape, Staging
from dualform.memory.blocksums import BlockSums
from dualform.memory.directory import SEGMENT, next_segment
from dualform.memory.files import FINAL, Tensors, write_tensors
from dualform.memory.journal import Call, StepRows
from dualform.memory.ledger import Ledger, is_hashed
from dualform.memory.manifest import Finding, Manifest, SegmentRecord, write_manifest
from dualform.memory.segment import Entries, segment_tensors

COMMIT_BYTES = 128 << 20
COMMIT_SECONDS = 10.0
LARGEST_ARENA = 1 << 30  # a single step beyond this is copied to memory made for it
STRETCHES, LARGE = 8, 1 << 20  # of rows, up to which they are written from where they are; bytes from which on


@dataclass
class _Gathered:
    """The steps since the last commit, and the calls of each weight with their steps."""

    rows: list[StepRows] = field(default_factory=list)
    steps: int = 0
    calls: dict[int, list[tuple[int, Call]]] = field(default_factory=dict)
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
        self.broken = False
        self._ledgers = ledgers
        self.staging = Staging()
        self._gathered = _Gathered()
        self._steps = self._committed = manifest.steps
        self._number = next_segment(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dualform-writer", initializer=_step_back)
        self._under_way: Future[None] | None = None
        self._last_commit = time.monotonic()

    def due(self, steps: int) -> bool:
        """Whether enough has gathered, or enough time has passed, for a commit after so many steps."""
        if max(self._gathered.bytes, self.staging.bytes) >= COMMIT_BYTES:
            return True
        return steps > self._committed and time.monotonic() - self._last_commit >= COMMIT_SECONDS

    @property
    def steps(self) -> int:
        """The steps that it was given, those of an earlier recording included."""
        return self._steps

    @property
    def gathered(self) -> int:
        """The bytes that have gathered since the last commit."""
        return self._gathered.bytes

    def append(self, rows: StepRows) -> None:
        """Take finished steps."""
        if self._under_way is not None and self._under_way.done():
            self._settle()
        self.staging.wait()
        gathered, first = self._gathered, self._steps + 1
        gathered.rows.append(rows)
        gathered.steps += len(rows)
        for weight, calls in rows.calls.items():
            gathered.calls.setdefault(weight, []).extend((first, call) for call in calls)
            gathered.bytes += sum(call.bytes for call in calls)
        self._steps += len(rows)  # at last: it tells a part that an interrupt cut off
        if not self.staging.ready and gathered.bytes >= COMMIT_BYTES // 32:
            self._make_arenas()  # a run that small needs none

    def _make_arenas(self) -> None:
        """Room for as many steps like those so far as one commit takes."""
        gathered = self._gathered
        share = COMMIT_BYTES / gathered.bytes + 2 / gathered.steps
        shapes: dict[str, Shape] = {}
        for weight, calls in gathered.calls.items():
            for part in ("keys", "gradients"):
                tensors = [tensor for _, call in calls if (tensor := getattr(call, part)) is not None]
                if tensors:
                    rows = int(sum(len(tensor) for tensor in tensors) * share) + 1
                    shapes[f"w{weight}/{part}"] = Shape(rows, tensors[0].shape[1], tensors[0].dtype)
                    if part == "keys" and is_hashed(tensors[0].shape[1], tensors[0].dtype):
                        shapes[f"w{weight}/hashes"] = Shape(rows, 2, torch.int64)
        if sum(shape.bytes for shape in shapes.values()) <= LARGEST_ARENA:
            self.staging.make(shapes)

    def commit(self, extra: Tensors, findings: Sequence[Finding], told: Sequence[str], wait: bool) -> None:
        """Commit every step so far, with what `extra` says of the weights as they are now; durable after `wait`."""
        self._settle()
        if self.broken:
            raise RecordingFailed("an interrupt came while a commit began, and some finished steps are lost")
        self.broken = True  # until all is in the thread's hands
        gathered, self._gathered = self._gathered, _Gathered()
        sums = self.staging.turn()
        self._last_commit = time.monotonic()
        self._committed = self._steps
        of_run = extra, tuple(findings), tuple(told)
        self._under_way = self._thread.submit(self._commit, gathered, self._steps, *of_run, sums)
        self.broken = False
        if wait:
            self._settle()

    def _settle(self) -> None:
        """Wait for the commit under way; what failed in it is raised here, in the training thread."""
        if self._under_way is None:
            return
        start = time.monotonic()
        try:
            self._under_way.result()
        except BaseException:
            if self._under_way.done():  # and not only the waiting for it was interrupted
                self.broken = self._under_way.exception() is not None  # then no later steps may follow
                self._under_way = None
            raise
        self._under_way = None
        self.waited += time.monotonic() - start

    def _commit(
        self,
        gathered: _Gathered,
        steps: int,
        extra: Tensors,
        findings: tuple[Finding, ...],
        told: tuple[str, ...],
        sums: BlockSums | None,
    ) -> None:
        manifest = dataclasses.replace(self.manifest, findings=findings, told=told)
        if manifest.steps + gathered.steps != steps:
            raise RecordingFailed(
                f"{gathered.steps} steps were gathered after step {manifest.steps}, up to step {steps}"
            )
        if gathered.rows:
            manifest = self._write_segment(manifest, gathered, extra, sums)
        if manifest != self.manifest:
            write_manifest(self.path, manifest)
            self.manifest = manifest

    def _write_segment(
        self, manifest: Manifest, gathered: _Gathered, extra: Tensors, sums: BlockSums | None
    ) -> Manifest:
        first, last = manifest.steps + 1, manifest.steps + gathered.steps
        entries = [self._enter(at, gathered.calls.get(at, [])) for at in range(len(manifest.weights))]
        tensors = {**segment_tensors(gathered.rows, entries, first, manifest.every_step), **extra}
        record = write_tensors(self.path, SEGMENT.format(self._number), tensors, paged=True, sums=sums)
        self._number += 1
        before = manifest.segments[-1] if manifest.segments else None
        segment = SegmentRecord(
            file=record,
            first_step=first,
            last_step=last,
            first_events=before.next_events if before else (0,) * len(entries),
            events=tuple(len(entered.numbers) for entered in entries),
            first_keys=before.next_keys if before else (0,) * len(entries),
            keys=tuple(sum(len(part) for part in entered.keys) for entered in entries),
            sketched=last,
            nonfinite=sum(call.nonfinite for entered in entries for call in entered.calls),
        )
        return dataclasses.replace(
            manifest,
            steps=last,
            final=None,
            segments=(*manifest.segments, segment),
            examples=max([manifest.examples, *(int(e.examples.max(initial=-1)) + 1 for e in entries)]),
            positions=max([manifest.positions, *(int(e.positions.max(initial=-1)) + 1 for e in entries)]),
        )

    def _enter(self, weight: int, calls: Sequence[tuple[int, Call]]) -> Entries:
        """Number the keys of some calls of a weight, and leave out those that are stored already."""
        ledger = self._ledgers[weight]
        entries = Entries(calls)
        if not calls or not all(call.fixed for call in entries.calls):
            entries.numbers = ledger.append(len(entries.examples))
            return entries
        new, entries.numbers = ledger.enter(
            entries.keys, entries.examples, entries.positions, [call.hashes for call in entries.calls]
        )
        if not new.all():
            masks = np.split(new, np.cumsum([len(part) for part in entries.keys])[:-1])
            chosen = [_chosen(part, mask) for part, mask in zip(entries.keys, masks, strict=True)]
            entries.keys = list(itertools.chain.from_iterable(chosen)) or [entries.keys[0][:0]]
        return entries

    def close(self, final: Tensors) -> None:
        """Store the weights as they are at the end of recording."""
        self._settle()
        record = write_tensors(self.path, FINAL, final)
        manifest = dataclasses.replace(self.manifest, final=record)
        write_manifest(self.path, manifest)
        self.manifest = manifest
        self._thread.shutdown()

    def stop(self) -> int:
        """Let the commit under way end, however it ends, and make no other; how many steps are committed."""
        with contextlib.suppress(Exception):
            self._settle()
        self._thread.shutdown()
        return self.manifest.steps

    def fail(self, reason: str) -> None:
        """Say in the manifest why recording stopped before the training did."""
        manifest = dataclasses.replace(self.manifest, failure=reason)
        write_manifest(self.path, manifest)
        self.manifest = manifest


def _chosen(rows: Tensor, mask: Bool[np.ndarray, " rows"]) -> list[Tensor]:
    """Some of these rows: without a copy where that is large, and they are a few stretches, as when an epoch ends."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    if len(edges) > 2 * STRETCHES or rows.nbytes < LARGE:
        return [rows[torch.from_numpy(mask)]] if edges else []
    return [rows[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _step_back() -> None:
    """Let the threads that train go first: a product that waits for one of its threads waits with all of them."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
    # Torch's work here must make no threads of its own: with more of them than cores, those that train would no longer
    # wait awake for each other, but sleep, and be woken some ninety times a step.
    work_alone()
