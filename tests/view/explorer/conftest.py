"""A small memory of two tasks, one learned after the other, and the explorer on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

import dualform
import tiny
from dualform.experiments.serving import image_subject
from dualform.experiments.training import train
from dualform.view.explorer.server import Explorer
from dualform.view.explorer.subject import Subject

PHASE = 90


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("explorer") / "two-tasks"
    with tiny.registered():
        torch.manual_seed(0)
        data = tiny.TWO.load()
        batches = list(tiny.EXPERIMENTS["continual"].batches(data.train, 0))
        train(tiny.TWO.model(), tiny.TWO, data, found, batches)
    return found


@pytest.fixture(scope="session")
def subject(path: Path) -> Subject:
    with tiny.registered():
        memory = dualform.open(path)
        return Subject(memory, path.name, image_subject(memory, tiny.quiet()))


@pytest.fixture
def explorer(subject: Subject) -> Explorer:
    return Explorer(subject)


@pytest.fixture
def client(explorer: Explorer) -> Iterator[TestClient]:
    """A client that gets an answer of 500, instead of the exception, as a browser does."""
    with TestClient(explorer.app(), base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as found:
        yield found
