"""A run's directory: free, with room, and how to look at it afterwards."""

import io
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from dualform.errors import BadCall
from dualform.experiments.runs import check_room, command, free_path


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100, color_system=None, markup=False)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_command_to_type_next_works_in_this_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/dualform")
    assert command() == "dualform"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert command() == ".venv/bin/python -m dualform"


def test_an_earlier_memory_is_never_touched(tmp_path: Path) -> None:
    console = quiet()
    assert free_path(tmp_path / "demo", console) == tmp_path / "demo"
    assert said(console) == ""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert free_path(tmp_path / "demo", console) == tmp_path / "demo-3"
    assert "exists already, so this memory goes into" in said(console)


def test_a_disk_without_room_is_noticed_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**10, 0, 10**9))
    model = nn.Linear(100, 50)
    # 4 bytes × 150 numbers an event, a twentieth more, and 100 MB.
    events = (10**9 - 10**8) // 630
    check_room(tmp_path / "a" / "b", model, events, quiet())
    with pytest.raises(BadCall, match=r"may take 1\.0 GB, but only 1\.0 GB are free in .*fewer steps"):
        check_room(tmp_path / "a" / "b", model, events + 1, quiet())
