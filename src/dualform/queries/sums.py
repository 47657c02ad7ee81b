"""Key sums per example: Σ x_t over the events of every example, from which the totals of any grouping of examples come.

A derived part, in derived/sums: made at first use, extended where the memory grew, made anew where it is damaged or of
another run. Deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field

import torch
import xxhash
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import DamagedMemory
from dualform.memory import StoredMemory
from dualform.memory.derived import SUMS
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.memory.segment import read_numbers
from dualform.queries.linear import Rows, Summed
from dualform.queries.selection import Grouping, Selection

logger = logging.getLogger("dualform")
SMALL = 16 << 20  # bytes of keys below which summing again is as fast as reading a file
AT_ONCE = 32 << 20  # bytes of sums


@dataclass(frozen=True)
class ExampleSums:
    """Σ x_t and the number of events of every example; the last row is of the events without one.

    `finite` says that every sum is, `nonnegative` that every key is finite and at least 0.
    """

    sums: Float64[Tensor, "examples_and_one dim_in"]
    counts: Int64[Tensor, " examples_and_one"]
    finite: bool
    nonnegative: bool
    _last: list[tuple[Int64[Tensor, " examples_and_one"], Summed]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.counts)

    def chosen(self, selection: Selection) -> Bool[Tensor, " examples"]:
        """Which examples have events and are selected; the selection must not look at anything else of an event."""
        return selection.holds(one_event_each(len(self) - 1))[:-1] & (self.counts[:-1] > 0)

    def grouped(self, selection: Selection, grouping: Grouping) -> Summed:
        """The sums of groups of examples; selection and grouping must not look at anything else of an event."""
        examples = len(self) - 1
        block = one_event_each(examples)
        codes = torch.where(selection.holds(block), grouping.codes(block), -1)
        if len(grouping.groups) == examples and codes.equal(block.examples):
            return Summed(codes[:-1], self.sums[:-1], self.counts[:-1], self.finite, self.nonnegative)
        for known, summed in self._last:
            if known.equal(codes) and len(summed.counts) == len(grouping.groups):
                return summed
        summed = self._summed(codes, len(grouping.groups))
        if 8 * len(summed.groups) <= len(self):
            self._last[:] = [(codes, summed)]
        return summed

    def _summed(self, codes: Int64[Tensor, " examples_and_one"], groups: int) -> Summed:
        rows = Rows(groups, self.sums.shape[1], len(self))
        counts = torch.zeros(groups, dtype=torch.int64)
        chosen = ((codes >= 0) & (self.counts > 0)).nonzero()[:, 0]
        for some in chosen.split(max(AT_ONCE // (8 * self.sums.shape[1]), 1)):
            rows.add(codes[some], self.sums[some])
            counts.index_add_(0, codes[some], self.counts[some])
        return Summed(rows.groups, rows.sums, counts, bool(rows.sums.isfinite().all()), self.nonnegative)


def one_event_each(examples: int) -> Block:
    """A block with one event of every example and one without, for what looks at nothing else of an event."""
    numbers = torch.arange(examples + 1)
    zeros = torch.zeros_like(numbers)
    return Block(
        keys=torch.empty(len(numbers), 0),
        gradients=None,
        events=numbers,
        steps=zeros,
        backwards=zeros,
        examples=numbers.where(numbers < examples, -1),
        positions=zeros,
        uses=zeros,
    )


def example_sums(memory: StoredMemory, weight: int) -> ExampleSums | None:
    """The key sums per example of a weight, made where they are missing; None where they would be too large."""
    if not has_example_sums(memory, weight):
        return None
    return memory.room.get(("sums", weight), lambda: _brought_up_to_date(memory, weight), lambda made: made.sums.nbytes)


def has_example_sums(memory: StoredMemory, weight: int) -> bool:
    """Whether sums per example are worth their room: at most half of the keys, and half of what may be resident."""
    size = 8 * (memory.manifest.examples + 1) * memory.manifest.weights[weight].dim_in
    return size <= min(_key_bytes(memory, weight), memory.resident) // 2


def _key_bytes(memory: StoredMemory, weight: int) -> int:
    name, dim_in = f"w{weight}/keys", memory.manifest.weights[weight].dim_in
    there = ((file, record.keys[weight]) for file, record in memory.segments if record.keys[weight])
    return sum(keys * dim_in * file.dtype(name).itemsize for file, keys in there)


def _brought_up_to_date(memory: StoredMemory, weight: int) -> ExampleSums:
    kept, covered = _read(memory, weight)
    if kept is not None and covered == len(memory.manifest.segments):
        return kept
    made = _extended(memory, weight, kept, covered)
    if _key_bytes(memory, weight) < SMALL:
        return made
    _keep(memory, weight, made)
    # From the file, whose pages the system can take back.
    kept, covered = _read(memory, weight)
    return made if kept is None or covered < len(memory.manifest.segments) else kept


def _extended(memory: StoredMemory, weight: int, kept: ExampleSums | None, covered: int) -> ExampleSums:
    """Sums with those of the segments from number `covered` on: each by itself, and then in the order of segments."""
    count = memory.manifest.examples + 1
    sums = torch.zeros(count, memory.manifest.weights[weight].dim_in, dtype=torch.float64)
    counts = torch.zeros(count, dtype=torch.int64)
    nonnegative = True
    if kept is not None:
        # The last row stays the last.
        for new, old in ((sums, kept.sums), (counts, kept.counts)):
            new[: len(kept) - 1], new[-1] = old[:-1], old[-1]
        nonnegative = kept.nonnegative
    for file, segment in list(memory.segments)[covered:]:
        if segment.events[weight] == 0:
            continue
        # Example −1 is the last row. What occurs once in a segment is its own sum there.
        inside = torch.bincount(read_numbers(file, segment, weight)[0].examples % count, minlength=count)
        several = Rows(count, sums.shape[1], int((inside > 1).sum()))
        for block in memory.blocks(weight, segment.last_step, since=segment.first_step - 1):
            examples, keys = block.examples % count, block.keys.double()
            again = inside[examples] > 1
            if bool(again.any()):
                several.add(examples[again], keys[again])
                examples, keys = examples[~again], keys[~again]
            sums.index_add_(0, examples, keys)
            nonnegative = nonnegative and bool((block.keys.amin() >= 0) & (block.keys.amax() < torch.inf))
        sums.index_add_(0, several.groups, several.sums)
        counts += inside
    finite = bool(sums.amin().isfinite() & sums.amax().isfinite())
    return ExampleSums(sums, counts, finite, nonnegative)


def _marks(memory: StoredMemory) -> list[str]:
    """What the sums over each segment depend on: its file, and the steps of it that are valid."""
    return [xxhash.xxh3_64_hexdigest(record.text.encode()) for record in memory.manifest.segments]


def _name(weight: int) -> str:
    return f"{SUMS}/w{weight}.safetensors"


def _keep(memory: StoredMemory, weight: int, made: ExampleSums) -> None:
    path = memory.path / _name(weight)
    metadata = {
        "run": memory.manifest.id,
        "segments": json.dumps(_marks(memory)),
        "finite": json.dumps(made.finite),
        "nonnegative": json.dumps(made.nonnegative),
    }
    try:
        disk.make_directory(path.parent)
        write_sealed(path, {"sums": made.sums, "counts": made.counts}, metadata)
    except OSError as error:
        logger.info("no key sums of %s are kept: %s", memory.manifest.weights[weight].name, error)


def _read(memory: StoredMemory, weight: int) -> tuple[ExampleSums | None, int]:
    """The sums as they were kept, and how many segments they cover; removed where damaged or of other segments."""
    path = memory.path / _name(weight)
    if not path.exists():
        return None, 0
    try:
        file = TensorFile(memory.path, file=_name(weight))
        marks, covered = _marks(memory), json.loads(file.metadata["segments"])
        if file.metadata["run"] == memory.manifest.id and covered == marks[: len(covered)]:
            finite, nonnegative = (bool(json.loads(file.metadata[name])) for name in ("finite", "nonnegative"))
            kept = ExampleSums(file.read("sums"), file.read("counts"), finite, nonnegative)
            if kept.sums.shape != (len(kept), memory.manifest.weights[weight].dim_in):
                raise ValueError("sums of another shape")
            return kept, len(covered)
    except (DamagedMemory, KeyError, ValueError):
        logger.info("%s is damaged and made anew", path)
    with contextlib.suppress(OSError):
        disk.remove(path)
    return None, 0
