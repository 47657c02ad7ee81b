"""The directory of a memory: where recording may begin, and what of it is left over from a run that never began."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from dualform.errors import BadMemory, MemoryExists
from dualform.memory.disk import disk
from dualform.memory.lock import LOCK
from dualform.memory.manifest import MANIFEST

SEGMENT = "segments/r000-{:06d}.safetensors"
_SEGMENT = re.compile(r"r000-(\d{6})\.safetensors(\.tmp)?")
_OURS = {"segments", "examples", "derived", "initial.safetensors", "damaged", LOCK}


def segment_files(root: Path) -> list[Path]:
    """All segment files that are there, half-written ones too, whether the manifest names them or not."""
    return sorted(path for path in (root / "segments").glob("*") if _SEGMENT.fullmatch(path.name))


def next_segment(root: Path) -> int:
    """A number that no segment file has."""
    found = (_SEGMENT.fullmatch(path.name) for path in segment_files(root))
    return max((int(match[1]) for match in found if match), default=-1) + 1


def is_unused(root: Path) -> bool:
    """Whether nothing was ever committed there."""
    return not (root / MANIFEST).exists()


def make_directory(path: Path) -> None:
    """Make the directories that a lock and a memory need; an error where something else is there."""
    if path.exists() and not path.is_dir():
        raise MemoryExists(f"{path} is a file; record() needs a directory that is new or empty.")
    foreign = _foreign(path) if is_unused(path) else []
    if foreign:
        raise MemoryExists(
            f"{path} is not empty (it holds {foreign[0]!r}, for one) and is not a memory. "
            "Choose a directory that is new or empty."
        )
    try:
        above = [folder for folder in path.parents if not folder.exists()]
        for part in ("segments", "examples"):
            disk.make_directory(path / part)
        disk.sync_directory(path)
        for folder in (path.parent, *(folder.parent for folder in above)):
            with contextlib.suppress(PermissionError):
                disk.sync_directory(folder)  # a new directory is an entry of the one above it
    except OSError as error:
        raise BadMemory(f"cannot make the directory {path}: {error.strerror}.") from error


def _foreign(path: Path) -> list[str]:
    items = sorted(path.iterdir()) if path.exists() else []
    return [item.name for item in items if item.name not in _OURS and item.suffix != ".tmp"]


def clear_leftovers(path: Path) -> None:
    """Remove what a run that never began has left; an error where something was committed."""
    if not is_unused(path):
        raise MemoryExists(
            f"{path} already holds a memory. To go on with that run, pass resume_at= the step of the checkpoint that "
            "was loaded; otherwise choose another directory, or delete that one first."
        )
    try:
        for leftover in (path / "examples").glob("*.safetensors"):
            disk.remove(leftover)  # a column of a run that never began
    except OSError as error:
        raise BadMemory(f"cannot clear {path}: {error.strerror}.") from error
