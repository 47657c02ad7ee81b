"""The command line, called in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualform.cli import main


def call(*arguments: str | Path) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def answered(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What `dualform query` says as JSON, with nothing beside it."""
    assert call("query", *arguments, "--json") == 0
    streams = capsys.readouterr()
    assert streams.err == ""
    found: dict[str, Any] = json.loads(streams.out)
    return found
