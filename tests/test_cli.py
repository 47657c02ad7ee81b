"""The command line: what it prints, on which stream, with which exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.cli import VERBS, main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A memory of three steps of a tiny network."""
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), tmp_path / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, examples={"label": torch.arange(8) % 2}) as recorder:
        for ids in torch.arange(24).remainder(8).split(8):
            with recorder.batch(ids):
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_info_names_every_weight(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", run) == 0
    text = capsys.readouterr().out
    assert "0.weight" in text
    assert "2.weight" in text
    assert "rounding" not in text


def test_info_measures_the_certificate_when_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", run, "--certificate") == 0
    text = capsys.readouterr().out
    assert "rounding" in text
    assert "certificate: exact, residual at most " in text


def test_verify_of_a_whole_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", run) == 0
    assert "every checksum matches" in capsys.readouterr().out


def test_verify_of_a_damaged_memory_exits_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = next((run / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    assert call("verify", run) == 1
    assert segment.name in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["info", "verify"])
def test_no_memory_there_is_one_message_without_traceback(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(verb, tmp_path / "nothing") == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("dualform: ")
    assert str(tmp_path / "nothing") in streams.err
    assert "Traceback" not in streams.err
    assert streams.out == ""


def test_a_beginners_mistakes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    assert "demo" in capsys.readouterr().err
    assert call("inform") == 2
    assert "info" in capsys.readouterr().err
    assert call("info") == 2
    assert "RUN" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [verb.__name__ for verb in VERBS])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(verb, "--help") == 0
    text = capsys.readouterr().out
    assert f"usage: dualform {verb}" in text
    assert "None" not in text


def test_python_m_dualform_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dualform", "--help"], capture_output=True, text=True, check=True)
    assert all(verb.__name__ in done.stdout for verb in VERBS)


@pytest.mark.parametrize(("module", "extra"), [("tyro", "cli"), ("rich", "cli"), ("matplotlib.figure", "plot")])
def test_a_missing_extra_gives_the_command_to_type(module: str, extra: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from dualform.cli import main; main(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"pip install 'dualform[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
