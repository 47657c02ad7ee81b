"""A memory on disk, opened for reading: its manifest, journal, columns and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadCall, BadMemory, BadQuery, DamagedMemory, EmptyMemory
from dualform.memory.columns import Column, column_names, read_column, write_column
from dualform.memory.journal import Journal
from dualform.memory.manifest import SegmentRecord, read_manifest
from dualform.memory.mapped import TensorFile
from dualform.memory.room import Room
from dualform.memory.segment import Gather, read_blocks, read_calls
from dualform.memory.verify import Verification, verify
from dualform.memory.windows import Windows

RESIDENT = 1 << 30
LEAST = 64 << 20
# Small enough that the fp64 copies of a block stay in the cache and in memory that is already mapped.
BLOCK_ROWS = 2048
STRETCH = 32 << 20  # bytes that are mapped at a time
COPIES = 6  # what a question may make of a block: fp64 copies, products and scores


class StoredMemory:
    """The files of a memory as of its last commit: what there is to read, checked as it is touched.

    `resident` is how many bytes of the machine's memory questions may take.
    """

    def __init__(self, path: str | Path, resident: int = RESIDENT) -> None:
        self.path = Path(path)
        if isinstance(resident, bool) or not hasattr(resident, "__index__") or resident < LEAST:
            raise BadCall(
                "resident is how many bytes of the machine's memory questions may take: a whole number of at least "
                f"{LEAST:,} (64 MB), not {resident!r}."
            )
        self.resident = int(resident)
        self.room = Room(self.resident * 5 // 8)
        self.manifest = read_manifest(self.path)
        while True:
            try:
                self._open_files()
                break
            except DamagedMemory:
                # A resumed run may drop files between our reading the manifest and opening them.
                before, self.manifest = self.manifest, read_manifest(self.path)
                if self.manifest == before:
                    raise
        self._columns: dict[str, Column] = {}
        self.told: set[object] = set()

    def _open_files(self) -> None:
        self._initial = TensorFile(self.path, self.manifest.initial)
        windows = Windows(self.resident // 16, self.room)
        self._segments = [TensorFile(self.path, segment.file, windows=windows) for segment in self.manifest.segments]
        self._final = TensorFile(self.path, self.manifest.final) if self.manifest.final else None

    @cached_property
    def journal(self) -> Journal:
        """The per-step scalars of the run."""
        return Journal(list(self.segments), len(self.manifest.parameters))

    @property
    def segments(self) -> Iterator[tuple[TensorFile, SegmentRecord]]:
        """Every segment and its record, in order."""
        return zip(self._segments, self.manifest.segments, strict=True)

    @property
    def steps(self) -> int:
        """How many optimiser steps are committed."""
        return self.manifest.steps

    @property
    def bytes(self) -> int:
        """The size of the memory's own files."""
        return sum(record.bytes for record in self.manifest.files)

    def end(self, until: Any) -> int:
        """`until` as a step number, the last committed one by default."""
        if until is None:
            return self.steps
        if isinstance(until, bool) or not hasattr(until, "__index__") or not 0 <= until <= self.steps:
            raise BadCall(f"until must be a step from 0 to {self.steps} (the last committed one), not {until!r}.")
        return int(until)

    def require_events(self) -> None:
        """EmptyMemory where no step was ever committed."""
        if self.steps == 0:
            raise EmptyMemory(
                f"{self.path} holds no step yet: recording began there, but nothing was committed after step 0."
            )

    def blocks(
        self, weight: int, until: int, rows: int | None = None, since: int = 0, gather: Gather | None = None
    ) -> Iterator[Block]:
        """The events of one weight of steps since+1…until, in order, at most `rows` at a time.

        `gather` may make something else than keys of their numbers.
        """
        width = self._row_bytes(weight)
        rows = rows or self.block_rows(weight)
        stretch = max(1, min(STRETCH, self.resident // 8) // (rows * (width + 48))) * rows
        for file, record in self.segments:
            if record.first_step <= until and record.last_step > since:
                everywhere = gather is not None
                yield from read_blocks(
                    file, record, weight, since, until, rows, stretch, gather or self.keys, everywhere
                )

    def stored_keys(self, weight: int) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]]:
        """Every stored key of a weight once, with the example and position of its first event, and its number."""
        for file, record in self.segments:
            prefix, last = f"w{weight}", record.first_keys[weight] - 1
            if not record.keys[weight]:
                continue
            events = record.events[weight]
            numbers = np.arange(last + 1, last + 1 + events)
            if f"{prefix}/numbers" in file:
                numbers = file.read(f"{prefix}/numbers", 0, events).numpy()
            highest = np.maximum.accumulate(np.concatenate([[last], numbers[:-1]]))
            first = np.flatnonzero(numbers > highest)
            examples = file.read(f"{prefix}/examples", 0, events).numpy()[first]
            positions = np.zeros_like(examples)
            if f"{prefix}/positions" in file:
                positions = file.read(f"{prefix}/positions", 0, events).numpy()[first]
            rows = self.block_rows(weight)
            for at in range(0, len(first), rows):
                part = slice(at, at + rows)
                keys = file.read(f"{prefix}/keys", at, min(at + rows, len(first)))
                yield keys, examples[part], positions[part], numbers[first][part]

    def stored_tiles(self, weight: int, most: int | None = None) -> Iterator[tuple[int, Float[Tensor, "keys dim_in"]]]:
        """Every stored key of a weight, some (not more than `most`) at a time, and the number of the first of them."""
        name, rows = f"w{weight}/keys", min(self.block_rows(weight), most or BLOCK_ROWS)
        for file, record in self.segments:
            for start in range(0, record.keys[weight], rows):
                yield record.first_keys[weight] + start, file.read(name, start, min(start + rows, record.keys[weight]))

    def keys(self, weight: int, numbers: Int64[Tensor, " keys"]) -> Float[Tensor, "keys dim_in"]:
        """Stored keys by their numbers: repeated ones may be in any earlier segment."""
        name, asked, (firsts, counts) = f"w{weight}/keys", numbers.numpy(), self._key_ranges[weight]
        # In the order of the files, and within each from its beginning to its end.
        order = np.argsort(asked) if (np.diff(asked) < 0).any() else slice(None)
        asked = asked[order]
        owners = np.searchsorted(firsts, asked, side="right") - 1
        within = asked - firsts[owners]
        if len(asked) and (owners[0] < 0 or (within >= counts[owners]).any()):
            raise DamagedMemory(f"{self.path}: an event of weight {weight} has a key that is not stored.")
        starts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist()] if len(asked) else []
        files = [self._segments[owner] for owner in owners[starts].tolist()]
        dtypes = {file.dtype(name) for file in files} or {self._dtype(weight)}
        dtype = reduce(torch.promote_types, dtypes)
        # As bytes in an array of numpy's: torch takes several times as long to put rows in their places.
        keys = np.empty((len(asked), self.manifest.weights[weight].dim_in * dtype.itemsize), dtype=np.uint8)
        for file, start, stop in zip(files, starts, [*starts[1:], len(asked)], strict=False):
            into = keys[start:stop] if len(dtypes) == 1 else None
            rows = file.gather_bytes(name, within[start:stop], into)
            if len(dtypes) > 1:
                rows = torch.from_numpy(rows).view(file.dtype(name)).to(dtype).view(torch.uint8).numpy()
            if rows is not into:
                keys[start:stop] = rows
        if isinstance(order, np.ndarray):
            sorted_, keys = keys, np.empty_like(keys)
            keys[order] = sorted_
        return torch.from_numpy(keys).view(dtype)

    def block_rows(self, weight: int) -> int:
        """How many events of a weight a block has: fewer where they are so wide that it would take too much memory."""
        return max(1, min(BLOCK_ROWS, self.resident // 8 // (COPIES * self._row_bytes(weight))))

    def _row_bytes(self, weight: int) -> int:
        record = self.manifest.weights[weight]
        width = record.dim_in + (record.dim_out if self.manifest.keep == "all" else 0)
        return max(width, 1) * self._dtype(weight).itemsize

    def _dtype(self, weight: int) -> torch.dtype:
        name = self.manifest.weights[weight].name
        dtype: torch.dtype = getattr(torch, self.manifest.parameters[self.manifest.parameter(name)].dtype)
        return dtype

    @cached_property
    def _key_ranges(self) -> list[tuple[Int64[np.ndarray, " segments"], Int64[np.ndarray, " segments"]]]:
        """For every weight the number of the first key of each segment, and how many there are."""
        segments = self.manifest.segments
        return [
            (
                np.array([segment.first_keys[weight] for segment in segments], dtype=np.int64),
                np.array([segment.keys[weight] for segment in segments], dtype=np.int64),
            )
            for weight in range(len(self.manifest.weights))
        ]

    def events(self, weight: int, until: int) -> int:
        """How many events of a weight are in steps 1…until."""
        total = 0
        for file, record in self.segments:
            if record.last_step <= until:
                total += record.events[weight]
            elif record.first_step <= until and record.events[weight]:
                total += int(read_calls(file, weight, 0, until)[0][:, 3].sum())
        return total

    def half_precision(self, weight: int) -> str | None:
        """The half-precision dtype in which some keys of a weight were recorded; None where all are wider."""
        name = f"w{weight}/keys"
        dtypes = {file.dtype(name) for file in self._segments if name in file}
        half = dtypes & {torch.float16, torch.bfloat16}
        return str(half.pop()).removeprefix("torch.") if half else None

    def initial(self, parameter: str) -> Tensor:
        """W0 or b0: a parameter when recording began."""
        return self._initial.read(f"parameter/{parameter}")

    def velocity(self, parameter: str) -> Tensor | None:
        """v_0: the momentum that was already there when recording began."""
        name = f"velocity/{parameter}"
        return self._initial.read(name) if name in self._initial else None

    def final(self, parameter: str) -> Tensor | None:
        """The parameter when recording was closed; None for a run that was not closed."""
        return self._final.read(f"parameter/{parameter}") if self._final else None

    def probe(self, parameter: int) -> Tensor | None:
        """The fixed random matrix R of a weight's probe and sketches; None for a bias, which needs none."""
        name = f"probe/{parameter}"
        return self._initial.read(name) if name in self._initial else None

    def sketch(self, parameter: int, step: int) -> Tensor | None:
        """W @ R at a committed step; None where no commit ended at that step."""
        return self._at_commit(f"sketch/{parameter}", step)

    def velocity_sketch(self, parameter: int, step: int) -> Tensor | None:
        """v @ R at a committed step; None where there was no velocity, or no commit ended at that step."""
        return self._at_commit(f"velocity_sketch/{parameter}", step)

    def committed(self, step: int) -> bool:
        """Whether a commit ended at this step, so that there are sketches of it."""
        return step == 0 or any(record.sketched == record.last_step == step for record in self.manifest.segments)

    def has_weights(self, step: int) -> bool:
        """Whether there is something to compare the weights after this step with."""
        return self.committed(step) or (step == self.steps and self._final is not None)

    def _at_commit(self, name: str, step: int) -> Tensor | None:
        if step == 0:
            return self._initial.read(name) if name in self._initial else None
        for file, record in self.segments:
            if record.sketched == record.last_step == step:
                return file.read(name) if name in file else None
        return None

    def others(self, until: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Unrecorded parameters and buffers after step `until`, and the step each is really from."""
        names = [*self.manifest.every_step, *self.manifest.at_commits]
        values = {name: self._initial.read(f"other/{name}") for name in names}
        steps = dict.fromkeys(names, 0)
        for file, record in self.segments:
            if record.first_step > until:
                break
            at = min(until, record.last_step)
            for name in self.manifest.every_step:
                values[name] = file.read(f"other/{name}")[at - record.first_step]
                steps[name] = at
            if record.sketched == record.last_step <= until:
                for name in self.manifest.at_commits:
                    values[name] = file.read(f"other/{name}")
                    steps[name] = record.last_step
        return values, steps

    @property
    def columns(self) -> list[str]:
        """The columns of the examples table."""
        return column_names(self.path)

    def column(self, name: str) -> Column:
        """One column of the examples table."""
        if name not in self._columns:
            if name not in self.columns:
                there = ", ".join(self.columns) or "none"
                raise BadQuery(
                    f"there is no column {name!r}. Columns of this memory: {there}; always: step, example, position. "
                    f"memory.annotate({name}=array) adds one."
                )
            self._columns[name] = read_column(self.path, name)
        return self._columns[name]

    def require_enough(self, column: Column) -> None:
        """BadCall where a column has no entry for some example of the memory."""
        if len(column) < self.manifest.examples:
            raise BadCall(
                f"column {column.name!r} has {len(column):,} entries, but the memory has events of example "
                f"{self.manifest.examples - 1:,}: pass one entry for every example id."
            )

    def annotate(self, **columns: Any) -> None:
        """Add columns to the examples table, durably; each is indexed by example id.

        memory.annotate(author=["ada", "kurt", …])
        """
        made = [Column.of(name, array) for name, array in columns.items()]
        for column in made:
            self.require_enough(column)
        for column in made:
            try:
                write_column(self.path, column)
            except OSError as error:
                raise BadMemory(f"column {column.name!r} cannot be written: {error.strerror}.") from error
            self._columns[column.name] = column

    def verify(self, progress: bool = False) -> Verification:
        """Read every file whole and compare every checksum; nothing is changed."""
        return verify(self.path, progress)
