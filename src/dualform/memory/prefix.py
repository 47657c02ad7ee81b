"""The first steps of a memory as a memory of their own: where a run is resumed, or a damaged one is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dualform.memory.directory import segment_files
from dualform.memory.disk import disk
from dualform.memory.files import FINAL, Tensors, write_tensors
from dualform.memory.manifest import FORMAT, Manifest, SegmentRecord, write_manifest
from dualform.memory.mapped import TensorFile
from dualform.memory.segment import read_calls
from dualform.memory.stored import StoredMemory


def prefix(memory: StoredMemory, steps: int) -> Manifest:
    """The manifest of the first `steps` steps of a memory; nothing is written."""
    segments = [
        record if record.last_step <= steps else _cut(memory, file, record, steps)
        for file, record in memory.segments
        if record.first_step <= steps
    ]
    return dataclasses.replace(memory.manifest.shortened(segments), format=FORMAT)


def _cut(memory: StoredMemory, file: TensorFile, record: SegmentRecord, last: int) -> SegmentRecord:
    """A segment of which only the steps up to `last` are valid."""
    events: list[int] = []
    keys: list[int] = []
    for weight, recorded in enumerate(record.events):
        calls = read_calls(file, weight, 0, last)[0] if recorded else None
        events.append(0 if calls is None else int(calls[:, 3].sum()))
        numbers = f"w{weight}/numbers"
        if events[-1] and numbers in file:
            highest = int(file.read(numbers, 0, events[-1]).max())
            keys.append(max(highest + 1 - record.first_keys[weight], 0))
        else:
            keys.append(events[-1])
    valid = dataclasses.replace(record, last_step=last, events=tuple(events), keys=tuple(keys))
    return dataclasses.replace(valid, nonfinite=_nonfinite(memory, valid) if record.nonfinite else 0)


def _nonfinite(memory: StoredMemory, record: SegmentRecord) -> int:
    total = 0
    for weight in range(len(record.events)):
        for block in memory.blocks(weight, record.last_step, since=record.first_step - 1):
            bad = ~block.keys.isfinite().all(dim=1)
            if block.gradients is not None:
                bad |= ~block.gradients.isfinite().all(dim=1)
            total += int(bad.sum())
    return total


def drop_after(memory: StoredMemory, steps: int, weights: Tensors) -> StoredMemory:
    """Cut a memory after some steps, durably, and remove the segments that no manifest names any more.

    Inside a segment there are no sketches, so the weights as they are stand for the final ones until the next commit.
    """
    root: Path = memory.path
    manifest = dataclasses.replace(prefix(memory, steps), final=None, failure=None)
    if manifest != memory.manifest:
        write_manifest(root, manifest)
    if not memory.committed(steps):
        write_manifest(root, dataclasses.replace(manifest, final=write_tensors(root, FINAL, weights)))
    elif (root / FINAL).exists():
        disk.remove(root / FINAL)
    named = {root / record.file for record in manifest.files}
    for path in segment_files(root):
        if path not in named:
            disk.remove(path)
    return StoredMemory(root)
