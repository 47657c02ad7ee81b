"""`dualform export`: other tools read what is exported, and it is what the memory holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import dualform
import small
from dualform.cli import main
from dualform.view import export as module

Usage = namedtuple("Usage", "total used free")
COLOURS = ["red", "green", "blue", "green"] * 5


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, nn.Module]:
    """Seven steps in four segments, one of them cut by a resumed run; the first layer's keys come again."""
    torch.manual_seed(0)
    model, inputs = small.network(), torch.randn(20, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    columns = {"label": torch.arange(20) % 4, "colour": COLOURS, "image": torch.zeros(20, 2, 2, dtype=torch.uint8)}
    path, saved = tmp_path / "run", {}

    def train(recorder: Any, steps: range) -> None:
        for step in steps:
            ids, _, target = small.batch(step)
            with recorder.batch(ids):
                nn.functional.cross_entropy(model(inputs[ids]), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 4):
                recorder.commit()
            if step == 5:
                saved.update(deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    with dualform.record(model, optimizer, path, examples=columns) as recorder:
        train(recorder, range(1, 7))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with dualform.record(model, optimizer, path, resume_at=5) as recorder:
        train(recorder, range(6, 8))
    return path, model


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["export", *(str(argument) for argument in arguments)])
    return int(stop.value.code or 0)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert call(*arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("dualform: ")
    assert "Traceback" not in streams.err
    return streams.err


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_scores_from_the_files_are_the_memorys(
    run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = run
    out = tmp_path / "new" / "out"
    assert call(path, "--out", out) == 0
    assert "its README.txt says how to read them" in capsys.readouterr().out
    assert names(out) == [
        "README.txt",
        "events-0.weight.parquet",
        "events-2.weight.parquet",
        "examples.parquet",
        "keys-0.weight.npy",
        "keys-2.weight.npy",
    ]
    spotlight = dualform.open(path).attend(model, torch.randn(3, 6, dtype=torch.float64))
    for layer in ("0", "2"):
        events = pd.read_parquet(out / f"events-{layer}.weight.parquet")
        keys = np.load(out / f"keys-{layer}.weight.npy")
        queries = spotlight[layer].queries.numpy()
        scores = (keys @ queries.T)[events["key"]].T
        np.testing.assert_allclose(scores, spotlight[layer].scores().numpy(), rtol=1e-6, atol=1e-7)
        every = spotlight[layer].top(len(events))
        order = every.events[0].argsort()
        assert events["event"].tolist() == list(range(len(events)))
        for column, tensor in (("example", every.examples), ("step", every.steps), ("position", every.positions)):
            assert events[column].tolist() == tensor[0][order].tolist()
        assert set(events["use"]) == {0}
    assert len(np.load(out / "keys-0.weight.npy")) < len(events) == len(np.load(out / "keys-2.weight.npy"))


def test_values_from_the_files_are_the_memorys(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, model = run
    assert call(path, "--out", tmp_path / "out", "--gradients") == 0
    memory, inputs = dualform.open(path), torch.randn(1, 6, dtype=torch.float64)
    for layer in ("0", "2"):
        events = pd.read_parquet(tmp_path / "out" / f"events-{layer}.weight.parquet")
        keys = np.load(tmp_path / "out" / f"keys-{layer}.weight.npy")[events["key"]]
        gradients = np.load(tmp_path / "out" / f"gradients-{layer}.weight.npy")
        attention = memory.attend(model, inputs)[layer]
        alphas = keys @ attention.queries.numpy()[0]
        parts = (alphas * events["coefficient"] + events["bias_coefficient"]).to_numpy()[:, None] * gradients
        np.testing.assert_allclose(attention.initial().numpy()[0] + parts.sum(0), attention.output().numpy()[0])
        unit = attention.contributions(unit=1).scores().numpy()[0]
        np.testing.assert_allclose(parts[:, 1], unit, rtol=1e-5, atol=1e-8)


def test_examples_have_their_columns(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, _ = run
    dualform.open(path).annotate(
        id=torch.arange(22), half=torch.linspace(0, 1, 20).bfloat16(), good=np.arange(20) % 2 == 0
    )
    assert call(path, "--out", tmp_path / "out") == 0
    examples = pd.read_parquet(tmp_path / "out" / "examples.parquet")
    assert sorted(examples.columns) == ["colour", "good", "half", "id", "id_", "label"]
    assert examples["id"].tolist() == examples["id_"].tolist() == list(range(22))
    assert examples["label"][:20].tolist() == [number % 4 for number in range(20)]
    assert examples["colour"].dtype == "category"
    assert examples["colour"][:20].tolist() == COLOURS
    assert examples.loc[20:, ["colour", "label", "half"]].isna().all(axis=None)
    np.testing.assert_allclose(examples["half"][:20], torch.linspace(0, 1, 20).bfloat16().float())
    assert "left out, having more than one number an example: image" in (tmp_path / "out" / "README.txt").read_text()


def test_a_memory_without_columns_has_its_ids(tmp_path: Path) -> None:
    _, memory = small.run(tmp_path / "run")
    assert call(tmp_path / "run", "--out", tmp_path / "out") == 0
    assert pd.read_parquet(tmp_path / "out" / "examples.parquet")["id"].tolist() == list(
        range(memory.manifest.examples)
    )


def snippet(text: str, title: str) -> str:
    """The lines of README.txt under a title."""
    lines = text.split(f"\n{title}\n")[1].split("\n\n")[0]
    return textwrap.dedent(lines)


def test_what_the_readme_says_works(run: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: Any) -> None:
    path, model = run
    assert call(path, "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.txt").read_text(encoding="utf-8")
    assert text.startswith("Exported by dualform ")
    assert "0.weight: 35 events, " in text
    assert "use: 0 2" in text
    monkeypatch.chdir(tmp_path / "out")
    inputs = torch.randn(1, 6, dtype=torch.float64)
    attention = dualform.open(path).attend(model, inputs)["0"]
    space: dict[str, Any] = {"pd": pd, "np": np, "query": inputs[0].numpy(), "queries": inputs.float().numpy()}
    *code, last = snippet(text, "pandas").splitlines()
    exec("\n".join(code), space)
    best = eval(last, space)
    assert best["event"].tolist() == attention.top(10).events[0].tolist()
    assert best["colour"].tolist() == [COLOURS[example] for example in best["example"]]
    space["faiss"] = pytest.importorskip("faiss")
    *code, last = snippet(text, "faiss").splitlines()
    exec("\n".join(code), space)
    assert set(attention.top(5).events[0].tolist()) <= set(eval(last, space)["event"])


def test_one_layer(run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = run
    assert call(path, "--out", tmp_path / "out", "--layer", "2") == 0
    assert names(tmp_path / "out") == [
        "README.txt",
        "events-2.weight.parquet",
        "examples.parquet",
        "keys-2.weight.npy",
    ]
    capsys.readouterr()
    assert "'7' is not recorded; recorded layers: 0, 2" in complaint(
        capsys, path, "--out", tmp_path / "o", "--layer", "7"
    )
    assert not (tmp_path / "o").exists()


def test_keys_in_half_precision(tmp_path: Path) -> None:
    for dtype, expected in ((torch.bfloat16, np.float32), (torch.float16, np.float16)):
        model, name = nn.Linear(6, 4, dtype=dtype), str(dtype).removeprefix("torch.")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(5, 6).to(dtype)
        with dualform.record(model, optimizer, tmp_path / name) as recorder, recorder.batch(range(5)):
            model(inputs).sum().backward()
            optimizer.step()
        assert call(tmp_path / name, "--out", tmp_path / f"{name}-out", "--gradients") == 0
        keys = np.load(tmp_path / f"{name}-out" / "keys-weight.npy")
        assert keys.dtype == expected
        np.testing.assert_array_equal(keys, inputs.float().numpy())
        told = "recorded as bfloat16" in (tmp_path / f"{name}-out" / "README.txt").read_text(encoding="utf-8")
        assert told is (dtype == torch.bfloat16)
        assert np.load(tmp_path / f"{name}-out" / "gradients-weight.npy").dtype == expected


def test_without_gradients_there_are_no_coefficients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.run(tmp_path / "run", keep="keys")
    assert call(tmp_path / "run", "--out", tmp_path / "out") == 0
    events = pd.read_parquet(tmp_path / "out" / "events-0.weight.parquet")
    assert list(events.columns) == ["event", "step", "example", "position", "use", "backward", "key"]
    text = (tmp_path / "out" / "README.txt").read_text(encoding="utf-8")
    assert "have no values" in text
    assert "coefficient  " not in text
    capsys.readouterr()
    assert "keep='keys' holds no gradients" in complaint(
        capsys, tmp_path / "run", "--out", tmp_path / "no", "--gradients"
    )


class Odd(nn.Module):
    """A name that is a path, a weight of two uses, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a/b", nn.Linear(6, 6))
        self.add_module("a_b", nn.Linear(6, 6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.a_b.weight  # type: ignore[union-attr]
        self.idle = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.tied(self.a_b(self.get_submodule("a/b")(x)))  # type: ignore[operator]
        return result


def test_odd_names_shared_weights_and_idle_layers(tmp_path: Path) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder, recorder.batch(range(3)):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    assert call(tmp_path / "run", "--out", tmp_path / "out") == 0
    found = {name for name in names(tmp_path / "out") if name.startswith("keys-")}
    assert found == {"keys-a_b.weight.npy", "keys-a_b.weight-1.npy", "keys-idle.weight.npy"}
    shared = pd.read_parquet(tmp_path / "out" / "events-a_b.weight-1.parquet")
    assert sorted(shared["use"]) == [0, 0, 0, 1, 1, 1]
    assert "use: 0 a_b, 1 tied" in (tmp_path / "out" / "README.txt").read_text(encoding="utf-8")
    assert len(pd.read_parquet(tmp_path / "out" / "events-idle.weight.parquet")) == 0
    assert np.load(tmp_path / "out" / "keys-idle.weight.npy").shape == (0, 6)


def test_many_small_blocks_make_the_same_files(
    run: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualform.view import parquet

    path, _ = run
    assert call(path, "--out", tmp_path / "whole", "--gradients") == 0
    monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(parquet, "ROWS", 3)
    assert call(path, "--out", tmp_path / "parts", "--gradients") == 0
    for file in names(tmp_path / "whole"):
        one, other = tmp_path / "whole" / file, tmp_path / "parts" / file
        if file.endswith(".parquet"):
            pd.testing.assert_frame_equal(pd.read_parquet(one), pd.read_parquet(other))
        else:
            assert one.read_bytes() == other.read_bytes()


def test_a_directory_with_something_in_it_is_refused(
    run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = run
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    text = complaint(capsys, path, "--out", out)
    assert "is not empty (it has notes.txt)" in text
    assert "--overwrite" in text
    assert call(path, "--out", out, "--overwrite") == 0
    assert (out / "notes.txt").read_text() == "mine"
    capsys.readouterr()
    assert "is a file" in complaint(capsys, path, "--out", out / "notes.txt")
    for inside in (path, path / "export"):
        assert "is a memory, or inside one" in complaint(capsys, path, "--out", inside, "--overwrite")


def test_overwriting_leaves_nothing_of_an_earlier_export(
    run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = run
    assert call(path, "--out", tmp_path / "out", "--gradients") == 0
    (tmp_path / "out" / "keys-old.npy.partial").write_text("left by a killed export")
    assert call(path, "--out", tmp_path / "out", "--overwrite", "--layer", "0") == 0
    assert names(tmp_path / "out") == [
        "README.txt",
        "events-0.weight.parquet",
        "examples.parquet",
        "keys-0.weight.npy",
    ]
    capsys.readouterr()
    (tmp_path / "out" / "README.txt").write_text("My own project")
    assert "was not written by an export" in complaint(capsys, path, "--out", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out" / "README.txt").read_text() == "My own project"


@pytest.mark.parametrize("failing", ["write_events", "_write_array", "write_examples", "guide"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_an_interrupted_export_leaves_nothing_that_looks_finished(
    failing: str,
    how: type[BaseException],
    run: tuple[Path, nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _ = run
    out = tmp_path / "out"
    assert call(path, "--out", out) == 0
    original: Callable[..., Any] = getattr(module, failing)
    calls: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(len(calls))
        done = original(*arguments)
        if len(calls) == 2 or failing in ("write_examples", "guide"):
            raise how("stop")
        return done

    monkeypatch.setattr(module, failing, interrupted)
    assert call(path, "--out", out, "--overwrite") == (130 if how is KeyboardInterrupt else 2)
    assert not [name for name in names(out) if name == "README.txt" or name.endswith(".partial")]
    for file in out.glob("*.npy"):
        np.load(file)
    for file in out.glob("*.parquet"):
        pd.read_parquet(file)
    monkeypatch.undo()
    assert call(path, "--out", out, "--overwrite") == 0
    assert "README.txt" in names(out)


def test_a_disk_without_room_is_told_first(
    run: tuple[Path, nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    text = complaint(capsys, run[0], "--out", tmp_path / "not" / "there")
    assert "0.00 GB are free" in text
    assert "--out" in text
    assert not (tmp_path / "not").exists()


def test_an_empty_memory_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run"):
        pass
    assert "holds no step yet" in complaint(capsys, tmp_path / "run", "--out", tmp_path / "out")
    assert "there is no directory" in complaint(capsys, tmp_path / "none", "--out", tmp_path / "out")


def test_a_missing_extra_gives_the_command_to_type(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    arguments = ["export", str(run[0]), "--out", str(tmp_path / "out")]
    code = f"import sys; sys.modules['pyarrow'] = None; from dualform.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'dualform[table]'" in done.stderr
    assert "Traceback" not in done.stderr
