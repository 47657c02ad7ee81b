"""`dualform serve`: a process that says where it is, answers, and ends when it is told to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import small
from dualform.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    small.run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def server(run: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    command = [sys.executable, "-u", "-m", "dualform", "serve", str(run), "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if "http://" in line:
            break
    yield process, said
    if process.poll() is None:
        process.kill()
    process.wait(30)


def test_it_answers_until_it_is_interrupted(server: tuple[subprocess.Popen[str], list[str]]) -> None:
    process, said = server
    assert "names no recipe" in said[0]
    found = re.search(r"http://127\.0\.0\.1:\d+/", said[-1])
    assert found is not None
    with urllib.request.urlopen(f"{found[0]}about.json", timeout=30) as answer:
        about = json.load(answer)
    assert [view["name"] for view in about["views"]] == ["overview"] and about["images"] is None
    with urllib.request.urlopen(f"{found[0]}overview?format=json", timeout=30) as answer:
        assert json.load(answer)["steps"] == 6
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == ""


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--host", "999.1.1.1"], ["--host", "not a host"], ["--host", ""]]
)
def test_where_nobody_can_listen(run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(run), "--no-browser", *arguments])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    if arguments[1] == "":
        assert "--host is empty" in told
    else:
        assert "cannot listen" in told and f"Choose another with {arguments[0]}." in told


def test_no_memory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(tmp_path / "nothing"), "--no-browser"])
    assert stop.value.code == 2 and "there is no directory" in capsys.readouterr().err
