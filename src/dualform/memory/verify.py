"""Verification: every file of a memory read whole, every checksum compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dualform.errors import DamagedMemory
from dualform.memory.columns import column_names, read_column
from dualform.memory.files import CHUNK
from dualform.memory.manifest import read_manifest
from dualform.memory.mapped import TensorFile


@dataclass(frozen=True)
class Verification:
    """What `verify` found; `problems` has a sentence for everything that is damaged or missing."""

    ok: bool
    problems: tuple[str, ...]
    files: int
    bytes: int

    def __repr__(self) -> str:
        head = f"{self.files} files, {self.bytes:,} bytes: "
        return head + ("every checksum matches" if self.ok else "; ".join(self.problems))


def verify(path: Path, progress: bool = False) -> Verification:
    """Check a memory without opening it, so that one damaged file does not hide another."""
    manifest = read_manifest(path)
    final = [manifest.final] if manifest.final else []
    records = [manifest.initial, *(segment.file for segment in manifest.segments), *final]
    problems: list[str] = []
    for record in tqdm(records, desc="verify", unit="file", disable=not progress, leave=False):
        try:
            damaged = TensorFile(path, record, check=False).damaged_chunks()
        except DamagedMemory as error:
            problems.append(str(error))
            continue
        for chunk in damaged:
            where = f"bytes {chunk * CHUNK:,} to {(chunk + 1) * CHUNK:,}"
            problems.append(f"{path / record.file} is damaged in its {where}.")
    names = column_names(path)
    for name in names:
        try:
            read_column(path, name)
        except DamagedMemory as error:
            problems.append(str(error))
    sizes = [(path / "examples" / f"{name}.safetensors").stat().st_size for name in names]
    total = sum(record.bytes for record in records) + sum(sizes)
    return Verification(not problems, tuple(problems), len(records) + len(names), total)
