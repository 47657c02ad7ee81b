"""The command line: what it prints, on which stream, with which exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from commands import call
from dualform.cli import VERBS
from dualform.memory.lock import Lock


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A memory of four steps of a tiny network, two in each segment."""
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), tmp_path / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, examples={"label": torch.arange(8) % 2}) as recorder:
        for step, ids in enumerate(torch.arange(32).remainder(8).split(8), start=1):
            with recorder.batch(ids):
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                recorder.commit()
    return path


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


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def segment(run: Path, number: int = 1) -> Path:
    return run / f"segments/r000-{number:06d}.safetensors"


def test_verify_of_a_damaged_memory_exits_1_and_says_what_is_usable(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(segment(run))
    assert call("verify", run) == 1
    text = capsys.readouterr().out
    assert f"{run} is damaged (" in text
    assert segment(run).name in text
    assert "Of 4 steps, steps 1 to 2 can be used; `dualform verify --repair` keeps them." in text
    damage(segment(run, 0))
    assert call("verify", run) == 1
    text = capsys.readouterr().out
    assert segment(run, 0).name in text
    assert segment(run, 1).name in text
    assert "Of 4 steps, no step can be used" in text


def test_verify_of_a_damaged_column_says_that_every_step_is_usable(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "examples/label.safetensors")
    assert call("verify", run) == 1
    text = capsys.readouterr().out
    assert "label.safetensors" in text
    assert "All 4 steps can be used" in text


def test_repair_keeps_what_is_usable_and_says_what_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(segment(run))
    assert call("verify", run, "--repair") == 0
    text = capsys.readouterr().out
    assert f"{run} is damaged (" in text
    assert "\nRepaired:\n  - steps 3 to 4 were dropped: " in text
    assert "\n  - segments/r000-000001.safetensors was moved to damaged/segments-r000-000001.safetensors" in text
    assert "\n  - final.safetensors was moved to damaged/final.safetensors" in text
    assert call("verify", run) == 0
    assert "every checksum matches" in capsys.readouterr().out
    assert call("info", run, "--certificate") == 0
    text = capsys.readouterr().out
    assert "2 steps of SGD" in text
    assert "repaired: steps 3 to 4 were dropped" in text
    assert "certificate: exact" in text


def test_repair_of_a_whole_memory_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*.*")}
    assert call("verify", run, "--repair") == 0
    text = capsys.readouterr().out
    assert f"{run} is whole: " in text
    assert "epaired" not in text
    assert before == {path: path.read_bytes() for path in run.rglob("*.*")}


@pytest.mark.parametrize("file", ["initial.safetensors", "manifest-r000.json"])
def test_what_cannot_be_repaired_exits_1(file: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / file)
    assert call("verify", run, "--repair") == 1
    streams = capsys.readouterr()
    assert streams.out.startswith(f"{run} cannot be repaired: ")
    assert file in streams.out
    assert "Traceback" not in streams.out + streams.err
    assert not (run / "damaged").exists()


def test_a_memory_that_is_being_recorded_is_not_repaired(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = Lock(run)
    assert call("verify", run, "--repair") == 2
    assert "is being written by another recorder" in capsys.readouterr().err
    assert call("verify", run) == 0
    lock.release()


@pytest.mark.parametrize("verb", ["info", "verify", "verify --repair"])
def test_no_memory_there_is_one_message_without_traceback(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*verb.split(), tmp_path / "nothing") == 2
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


def test_index_builds_what_a_second_call_finds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("index", run) == 0
    text = capsys.readouterr().out
    assert "0.weight: 32 keys indexed" in text
    assert "2.weight: 32 keys indexed" in text
    files = {file: file.stat().st_mtime_ns for file in (run / "derived/shadow").iterdir()}
    assert len(files) == 2
    assert call("index", run, "--layer", "2") == 0
    assert capsys.readouterr().out.startswith("2.weight: 32 keys indexed")
    assert {file: file.stat().st_mtime_ns for file in (run / "derived/shadow").iterdir()} == files
    assert call("index", run, "--layer", "nothing") == 2
    assert "not recorded" in capsys.readouterr().err


def test_bench_compares_the_answers_with_a_scan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", run, "--top", "3", "--queries", "1", "5", "--rounds", "2") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [row[:2] for row in rows] == [["0", "1"], ["0", "5"], ["2", "1"], ["2", "5"]]
    assert all(row[5] == "100.0%" for row in rows)
    assert call("bench", run, "--top", "99") == 2
    assert "fewer than the top 99" in capsys.readouterr().err


def test_bench_takes_repeated_keys_for_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which of several events with one score a scan takes is up to it."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids in torch.arange(64).remainder(8).split(8):
            with recorder.batch(ids):
                model(inputs[ids]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert call("bench", tmp_path / "run", "--top", "9", "--queries", "5", "--rounds", "1") == 0
    assert "100.0%" in capsys.readouterr().out


def test_a_memory_of_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 2)
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run"):
        pass
    assert call("info", tmp_path / "run") == 0
    assert "certificate: no step was committed yet" in capsys.readouterr().out
    assert call("bench", tmp_path / "run") == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1


def test_a_file_is_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert call("info", tmp_path / "notes.txt") == 2
    assert "notes.txt is a file; a memory is a directory" in capsys.readouterr().err


def test_an_index_that_cannot_be_written_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "derived").write_text("in the way")
    assert call("index", run) == 0
    assert capsys.readouterr().out.count("cannot be written and are not kept") == 2


def test_who_reads_may_stop_reading(run: Path) -> None:
    script = f"{sys.executable} -m dualform info {run} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.returncode == 0
