"""The shadows of a memory on disk: each over some of its segments, so that a growing memory only adds to them."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import xxhash
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from tqdm import tqdm

from dualform.errors import DamagedMemory
from dualform.fast import CUTS
from dualform.memory import StoredMemory
from dualform.memory.derived import SHADOWS
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.queries.coarse import Coarse
from dualform.queries.shadow import HEAD, Shadow, build

logger = logging.getLogger("dualform")
VERSION = "5"
ROW_BYTES = 4 * (HEAD + 2 + CUTS[-1] + len(CUTS)) + 12  # of a shadow
BLOCK = 4096
BYTES = "bytes-"  # of the files with keys in bytes
Kept = TypeVar("Kept", Shadow, Coarse)
_NAME = re.compile(r"w(\d+)-(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True)
class Span:
    """Segments start…stop−1 of a memory."""

    start: int
    stop: int


class Shadows:
    """The shadows of one memory: read from their files, made and kept there where they are missing."""

    def __init__(self, memory: StoredMemory) -> None:
        self._owner = weakref.ref(memory)
        self._files: dict[Path, TensorFile] = {}

    @property
    def _memory(self) -> StoredMemory:
        memory = self._owner()
        assert memory is not None, "an index is asked through its memory"
        return memory

    def _rows(self, weight: int, span: Span) -> int:
        return sum(record.keys[weight] for record in self._memory.manifest.segments[span.start : span.stop])

    def spans(self, weight: int) -> list[Span]:
        """Which segments each shadow covers: those on disk, and new ones for what they leave out."""
        segments = len(self._memory.manifest.segments)
        kept: list[Span] = []
        for span in self.stored(weight):
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

    def stored(self, weight: int, kind: str = "") -> list[Span]:
        """The spans of the files that are there, wider ones before narrower ones of the same start."""
        paths = (self._memory.path / SHADOWS).glob(f"{kind}w*.safetensors")
        names = [_NAME.fullmatch(path.name.removeprefix(kind)) for path in paths]
        spans = [Span(int(name[2]), int(name[3])) for name in names if name and int(name[1]) == weight]
        return sorted(spans, key=lambda span: (span.start, -span.stop))

    def _path(self, weight: int, span: Span, kind: str = "") -> Path:
        return self._memory.path / SHADOWS / f"{kind}w{weight}-{span.start:06d}-{span.stop:06d}.safetensors"

    def of_examples(self, weight: int, sums: Float64[Tensor, "examples dim_in"]) -> Shadow:
        """The shadow of a weight's key sums per example."""
        path = self._memory.path / SHADOWS / f"examples-w{weight}.safetensors"
        span = Span(0, len(self._memory.manifest.segments))
        numbers = torch.arange(len(sums)).split(BLOCK)
        return self._kept(
            path,
            self._fingerprint(weight, span),
            lambda: build(lambda: ((at, sums[at]) for at in numbers), *sums.shape),
            Shadow,
        )

    def _fingerprint(self, weight: int, span: Span) -> str:
        segments = self._memory.manifest.segments[span.start : span.stop]
        parts = [VERSION, self._memory.manifest.id, weight]
        # A run that was resumed inside a segment keeps its file, and fewer of its keys.
        parts += [[segment.keys[weight], *segment.file.checksums] for segment in segments]
        return xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())

    def get(self, weight: int, span: Span, progress: bool = False) -> Shadow:
        """The shadow of a weight's keys in some segments."""
        rows, dim_in = self._rows(weight, span), self._memory.manifest.weights[weight].dim_in
        shadow = self._kept(
            self._path(weight, span),
            self._fingerprint(weight, span),
            lambda: build(lambda: self._keys(weight, span, progress), rows, dim_in, self._memory.resident // 16),
            Shadow,
        )
        for kind in ("", BYTES):
            for old in self.stored(weight, kind):
                if old != span and span.start <= old.start and old.stop <= span.stop:
                    with contextlib.suppress(OSError):
                        disk.remove(self._path(weight, old, kind))
        return shadow

    def coarse(self, weight: int, span: Span) -> Coarse:
        """The keys of a weight in some segments in bytes."""
        rows, dim_in = self._rows(weight, span), self._memory.manifest.weights[weight].dim_in
        return self._kept(
            self._path(weight, span, BYTES),
            self._fingerprint(weight, span),
            lambda: Coarse.of(lambda: self._keys(weight, span, False), rows, dim_in),
            Coarse,
        )

    def _kept(self, path: Path, fingerprint: str, make: Callable[[], Kept], kind: type[Kept]) -> Kept:
        """A shadow from its file; made, and kept there, where the file is missing, damaged or of other keys."""
        found = self._read(path, fingerprint, kind)
        if found is not None:
            return found
        shadow = make()
        try:
            disk.make_directory(path.parent)
            write_sealed(path, shadow.tensors(), {"fingerprint": fingerprint})
        except OSError as error:
            logger.info("no shadow is kept in %s: %s", path, error)
            return shadow
        # From the file, whose pages the system can take back.
        return self._read(path, fingerprint, kind) or shadow

    def _read(self, path: Path, fingerprint: str, kind: type[Kept]) -> Kept | None:
        if not path.exists():
            return None
        try:
            # A file stays checked as long as nobody writes to it.
            if path not in self._files:
                self._files[path] = TensorFile(self._memory.path, file=str(path.relative_to(self._memory.path)))
            file = self._files[path]
            shadow = kind.of_tensors(file.read)
            if file.metadata.get("fingerprint") == fingerprint:
                return shadow
        except DamagedMemory:
            logger.info("%s is damaged and made anew", path)
        self._files.pop(path, None)
        return None

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
