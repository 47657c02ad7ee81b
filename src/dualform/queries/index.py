"""The index: the shadows of a memory's keys on disk, made at first use or by `dualform index`.

A derived part. Each file covers some segments that follow each other; new segments get a file of their own, which
takes in the last ones where these are no larger, so that a growing memory has few files and rebuilds little.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from tqdm import tqdm

from dualform.errors import DamagedMemory
from dualform.memory import StoredMemory
from dualform.memory.derived import SHADOWS
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.queries.scorers import DirectionScorer, NormScorer
from dualform.queries.shadow import CUTS, HEAD, Shadow, build, widened
from dualform.queries.table import Table
from dualform.queries.views import View

logger = logging.getLogger("dualform")
Values = tuple[Float64[Tensor, "one events"], Float64[Tensor, " events"], Float64[Tensor, " events"]]
REMEMBERED = 12  # directions whose values are at hand
VERSION = "3"
ROW_BYTES = 4 * (HEAD + 2 + CUTS[-1] + len(CUTS)) + 14  # of a shadow
BLOCK = 4096
_NAME = re.compile(r"w(\d+)-(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True)
class Span:
    """Segments start…stop−1 of a memory."""

    start: int
    stop: int


class Index:
    """The shadows and event tables of one memory, and the keys that were lately scored."""

    def __init__(self, memory: StoredMemory) -> None:
        self._owner = weakref.ref(memory)
        self._lock = threading.RLock()
        self._shadows: dict[int, list[Shadow]] = {}
        self._tables: dict[int, Table] = {}
        self._hot: dict[int, HotKeys] = {}
        self._views: dict[int, list[View]] = {}
        self._norms: dict[int, Tensor] = {}
        self._of_examples: dict[int, Shadow] = {}
        self._weighted: dict[tuple[object, ...], list[View] | None] = {}
        self._values: dict[tuple[object, ...], Values] = {}

    @property
    def _memory(self) -> StoredMemory:
        memory = self._owner()
        assert memory is not None, "an index is asked through its memory"
        return memory

    def keys(self, weight: int) -> int:
        """How many keys of a weight are stored."""
        return sum(record.keys[weight] for record in self._memory.manifest.segments)

    def table(self, weight: int) -> Table:
        """The numbers of every event of a weight."""
        with self._lock:
            if weight not in self._tables:
                self._tables[weight] = Table.of(self._memory, weight)
            return self._tables[weight]

    def hot(self, weight: int) -> HotKeys:
        """The keys of a weight, of which the lately read stay in memory."""
        with self._lock:
            if weight not in self._hot:
                self._hot[weight] = HotKeys(self._memory, weight)
                for shadow in self.shadows(weight):
                    if len(shadow.front):
                        self._hot[weight].hold(shadow.numbers[: len(shadow.front)], shadow.front)
            return self._hot[weight]

    def shadows(self, weight: int, progress: bool = False) -> list[Shadow]:
        """The shadows of a weight's keys, those with the largest norms first; made where they are missing."""
        with self._lock:
            found = self._shadows.pop(weight, None)
            if found is None:
                made = [self._shadow(weight, span, progress) for span in self._spans(weight)]
                found = sorted(made, key=lambda shadow: -shadow.scale)
            self._shadows[weight] = found
            while len(self._shadows) > 1 and self._bytes() > self._memory.resident // 2:
                self._views.pop(dropped := next(iter(self._shadows)), None)
                self._shadows.pop(dropped)
            return found

    def of_examples(self, weight: int, sums: Float64[Tensor, "examples dim_in"]) -> Shadow:
        """The shadow of a weight's key sums per example."""
        with self._lock:
            if weight not in self._of_examples:
                path = self._memory.path / SHADOWS / f"examples-w{weight}.safetensors"
                span = Span(0, len(self._memory.manifest.segments))
                rows = [(at, sums[at]) for at in torch.arange(len(sums)).split(BLOCK)]
                self._of_examples[weight] = self._kept(
                    path, self._fingerprint(weight, span), lambda: build(lambda: iter(rows), *sums.shape)
                )
            return self._of_examples[weight]

    def views(self, weight: int) -> list[View]:
        """The shadows of a weight with all their rows."""
        with self._lock:
            shadows = self.shadows(weight)
            kept = self._views.get(weight, [])
            if len(kept) != len(shadows) or any(v.shadow is not s for v, s in zip(kept, shadows, strict=True)):
                kept = self._views[weight] = [View.of(shadow) for shadow in shadows]
            return kept

    def norms(self, weight: int) -> Float32[Tensor, " keys"]:
        """A number not below the norm of every key, by the key's number; infinite for those set apart."""
        with self._lock:
            if weight not in self._norms:
                norms = torch.full((self.keys(weight),), torch.inf)
                for shadow in self.shadows(weight):
                    norms[shadow.numbers] = widened(shadow.norms.double() * shadow.scale)
                self._norms[weight] = norms
            return self._norms[weight]

    def tiles(self, weight: int) -> Iterator[tuple[Int64[Tensor, " rows"], Float[Tensor, "rows dim_in"]]]:
        """Every stored key with its number, a segment's at a time as far as they may be resident."""
        for file, record in self._memory.segments:
            wide = 8 * self._memory.manifest.weights[weight].dim_in
            rows = max(self._memory.resident // 16 // wide, min(BLOCK, self._memory.block_rows(weight)))
            for at in range(0, record.keys[weight], rows):
                keys = file.read(f"w{weight}/keys", at, min(at + rows, record.keys[weight]))
                yield torch.arange(at, at + len(keys)) + record.first_keys[weight], keys

    def values(self, weight: int, until: int, scorer: DirectionScorer | NormScorer) -> Values:
        """What the scorer makes of every gradient of a weight, and the coefficients of weight and bias.

        A pass over the gradients; the last ones are remembered.
        """
        question = self.question(weight, until, scorer)
        with self._lock:
            if question not in self._values:
                while len(self._values) >= REMEMBERED:
                    self._values.pop(next(iter(self._values)))
                self._values[question] = self._read_values(weight, scorer)
            return self._values[question]

    def question(self, weight: int, until: int, scorer: DirectionScorer | NormScorer) -> tuple[object, ...]:
        """What the values of events depend on."""
        along = scorer.directions.numpy().tobytes() if isinstance(scorer, DirectionScorer) else b""
        coefficients = scorer.coefficients
        return weight, until, along, coefficients.bias_uses, coefficients.bias is None

    def remembered(self, question: tuple[object, ...], make: Callable[[], list[View] | None]) -> list[View] | None:
        """The weighted views of all events for a question; the last ones are remembered."""
        with self._lock:
            if question not in self._weighted:
                while len(self._weighted) >= REMEMBERED:
                    self._weighted.pop(next(iter(self._weighted)))
                self._weighted[question] = make()
            return self._weighted[question]

    def _read_values(self, weight: int, scorer: DirectionScorer | NormScorer) -> Values:
        table = self.table(weight)
        weight_of, bias_of = scorer.coefficients.of_events(table.block)
        blocks = self._memory.blocks(weight, self._memory.steps)
        parts = [scorer.of_gradients(block) for block in blocks]
        return torch.cat([torch.empty(1, 0, dtype=torch.float64), *parts], dim=1), weight_of, bias_of

    def _bytes(self) -> int:
        return sum(ROW_BYTES * len(shadow) for shadows in self._shadows.values() for shadow in shadows)

    def _rows(self, weight: int, span: Span) -> int:
        return sum(record.keys[weight] for record in self._memory.manifest.segments[span.start : span.stop])

    def _spans(self, weight: int) -> list[Span]:
        """Which segments each shadow covers: those on disk, and new ones for what they leave out."""
        segments = len(self._memory.manifest.segments)
        kept: list[Span] = []
        for span in self._stored(weight):
            if span.start == (kept[-1].stop if kept else 0) and span.stop <= segments:
                kept.append(span)
        start = kept[-1].stop if kept else 0
        if start == segments:
            return kept
        most = max(self._memory.resident // 4 // ROW_BYTES, 1)
        while kept and self._rows(weight, kept[-1]) <= self._rows(weight, Span(start, segments)) < most:
            start = kept.pop().start
        while start < segments:
            stop = start + 1
            while stop < segments and self._rows(weight, Span(start, stop + 1)) <= most:
                stop += 1
            kept.append(Span(start, stop))
            start = stop
        return kept

    def _stored(self, weight: int) -> list[Span]:
        """The spans of the files that are there, wider ones before narrower ones of the same start."""
        names = [_NAME.fullmatch(path.name) for path in (self._memory.path / SHADOWS).glob("*.safetensors")]
        spans = [Span(int(name[2]), int(name[3])) for name in names if name and int(name[1]) == weight]
        return sorted(spans, key=lambda span: (span.start, -span.stop))

    def _path(self, weight: int, span: Span) -> Path:
        return self._memory.path / SHADOWS / f"w{weight}-{span.start:06d}-{span.stop:06d}.safetensors"

    def _fingerprint(self, weight: int, span: Span) -> str:
        segments = self._memory.manifest.segments[span.start : span.stop]
        parts = [VERSION, self._memory.manifest.id, weight, [segment.file.checksums for segment in segments]]
        return xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())

    def _shadow(self, weight: int, span: Span, progress: bool) -> Shadow:
        rows, dim_in = self._rows(weight, span), self._memory.manifest.weights[weight].dim_in
        shadow = self._kept(
            self._path(weight, span),
            self._fingerprint(weight, span),
            lambda: build(lambda: self._keys(weight, span, progress), rows, dim_in, self._memory.resident // 16),
        )
        for old in self._stored(weight):
            if old != span and span.start <= old.start and old.stop <= span.stop:
                with contextlib.suppress(OSError):
                    disk.remove(self._path(weight, old))
        return shadow

    def _kept(self, path: Path, fingerprint: str, make: Callable[[], Shadow]) -> Shadow:
        """A shadow from its file; made, and kept there, where the file is missing, damaged or of other segments."""
        if path.exists():
            try:
                file = TensorFile(self._memory.path, file=str(path.relative_to(self._memory.path)))
                if file.metadata.get("fingerprint") == fingerprint:
                    return Shadow.of_tensors(file.read)
            except DamagedMemory:
                logger.info("%s is damaged and made anew", path)
        shadow = make()
        try:
            disk.make_directory(path.parent)
            write_sealed(path, shadow.tensors(), {"fingerprint": fingerprint})
        except OSError as error:
            logger.info("no shadow is kept in %s: %s", path, error)
        return shadow

    def _keys(
        self, weight: int, span: Span, progress: bool
    ) -> Iterator[tuple[Int64[Tensor, " rows"], Float[Tensor, "rows dim_in"]]]:
        """The stored keys of some segments with their numbers."""
        name = self._memory.manifest.weights[weight].name
        chosen = list(self._memory.segments)[span.start : span.stop]
        rows = min(BLOCK, self._memory.block_rows(weight))
        for file, record in tqdm(chosen, f"indexing {name}", unit="segment", disable=not progress, leave=False):
            for at in range(0, record.keys[weight], rows):
                keys = file.read(f"w{weight}/keys", at, min(at + rows, record.keys[weight]))
                yield torch.arange(at, at + len(keys)) + record.first_keys[weight], keys


_INDEXES: weakref.WeakKeyDictionary[StoredMemory, Index] = weakref.WeakKeyDictionary()


def index_of(memory: StoredMemory) -> Index:
    """The index of an opened memory, one for all questions."""
    return _INDEXES.setdefault(memory, Index(memory))


class HotKeys:
    """The keys of a weight by their numbers; those that were read lately are at hand."""

    def __init__(self, memory: StoredMemory, weight: int) -> None:
        self._owner, self._weight = weakref.ref(memory), weight
        manifest = memory.manifest
        room = memory.resident // 8 // len(manifest.weights) // (4 * manifest.weights[weight].dim_in + 12)
        self._room = max(room, 256)
        self._lock = threading.Lock()
        self._slots = torch.full((sum(record.keys[weight] for record in manifest.segments),), -1, dtype=torch.int32)
        self._keys = torch.empty(0, 0)
        self._norms = torch.empty(0, dtype=torch.float64)
        self._filled = 0

    def get(
        self, numbers: Int64[Tensor, " keys"]
    ) -> tuple[Float[Tensor, "some dim_in"], Int64[Tensor, " keys"], Float64[Tensor, " some"]]:
        """Keys, where among them each number is, and their norms."""
        with self._lock:
            slots = self._slots[numbers]
            missing = numbers[slots < 0].unique()
            if len(missing) and not self.hold(missing, self._read(missing)):
                some, place = numbers.unique(return_inverse=True)
                keys = self._read(some)
                return keys, place, torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
            return self._keys, self._slots[numbers].long(), self._norms

    def hold(self, numbers: Int64[Tensor, " keys"], keys: Float[Tensor, "keys dim_in"]) -> bool:
        """Keep some keys at hand; False where there was no room for them beside the others, which then go."""
        if self._filled + len(keys) > len(self._keys) or keys.dtype != self._keys.dtype:
            # All anew, in other memory: other threads may still be reading what was handed out.
            full = self._filled > 0
            self._slots.fill_(-1)
            self._keys = torch.empty(self._room, keys.shape[1], dtype=keys.dtype)
            self._norms = torch.empty(self._room, dtype=torch.float64)
            self._filled = 0
            if full or len(keys) > self._room // 2:
                return False
        at = torch.arange(self._filled, self._filled + len(keys))
        self._keys[at], self._norms[at] = keys, torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
        self._slots[numbers] = at.int()
        self._filled += len(keys)
        return True

    def _read(self, numbers: Int64[Tensor, " keys"]) -> Float[Tensor, "keys dim_in"]:
        memory = self._owner()
        assert memory is not None
        return memory.keys(self._weight, numbers)
