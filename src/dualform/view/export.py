"""A memory as ordinary files: events and examples as Parquet, keys and gradients as .npy, for other tools.

Every file is written under another name and renamed when it is whole. README.txt comes last: a directory that has it is
a finished export.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dualform.api import Memory
from dualform.errors import BadCall, NotKept
from dualform.memory.manifest import MANIFEST
from dualform.queries.attend import find_map, uses_of
from dualform.view.guide import FIRST_LINE, Exported, exported_dtype, guide
from dualform.view.parquet import event_columns, write_events, write_examples

README = "README.txt"
PARTIAL = ".partial"
OURS = re.compile(r"(events-.*|examples)\.parquet|(keys|gradients)-.*\.npy|README\.txt|.*\.partial")
BLOCK = 16 << 20  # bytes of an array that are read and written at a time


@dataclass(frozen=True)
class Export:
    """The files that were written, README.txt last, and their bytes."""

    files: tuple[Path, ...]
    bytes: int


def export(
    memory: Memory, out: Path, *, layers: Sequence[str] = (), gradients: bool = False, overwrite: bool = False
) -> Export:
    """Write a memory into a directory; `layers` chooses some, `gradients` adds the gradients."""
    memory.require_events()
    if gradients and memory.manifest.keep != "all":
        raise NotKept(f"--gradients: keep={memory.manifest.keep!r} holds no gradients; only keep='all' does.")
    exported = [_described(memory, weight, file) for weight, file in _file_names(memory, layers).items()]
    earlier = _earlier(memory, out, overwrite)
    needed = _bytes(memory, exported, gradients)
    _check_room(out, needed, sum(file.stat().st_size for file in earlier))
    # README.txt goes first: without it nothing here looks finished.
    for file in sorted(earlier, key=lambda file: file.name != README):
        file.unlink()
    out.mkdir(parents=True, exist_ok=True)
    files = []

    @contextlib.contextmanager
    def new(name: str) -> Iterator[Path]:
        with _finished(out / name) as partial:
            yield partial
        files.append(out / name)

    with tqdm(total=needed, desc="Exporting", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for one in exported:
            with new(f"events-{one.file}.parquet") as path:
                write_events(memory, one.weight, path, bar.update)
            with new(f"keys-{one.file}.npy") as path:
                _write_array(memory, one, "keys", path, bar.update)
            if gradients:
                with new(f"gradients-{one.file}.npy") as path:
                    _write_array(memory, one, "gradients", path, bar.update)
        with new("examples.parquet") as path:
            write_examples(memory, path)
        with new(README) as path:
            path.write_text(guide(memory, exported, gradients), encoding="utf-8")
    return Export(tuple(files), sum(file.stat().st_size for file in files))


def _file_names(memory: Memory, layers: Sequence[str]) -> dict[int, str]:
    """The weights of these layers, or all, and what stands for each in the names of its files."""
    uses = uses_of(memory)
    chosen = sorted({uses[find_map(memory, layer)][0] for layer in layers}) or range(len(memory.manifest.weights))
    names: dict[int, str] = {}
    for weight in chosen:
        # A module may be called anything that has no dot, a path included.
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", memory.manifest.weights[weight].name)[:150]
        names[weight] = plain if plain not in names.values() else f"{plain}-{weight}"
    return names


def _described(memory: Memory, weight: int, file: str) -> Exported:
    record, segments = memory.manifest.weights[weight], memory.manifest.segments
    return Exported(
        weight=weight,
        name=record.name,
        file=file,
        uses=tuple(use.map for use in record.uses),
        events=memory.manifest.events(weight),
        keys=segments[-1].next_keys[weight],
        dim_in=record.dim_in,
        dim_out=record.dim_out,
        stored=_widest(memory, f"w{weight}/keys") or torch.float32,
        gradients=_widest(memory, f"w{weight}/gradients"),
    )


def _widest(memory: Memory, name: str) -> torch.dtype | None:
    """The dtype that holds a tensor of every segment: autocast may have been on for some steps only."""
    dtypes = [file.dtype(name) for file, _ in memory.segments if name in file]
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _earlier(memory: Memory, out: Path, overwrite: bool) -> list[Path]:
    """The files of an earlier export that are replaced; BadCall where the directory must not be written to."""
    if out.exists() and not out.is_dir():
        raise BadCall(f"--out {out} is a file; give a new directory.")
    if (out / MANIFEST).exists() or out.resolve().is_relative_to(memory.path.resolve()):
        raise BadCall(f"--out {out} is a memory, or inside one; give a new directory.")
    there = sorted(out.iterdir()) if out.exists() else []
    if there and not overwrite:
        raise BadCall(
            f"--out {out} is not empty (it has {there[0].name}): give a new directory, or replace an earlier export "
            "there with --overwrite."
        )
    readme = out / README
    if readme.is_file() and not readme.read_bytes().startswith(FIRST_LINE.encode()):
        raise BadCall(f"--overwrite: {readme} was not written by an export; give another directory.")
    return [file for file in there if OURS.fullmatch(file.name) and file.is_file()]


def _bytes(memory: Memory, exported: Sequence[Exported], gradients: bool) -> int:
    """How much is written, at most: Parquet takes less than its numbers."""
    total = 0
    for one in exported:
        total += one.events * 8 * len(event_columns(memory, one.weight))
        total += one.keys * one.dim_in * exported_dtype(one.stored).itemsize
        if gradients and one.gradients is not None:
            total += one.events * one.dim_out * exported_dtype(one.gradients).itemsize
    return total


def _check_room(out: Path, needed: int, freed: int) -> None:
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free + freed
    if free < 1.01 * needed + (1 << 20):
        raise BadCall(
            f"The export takes up to {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {there}. "
            "Choose another place (--out) or fewer layers (--layer)."
        )


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when all went well and disappears when not."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_array(memory: Memory, one: Exported, kind: str, path: Path, advance: Callable[[int], object]) -> None:
    """Write the keys or gradients of a weight as .npy, a block after another.

    Not through a mapped file: where the disk is full, that would end the process instead of raising an error.
    """
    stored, width = (one.stored, one.dim_in) if kind == "keys" else (one.gradients or torch.float32, one.dim_out)
    dtype, name = exported_dtype(stored), f"w{one.weight}/{kind}"
    descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=dtype).numpy().dtype)
    shape = (one.keys if kind == "keys" else one.events, width)
    rows = max(1, BLOCK // (width * dtype.itemsize))
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        for segment, record in memory.segments:
            count = (record.keys if kind == "keys" else record.events)[one.weight]
            for start in range(0, count, rows):
                block = segment.read(name, start, min(start + rows, count)).to(dtype).contiguous()
                file.write(block.numpy().data)
                advance(block.nbytes)
