"""Verification: every file of a memory read whole, every checksum compared; and what can be done about damage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dualform.errors import DamagedMemory
from dualform.memory.columns import column_names, read_column
from dualform.memory.derived import derived_files
from dualform.memory.disk import disk
from dualform.memory.files import CHUNK, FileRecord
from dualform.memory.lock import Lock
from dualform.memory.manifest import Manifest, read_manifest, write_manifest
from dualform.memory.mapped import TensorFile

DAMAGED = "damaged"


@dataclass(frozen=True)
class Verification:
    """What `verify` found: a sentence for everything that is damaged or missing, and how much is still usable.

    `usable` is the number of steps, from the first on, of which nothing is damaged; −1 where not even the initial
    weights are whole. `damaged` are the files, as paths within the memory.
    """

    ok: bool
    problems: tuple[str, ...]
    files: int
    bytes: int
    steps: int
    usable: int
    damaged: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What can still be used, in a sentence."""
        if self.ok:
            return f"all {self.steps:,} steps can be used"
        if self.usable < 0:
            return "the initial weights are damaged: no weight can be rebuilt; restore initial.safetensors from a copy"
        if self.usable < self.steps:
            kept = f"steps 1 to {self.usable:,}" if self.usable else "no step"
            return f"of {self.steps:,} steps, {kept} can be used; `dualform verify --repair` keeps them"
        return f"all {self.steps:,} steps can be used; `dualform verify --repair` sets the damaged files aside"

    def __repr__(self) -> str:
        head = f"{self.files} files, {self.bytes:,} bytes: "
        return head + ("every checksum matches" if self.ok else "; ".join((*self.problems, self.verdict)))


def verify(path: Path, progress: bool = False) -> Verification:
    """Check a memory without opening it, so that one damaged file does not hide another."""
    manifest = read_manifest(path)
    problems: dict[str, list[str]] = {}
    for record in tqdm(manifest.files, desc="verify", unit="file", disable=not progress, leave=False):
        found = _problems(path, record)
        if found:
            problems[record.file] = found
    own = [f"examples/{name}.safetensors" for name in column_names(path)]
    own += [str(file.relative_to(path)) for file in derived_files(path)]
    total = sum(record.bytes for record in manifest.files)
    for file in own:
        try:
            total += (path / file).stat().st_size
            if file.startswith("examples/"):
                read_column(path, Path(file).stem)
            else:
                TensorFile(path, file=file)
        except (DamagedMemory, OSError) as error:
            anew = f"{path / file} is damaged; it is made anew when it is needed."
            problems[file] = [anew if file.startswith("derived/") else str(error)]
    return Verification(
        ok=not problems,
        problems=tuple(sentence for sentences in problems.values() for sentence in sentences),
        files=len(manifest.files) + len(own),
        bytes=total,
        steps=manifest.steps,
        usable=_usable(manifest, set(problems)),
        damaged=tuple(problems),
    )


def _problems(path: Path, record: FileRecord) -> list[str]:
    try:
        chunks = TensorFile(path, record, check=False).damaged_chunks()
    except DamagedMemory as error:
        return [str(error)]
    where = (f"bytes {chunk * CHUNK:,} to {min((chunk + 1) * CHUNK, record.bytes):,}" for chunk in chunks)
    return [f"{path / record.file} is damaged in its {place}." for place in where]


def _usable(manifest: Manifest, damaged: set[str]) -> int:
    if manifest.initial.file in damaged:
        return -1
    steps = 0
    for segment in manifest.segments:
        if segment.file.file in damaged:
            break
        steps = segment.last_step
    return steps


def repair(path: Path, progress: bool = False) -> tuple[Verification, tuple[str, ...]]:
    """Keep the longest valid prefix of a memory. Nothing is deleted but derived parts: the rest moves to damaged/.

    What was found, and a sentence for everything that was done.
    """
    read_manifest(path)  # a directory that is no memory gets no lock either
    lock = Lock(path)
    try:
        found = verify(path, progress)
        if found.ok:
            return found, ()
        if found.usable < 0:
            raise DamagedMemory(f"{path} cannot be repaired: {found.verdict}.")
        manifest = read_manifest(path)
        segments = [segment for segment in manifest.segments if segment.last_step <= found.usable]
        kept = manifest.shortened(segments)
        if kept.final is not None and kept.final.file in found.damaged:
            kept = dataclasses.replace(kept, final=None)
        done: list[str] = []
        if kept.steps < manifest.steps:
            done.append(f"steps {kept.steps + 1:,} to {manifest.steps:,} were dropped: {found.problems[0]}")
        kept = dataclasses.replace(kept, told=(*kept.told, *(f"repaired: {sentence}" for sentence in done)))
        if kept != manifest:
            write_manifest(path, kept)
        named = {record.file for record in kept.files}
        unnamed = [record.file for record in manifest.files if record.file not in named]
        own = [file for file in found.damaged if file.startswith(("examples/", "derived/"))]
        for file in (*unnamed, *own):
            done += _set_aside(path, file)
        return found, tuple(done)
    finally:
        lock.release()


def _set_aside(root: Path, file: str) -> list[str]:
    if not (root / file).exists():
        return [f"{file} is missing"]
    if file.startswith("derived/"):
        disk.remove(root / file)
        return [f"{file} was removed; it is made anew when it is needed"]
    target = root / DAMAGED / file.replace("/", "-")
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{number}-{file.replace('/', '-')}")
    disk.make_directory(target.parent)
    disk.rename(root / file, target)
    disk.sync_directory(target.parent)
    return [f"{file} was moved to {target.relative_to(root)}"]
