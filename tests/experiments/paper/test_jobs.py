"""Jobs: interrupted and continued, asked for again, asked for more, and refused; nothing is lost or done twice."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dualform
import tiny
from commands import call
from dualform.cli import main
from dualform.errors import BadCall, DualformError
from dualform.experiments import training
from dualform.experiments.paper import Job, folder, parts, report, reproduce, store
from dualform.experiments.paper.folder import RunFolder
from dualform.experiments.paper.parts import PARTS
from dualform.experiments.paper.spotlights import Spotlights
from dualform.memory.disk import disk

STEPS = 24
EVERY = 8
TESTS = Path(__file__).parents[2]


@dataclass
class Counted:
    """What a job really did."""

    trained: list[int] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    drawn: int = 0

    def clear(self) -> None:
        self.trained, self.computed, self.drawn = [], [], 0


def reported(out: Path) -> list[str]:
    """A report without figures."""
    (out / "report.html").write_text("a report")
    return []


def quick(part: parts.Part) -> parts.Part:
    """Spotlights take the most time and have tests of their own."""
    return replace(part, compute=lambda run: Spotlights(())) if part.name == "spotlights" else part


@pytest.fixture(autouse=True)
def done(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Checkpoints every few steps; trainings, parts and reports are counted, and no figure is drawn."""
    found = Counted()

    def count_train(*arguments: Any, **options: Any) -> None:
        found.trained.append(int(str(arguments[3].parent).rsplit("-", 1)[1]))
        training.train(*arguments, **options)

    def counting(name: str, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(run: Any) -> Any:
            found.computed.append(name)
            return compute(run)

        return counted

    def draw(out: Path, *_: Any) -> list[str]:
        found.drawn += 1
        return reported(out)

    monkeypatch.setattr(training, "EVERY", EVERY)
    monkeypatch.setattr(folder, "train", count_train)
    monkeypatch.setattr(
        parts, "PARTS", tuple(replace(part, compute=counting(part.name, part.compute)) for part in map(quick, PARTS))
    )
    monkeypatch.setattr(report, "write_report", draw)
    return found


def job(out: Path, **options: Any) -> Job:
    return Job(**({"name": "single", "out": out, "runs": 1, "steps": STEPS} | options))


def finish(out: Path, **options: Any) -> str:
    console = tiny.quiet()
    reproduce(job(out, **options), console)
    return tiny.said(console)


def run_folder(out: Path, seed: int = 0, **options: Any) -> RunFolder:
    ((_, folders),) = job(out, runs=seed + 1, **options).folders
    return folders[seed]


def results(out: Path, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Every part's result as it was written."""
    found = {}
    for file in run_folder(out, seed, **options).path.glob("*.json"):
        found[file.stem] = json.loads(file.read_text(encoding="utf-8"))["result"]
    del found["training"]
    del found["checks"]["bytes"]  # depends on when the recorder committed
    return found


def same_results(one: Any, other: Any, where: str = "") -> None:
    """Equal, but for the last digits of sums, which go by segments, and of what rounding leaves over."""
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same_results(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for at, pair in enumerate(zip(one, other, strict=True)):
            same_results(*pair, f"{where}[{at}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-3 if where.endswith(("/apart", "/residual")) else 1e-8), where
    else:
        assert one == other, where


def files(out: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(out)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in out.rglob("*")
        if file.is_file() and "derived" not in file.parts
    }


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Ctrl-C at the n-th step from now on, once."""
    clip, calls = nn.utils.clip_grad_norm_, [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            raise error
        return clip(*arguments, **options)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", counted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one piece, with its memory."""
    out = tmp_path_factory.mktemp("whole")
    with tiny.registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda out, *_: reported(out))
        patch.setattr(parts, "PARTS", tuple(map(quick, parts.PARTS)))
        finish(out, keep_memories=True)
    return out


def copied(whole: Path, out: Path) -> Path:
    """A finished job with its memory, to be asked again."""
    shutil.copytree(whole, out)
    return out


def same_memories(one: Path, other: Path) -> None:
    memories = [dualform.open(run_folder(out).memory) for out in (one, other)]
    assert memories[0].steps == memories[1].steps == STEPS
    for name in (record.name for record in memories[0].manifest.parameters):
        assert torch.equal(memories[0].final(name), memories[1].final(name)), name
    for weight in range(len(memories[0].manifest.weights)):
        events = [list(memory.blocks(weight, STEPS)) for memory in memories]
        for name in ("keys", "gradients", "examples", "steps"):
            columns = [torch.cat([getattr(block, name) for block in blocks]) for blocks in events]
            assert torch.equal(*columns), (weight, name)


@pytest.mark.parametrize("step", [EVERY + 1, EVERY + 5, STEPS])
def test_training_goes_on_at_its_checkpoint_as_if_nothing_had_happened(
    step: int, whole: Path, tmp_path: Path, done: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = tiny.quiet()
    with monkeypatch.context() as patch:
        interrupted_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            reproduce(job(tmp_path, keep_memories=True), console)
    assert "Stopped. The same command goes on where it stopped." in tiny.said(console)
    assert not (tmp_path / "report.html").exists()
    assert done.computed == []
    steps = []
    with monkeypatch.context() as patch:
        clip = nn.utils.clip_grad_norm_
        patch.setattr(nn.utils, "clip_grad_norm_", lambda *given, **named: steps.append(1) or clip(*given, **named))
        finish(tmp_path, keep_memories=True)
    assert len(steps) == STEPS - (step - 1) // EVERY * EVERY
    same_memories(whole, tmp_path)
    same_results(results(tmp_path), results(whole))
    assert dualform.open(run_folder(tmp_path).memory).certificate().exact
    assert (tmp_path / "report.html").exists()


def test_a_run_that_was_taken_up_says_at_which_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupted_at(patch, EVERY + 3)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    finish(tmp_path)
    file = run_folder(tmp_path).path / "training.json"
    assert json.loads(file.read_text())["result"] == {"resumed_at": EVERY}


def test_continual_learning_goes_on_in_its_second_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"name": "continual", "steps": 12}
    finish(tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        interrupted_at(patch, 18)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path / "parts", **options)
    finish(tmp_path / "parts", **options)
    same_results(results(tmp_path / "parts", **options), results(tmp_path / "whole", **options))


@pytest.mark.parametrize("step", [1, EVERY])
def test_before_the_first_checkpoint_training_begins_anew(
    step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupted_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    assert not (run_folder(tmp_path).path / "checkpoint.safetensors").exists()
    finish(tmp_path, keep_memories=True)
    same_memories(whole, tmp_path)
    same_results(results(tmp_path), results(whole))


CHILD = """
import os, signal, sys
from pathlib import Path
from torch import nn
import tiny
from dualform.experiments import training
from dualform.experiments.paper import Job, reproduce
training.EVERY = 8
clip, calls = nn.utils.clip_grad_norm_, []
def counted(*given, **named):
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*given, **named)
nn.utils.clip_grad_norm_ = counted
with tiny.registered():
    reproduce(Job("single", Path(sys.argv[1]), runs=1, steps=24), tiny.quiet())
"""


def test_a_killed_process_loses_nothing_that_it_kept(whole: Path, tmp_path: Path, done: Counted) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(2 * EVERY + 4)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    checkpoint = load_file(run_folder(tmp_path).path / "checkpoint.safetensors")
    assert torch.equal(checkpoint["weight/fc1.weight"], tiny.twin("single").weights[2 * EVERY]["fc1.weight"])
    finish(tmp_path, keep_memories=True)
    assert done.trained == [0]
    same_memories(whole, tmp_path)
    same_results(results(tmp_path), results(whole))


@pytest.mark.parametrize("damage", ["cut off", "empty", "of another step"])
def test_a_checkpoint_that_cannot_be_used_is_no_dead_end(
    damage: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupted_at(patch, EVERY + 3)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    checkpoint = run_folder(tmp_path).path / "checkpoint.safetensors"
    if damage == "of another step":
        save_file(load_file(checkpoint), checkpoint, {"step": str(2 * EVERY)})  # further than the memory reaches
    else:
        checkpoint.write_bytes(checkpoint.read_bytes()[: 1000 if damage == "cut off" else 0])
    finish(tmp_path, keep_memories=True)
    same_memories(whole, tmp_path)
    same_results(results(tmp_path), results(whole))


def test_an_interrupted_analysis_keeps_its_finished_parts(
    whole: Path, tmp_path: Path, done: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(run: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        broken = tuple(replace(part, compute=stop) if part.name == "spotlights" else part for part in parts.PARTS)
        patch.setattr(parts, "PARTS", broken)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    assert (done.trained, done.computed) == ([0], ["checks", "votes"])
    kept = {name: found for name, found in files(tmp_path).items() if name.endswith(".json")}
    assert {Path(name).stem for name in kept if "seed-0/" in name and "memory" not in name} == {
        "training",
        "checks",
        "votes",
    }
    done.clear()
    finish(tmp_path)
    assert (done.trained, done.computed, done.drawn) == ([], ["spotlights", "pushes"], 1)
    after = files(tmp_path)
    assert all(after[name] == found for name, found in kept.items() if "memory" not in name)
    same_results(results(tmp_path), results(whole))


def test_what_is_finished_is_not_done_again(tmp_path: Path, done: Counted) -> None:
    finish(tmp_path)
    before = files(tmp_path)
    done.clear()
    assert f"Everything is there already: {tmp_path / 'report.html'}" in finish(tmp_path)
    assert done == Counted()
    assert files(tmp_path) == before


def test_more_runs_are_added_to_those_there_are(tmp_path: Path, done: Counted) -> None:
    finish(tmp_path)
    first = {name: found for name, found in files(tmp_path).items() if "seed-0" in name}
    done.clear()
    finish(tmp_path, runs=2)
    assert (done.trained, done.computed, done.drawn) == ([1], ["checks", "votes"], 1)
    after = files(tmp_path)
    assert {name: found for name, found in after.items() if "seed-0" in name} == first
    found = json.loads((tmp_path / "results.json").read_text())
    assert [run["seed"] for run in found["experiments"]["single"]["runs"]] == [0, 1]
    assert found["experiments"]["single"]["summary"]["accuracy"]["upright"]["runs"] == 2
    # Asked for one run again, the report is of one run, from what is there.
    done.clear()
    finish(tmp_path)
    assert (done.trained, done.computed, done.drawn) == ([], [], 1)
    assert json.loads((tmp_path / "results.json").read_text())["request"]["runs"] == 1


def test_another_first_seed_gets_its_figures(tmp_path: Path, done: Counted) -> None:
    finish(tmp_path, runs=2, steps=3)
    done.clear()
    finish(tmp_path, runs=1, seed=1, steps=3)
    assert done.trained == [1]
    assert done.computed == ["spotlights", "pushes"]
    assert json.loads((tmp_path / "results.json").read_text())["experiments"]["single"]["runs"][0]["seed"] == 1


def test_other_steps_are_other_runs(tmp_path: Path, done: Counted) -> None:
    finish(tmp_path, steps=3)
    finish(tmp_path, steps=4)
    assert done.trained == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"single-3-seed-0", "single-4-seed-0"}
    done.clear()
    finish(tmp_path, steps=3)
    assert (done.trained, done.drawn) == ([], 1)


def test_a_memory_is_deleted_after_its_analysis(tmp_path: Path) -> None:
    finish(tmp_path)
    assert {path.name for path in run_folder(tmp_path).path.iterdir()} == {
        f"{name}.json" for name in ("training", "checks", "votes", "spotlights", "pushes")
    }


def test_a_memory_that_was_not_deleted_in_time_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path, **options: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    assert run_folder(tmp_path).missing() == ()
    finish(tmp_path)
    assert not run_folder(tmp_path).memory.exists()


def test_a_memory_is_kept_where_that_is_asked_for(whole: Path, tmp_path: Path, done: Counted) -> None:
    memory = dualform.open(run_folder(whole).memory)
    assert memory.steps == STEPS
    assert memory.manifest.recipe == "tiny"
    out = copied(whole, tmp_path / "copy")
    said = finish(out, keep_memories=True)
    assert done == Counted()
    assert "Everything is there already" in said


def test_the_command_to_ask_a_kept_memory_is_told_and_works(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied(whole, tmp_path / "copy")
    (out / "results.json").unlink()
    said = finish(out, keep_memories=True)
    told = next(line for line in said.splitlines() if line.startswith("Ask the memories:"))
    assert told.endswith(f"query {run_folder(out).memory}")
    with pytest.raises(SystemExit) as stop:
        main(["query", str(run_folder(out).memory), "--layer", "fc2", "--top", "1"])
    assert stop.value.code in (0, None)
    assert "The model answers" in capsys.readouterr().out


def test_memories_that_are_wanted_later_are_trained_again(tmp_path: Path, done: Counted) -> None:
    finish(tmp_path)
    before = {name: found for name, found in files(tmp_path).items() if not name.endswith("training.json")}
    done.clear()
    finish(tmp_path, keep_memories=True)
    assert (done.trained, done.computed) == ([0], [])
    assert dualform.open(run_folder(tmp_path).memory).steps == STEPS
    after = files(tmp_path)
    assert all(after[name] == found for name, found in before.items() if "runs" in name)
    done.clear()
    finish(tmp_path, keep_memories=True)
    assert done == Counted()


def test_a_kept_memory_that_the_user_deleted_is_trained_again(whole: Path, tmp_path: Path, done: Counted) -> None:
    out = copied(whole, tmp_path / "copy")
    shutil.rmtree(run_folder(out).memory)
    finish(out, keep_memories=True)
    assert (done.trained, done.computed) == ([0], [])
    same_memories(whole, out)


@pytest.mark.parametrize("content", ["", '{"format": 1, "sec', '{"format": 99, "seconds": 1, "result": {}}', "[1, 2]"])
def test_a_part_that_cannot_be_read_is_computed_again(content: str, whole: Path, tmp_path: Path, done: Counted) -> None:
    out = copied(whole, tmp_path / "copy")
    (run_folder(out).path / "votes.json").write_text(content)
    finish(out, keep_memories=True)
    assert (done.trained, done.computed) == ([], ["votes"])
    same_results(results(out), results(whole))


def test_a_part_that_is_lost_after_the_memory_trains_again(whole: Path, tmp_path: Path, done: Counted) -> None:
    finish(tmp_path)
    (run_folder(tmp_path).path / "pushes.json").unlink()
    done.clear()
    finish(tmp_path)
    assert (done.trained, done.computed) == ([0], ["pushes"])
    same_results(results(tmp_path), results(whole))
    assert not run_folder(tmp_path).memory.exists()


def test_a_report_of_another_format_or_request_is_drawn_again(whole: Path, tmp_path: Path, done: Counted) -> None:
    out = copied(whole, tmp_path / "copy")
    file = out / "results.json"
    expected = json.loads(file.read_text())
    for content in ("", "{}", json.dumps(expected | {"format": store.FORMAT + 1}), None):
        file.unlink() if content is None else file.write_text(content)
        done.clear()
        finish(out, keep_memories=True)
        assert (done.trained, done.computed, done.drawn) == ([], [], 1), content
        assert json.loads(file.read_text()) == expected
    (out / "report.html").unlink()
    finish(out, keep_memories=True)
    assert (out / "report.html").exists()


def test_a_results_file_that_is_no_object_is_written_again(whole: Path, tmp_path: Path) -> None:
    out = copied(whole, tmp_path / "copy")
    (out / "results.json").write_text("[]")
    finish(out, keep_memories=True)
    assert json.loads((out / "results.json").read_text())["format"] == store.FORMAT


def little_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free))


def test_too_little_room_is_refused_before_training(
    tmp_path: Path, done: Counted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    little_room(monkeypatch, 10**8)
    with pytest.raises(BadCall, match=r"may take 0\.1 GB, but only 0\.1 GB are free in .* \(--out\) or fewer steps"):
        finish(tmp_path / "out")
    assert done == Counted()
    assert called("single", "--out", tmp_path / "out", "--steps", "24", "--runs", "1") == 2
    assert "Choose another place (--out) or fewer steps (--steps)." in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


def test_kept_memories_need_room_for_all_of_them(
    tmp_path: Path, done: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.NETWORK()
    floats = sum(layer.in_features + layer.out_features for layer in (model.fc0, model.fc1, model.fc2))
    one = round(1.3 * 1.05 * 4 * 128 * floats * 3000)
    little_room(monkeypatch, 10**8 + 2 * one)
    with pytest.raises(BadCall, match="are free in"):
        finish(tmp_path, steps=3000, runs=3, keep_memories=True)
    little_room(monkeypatch, 10**8 + one // 2)
    with pytest.raises(BadCall, match="are free in"):
        finish(tmp_path, steps=3000, runs=3)
    assert done == Counted()
    # Where memories are deleted one after the other, room for one is enough.
    little_room(monkeypatch, 10**8 + 2 * one)
    interrupted_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        finish(tmp_path, steps=3000, runs=3)
    assert done.trained == [0]


def test_finished_work_needs_no_room(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = copied(whole, tmp_path / "copy")
    (out / "results.json").unlink()
    little_room(monkeypatch, 0)
    finish(out, keep_memories=True)


def full_disk(monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    """No space is left when a segment is to get its name; training itself goes on, as the recorder promises."""
    rename = disk.rename

    def full(source: Path, target: Path) -> None:
        if target.name == f"r000-{segment:06}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(disk, "rename", full)


def test_a_recording_that_stopped_gives_no_results(
    tmp_path: Path, done: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded until the disk was full must not pass for the whole run."""
    full_disk(monkeypatch, segment=1)
    with pytest.raises((DualformError, OSError)):
        finish(tmp_path)
    assert done.computed == []
    assert not (tmp_path / "report.html").exists()


def test_after_a_full_disk_the_job_can_go_on(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full_disk(patch, segment=1)
        with suppress(DualformError, OSError):
            finish(tmp_path, keep_memories=True)
    for file in run_folder(tmp_path).path.glob("*.json"):
        file.unlink()
    finish(tmp_path, keep_memories=True)
    same_memories(whole, tmp_path)
    same_results(results(tmp_path), results(whole))


def called(*arguments: str | Path) -> int:
    return call("reproduce", *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": 0}, "--runs must be at least 1, not 0"),
        ({"runs": -3}, "--runs must be at least 1, not -3"),
        ({"seed": -1}, "--seed must be at least 0, not -1"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"steps": -5}, "steps must be at least 1, not -5"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    options: dict[str, int], message: str, tmp_path: Path, done: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadCall, match=message):
        finish(tmp_path / "out", **options)
    flat = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    assert called("single", "--out", tmp_path / "out", *flat) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("dualform: ")
    assert done == Counted()
    assert not (tmp_path / "out").exists()


def test_places_and_names_that_cannot_be_are_refused(
    tmp_path: Path, done: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadCall, match=r"--out .*file is a file; give a directory"):
        finish(tmp_path / "file")
    with pytest.raises(BadCall, match="There is no experiment 'triple'"):
        finish(tmp_path, name="triple")
    assert called("single", "--out", tmp_path / "file") == 2
    assert "is a file; give a directory" in capsys.readouterr().err
    assert called("single", "--out", tmp_path / "file" / "below") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert called("triple", "--out", tmp_path) == 2
    assert "triple" in capsys.readouterr().err
    assert called("single", "--steps", "many") == 2
    assert done == Counted()
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_line_does_the_whole_job(tmp_path: Path, done: Counted, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--runs", "2", "--steps", "3", "--seed", "5", "--keep-memories"]
    assert called("joint", "--out", tmp_path, *arguments) == 0
    text = capsys.readouterr().out
    assert "Joint training: both, seed 5 (1 of 2 runs), 3 steps" in text.replace("\n", " ")
    assert (done.trained, done.drawn) == ([5, 6], 1)
    assert done.computed == ["checks", "crossings", "spotlights", "pushes", "checks", "crossings"]
    assert (tmp_path / "runs" / "joint-3-seed-6" / "memory").is_dir()
    assert json.loads((tmp_path / "results.json").read_text())["request"] == {
        "experiments": "joint",
        "runs": 2,
        "seed": 5,
        "steps": 3,
    }


def test_ctrl_c_is_exit_code_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(monkeypatch, 2)
    assert called("single", "--out", tmp_path, "--runs", "1", "--steps", "3") == 130


def test_all_images_are_three_experiments(tmp_path: Path) -> None:
    assert [one.name for one in Job("images", tmp_path, steps=3).experiments] == ["single", "joint", "continual"]
    assert [len(folders) for _, folders in Job("images", tmp_path, runs=4).folders] == [4, 4, 4]
