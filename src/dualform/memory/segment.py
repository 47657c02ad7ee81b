"""One segment: whole steps of all weights, with their journal rows, in one immutable file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from dualform.blocks import Block
from dualform.memory.files import TensorFile
from dualform.memory.journal import Call, StepRow, journal_tensors
from dualform.memory.manifest import SegmentRecord


def segment_tensors(
    rows: Sequence[StepRow], first_step: int, weights: int, values: bool, every_step: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Everything a segment holds of some steps, each tensor in parts that are written one after another."""
    tensors = journal_tensors(rows, first_step)
    for weight in range(weights):
        calls = [(call, first_step + at) for at, row in enumerate(rows) for call in row.calls.get(weight, [])]
        if calls:
            tensors |= _weight_tensors(f"w{weight}", calls, values)
    for name in every_step:
        tensors[f"other/{name}"] = [torch.stack([row.others[name] for row in rows])]
    return tensors


def _weight_tensors(prefix: str, calls: Sequence[tuple[Call, int]], values: bool) -> dict[str, list[Tensor]]:
    numbers = [(step, call.backward, call.use, len(call.keys)) for call, step in calls]
    tensors = {
        f"{prefix}/keys": _one_dtype([call.keys for call, _ in calls]),
        f"{prefix}/examples": [call.examples for call, _ in calls],
        f"{prefix}/calls": [torch.tensor(numbers, dtype=torch.int64)],
    }
    if values:
        tensors[f"{prefix}/gradients"] = _one_dtype([call.gradients for call, _ in calls])
    if any(bool(call.positions.any()) for call, _ in calls):
        tensors[f"{prefix}/positions"] = [call.positions for call, _ in calls]
    return tensors


def _one_dtype(parts: list[Tensor]) -> list[Tensor]:
    """Parts of one tensor in their widest dtype: autocast may have been on for some steps only."""
    widest = reduce(torch.promote_types, {part.dtype for part in parts})
    return [part.to(widest) for part in parts]


def sketch_tensors(sketches: Mapping[int, Tensor], hashes: Sequence[int]) -> dict[str, list[Tensor]]:
    """The sketches W @ R and the hashes of all parameters at a segment's last step."""
    tensors = {f"sketch/{parameter}": [sketch] for parameter, sketch in sketches.items()}
    return {**tensors, "hashes": [torch.tensor(list(hashes), dtype=torch.int64)]}


def read_blocks(file: TensorFile, record: SegmentRecord, weight: int, until: int, rows: int) -> Iterator[Block]:
    """The events of one weight in one segment up to step `until`, at most `rows` at a time."""
    if record.events[weight] == 0:
        return
    prefix = f"w{weight}"
    calls = file.read(f"{prefix}/calls")
    calls = calls[calls[:, 0] <= until]
    per_event = torch.repeat_interleave(calls[:, :3], calls[:, 3], dim=0)
    for start in range(0, len(per_event), rows):
        stop = min(start + rows, len(per_event))
        steps, backwards, uses = per_event[start:stop].unbind(1)
        gradients = f"{prefix}/gradients"
        positions = f"{prefix}/positions"
        yield Block(
            keys=file.read(f"{prefix}/keys", start, stop),
            gradients=file.read(gradients, start, stop) if gradients in file else None,
            events=torch.arange(start, stop) + record.first_events[weight],
            steps=steps,
            backwards=backwards,
            examples=file.read(f"{prefix}/examples", start, stop),
            positions=file.read(positions, start, stop) if positions in file else torch.zeros_like(steps),
            uses=uses,
        )
