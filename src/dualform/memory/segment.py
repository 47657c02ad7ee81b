"""One segment: whole steps of all weights, with their journal rows, in one immutable file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.memory.journal import Call, StepRows, journal_tensors
from dualform.memory.manifest import SegmentRecord
from dualform.memory.mapped import TensorFile

Gather = Callable[[int, Int64[Tensor, " events"]], Tensor]
"""Keys of a weight by the numbers under which they are stored, in whatever segments those are."""


class Entries:
    """The calls of one weight as a segment stores them: its new `keys`, and under which of the `numbers` each is."""

    def __init__(self, calls: Sequence[tuple[int, Call]]) -> None:
        self.calls = [call for _, call in calls]
        self.counts = [count for step, call in calls for count in call.counts(step)]
        self.keys: list[Tensor] = [call.keys for call in self.calls]
        self.examples = _joined([call.examples for call in self.calls])
        self.positions = _joined([call.positions for call in self.calls])
        self.numbers = np.zeros(0, dtype=np.int64)


def segment_tensors(
    rows: Sequence[StepRows], entries: Sequence[Entries], first_step: int, every_step: Sequence[str]
) -> dict[str, Sequence[Tensor]]:
    """Everything a segment holds of some steps, each tensor in parts that are written one after another."""
    tensors: dict[str, Sequence[Tensor]] = {}
    for weight, entered in enumerate(entries):
        if entered.calls:
            tensors |= _weight_tensors(f"w{weight}", entered)
    for name in every_step:
        tensors[f"other/{name}"] = [torch.stack([other[name] for each in rows for other in each.others])]
    return tensors | journal_tensors(rows, first_step)


def _weight_tensors(prefix: str, entries: Entries) -> dict[str, Sequence[Tensor]]:
    tensors: dict[str, Sequence[Tensor]] = {f"{prefix}/keys": _one_dtype(entries.keys)}
    gradients = [call.gradients for call in entries.calls if call.gradients is not None]
    if gradients:
        tensors[f"{prefix}/gradients"] = _one_dtype(gradients)
    numbers = {"examples": entries.examples, "calls": np.array(entries.counts, dtype=np.int64)}
    if sum(len(part) for part in entries.keys) < len(entries.numbers):
        numbers["numbers"] = entries.numbers
    if entries.positions.any():
        numbers["positions"] = entries.positions
    return tensors | {f"{prefix}/{name}": [torch.from_numpy(array)] for name, array in numbers.items()}


def _joined(parts: Sequence[Tensor]) -> Int64[np.ndarray, " events"]:
    return np.concatenate([part.numpy() for part in parts]) if parts else np.zeros(0, dtype=np.int64)


def _one_dtype(parts: list[Tensor]) -> list[Tensor]:
    """Parts of one tensor in their widest dtype: autocast may have been on for some steps only."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return parts
    widest = reduce(torch.promote_types, dtypes)
    return [part.to(widest) for part in parts]


def sketch_tensors(
    sketches: Mapping[int, Tensor], velocities: Mapping[int, Tensor], hashes: Sequence[int]
) -> dict[str, Sequence[Tensor]]:
    """The sketches W @ R and v @ R and the hashes of all parameters at a segment's last step."""
    tensors = {f"sketch/{parameter}": [sketch] for parameter, sketch in sketches.items()}
    tensors |= {f"velocity_sketch/{parameter}": [sketch] for parameter, sketch in velocities.items()}
    return {**tensors, "hashes": [torch.tensor(list(hashes), dtype=torch.int64)]}


def read_calls(file: TensorFile, weight: int, since: int, until: int) -> tuple[Int64[Tensor, "calls 4"], int]:
    """Step, backward, use and events of the calls of steps since+1…until, and how many events come before them."""
    calls = file.read(f"w{weight}/calls")
    before = int(calls[calls[:, 0] <= since, 3].sum())
    return calls[(calls[:, 0] > since) & (calls[:, 0] <= until)], before


def read_numbers(file: TensorFile, record: SegmentRecord, weight: int) -> tuple[Block, Int64[Tensor, " events"]]:
    """The events of one weight in one segment without keys and gradients, and the numbers of their keys."""
    prefix, events = f"w{weight}", record.events[weight]
    calls, _ = read_calls(file, weight, 0, record.last_step)
    steps, backwards, uses = torch.repeat_interleave(calls[:, :3], calls[:, 3], dim=0).unbind(1)
    positions, numbers = f"{prefix}/positions", f"{prefix}/numbers"
    block = Block(
        keys=torch.empty(events, 0),
        gradients=None,
        events=torch.arange(events) + record.first_events[weight],
        steps=steps,
        backwards=backwards,
        examples=file.read(f"{prefix}/examples", 0, events).clone(),
        positions=file.read(positions, 0, events).clone() if positions in file else torch.zeros_like(steps),
        uses=uses,
    )
    if numbers in file:
        return block, file.read(numbers, 0, events).clone()
    return block, torch.arange(events) + record.first_keys[weight]


def read_blocks(
    file: TensorFile,
    record: SegmentRecord,
    weight: int,
    since: int,
    until: int,
    rows: int,
    stretch: int,
    gather: Gather,
    everywhere: bool = False,
) -> Iterator[Block]:
    """The events of one weight in one segment of steps since+1…until, at most `rows` at a time.

    `gather` makes keys of their numbers where a segment has numbers; `everywhere`: also where it has the keys.

    The file is read, and mapped, a `stretch` of events at a time, since a few large windows cost less than many.
    """
    if record.events[weight] == 0:
        return
    prefix = f"w{weight}"
    calls, before = read_calls(file, weight, since, min(until, record.last_step))
    ends = calls[:, 3].cumsum(0)
    events = int(ends[-1]) if len(ends) else 0
    shared = f"{prefix}/numbers" in file
    for at in range(0, events, stretch):
        end = min(at + stretch, events)
        counts = (ends.clamp_max(end) - (ends - calls[:, 3]).clamp_min(at)).clamp_min(0)
        per_event = torch.repeat_interleave(calls[:, :3], counts, dim=0)
        begin, stop = before + at, before + end
        if shared or not everywhere:
            keys = file.read(f"{prefix}/numbers" if shared else f"{prefix}/keys", begin, stop)
        else:
            keys = torch.arange(begin, stop) + record.first_keys[weight]
        examples = file.read(f"{prefix}/examples", begin, stop)
        gradients, positions = (
            file.read(name, begin, stop) if name in file else None
            for name in (f"{prefix}/gradients", f"{prefix}/positions")
        )
        numbers = torch.arange(begin, stop) + record.first_events[weight]
        for start in range(0, end - at, rows):
            part = slice(start, start + rows)
            steps, backwards, uses = per_event[part].unbind(1)
            yield Block(
                keys=gather(weight, keys[part]) if shared or everywhere else keys[part],
                gradients=None if gradients is None else gradients[part],
                events=numbers[part],
                steps=steps,
                backwards=backwards,
                examples=examples[part],
                positions=torch.zeros_like(steps) if positions is None else positions[part],
                uses=uses,
            )
