"""`dualform query`: what it answers is what the library answers, and every mistake is explained."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import dualform
import small
from commands import answered, call
from dualform.experiments.asking.conditions import condition
from dualform.experiments.matches import best_examples
from dualform.experiments.recipes import RECIPES, recipe
from dualform.experiments.training import batches, train
from dualform.view import replies
from dualform.view.imagefiles import read_image

STEPS = 25
DIGITS = recipe("digits")
DOCS = Path(__file__).parents[1] / "docs" / "cli.md"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A memory of a short training on the digits, and the model it leads to."""
    path = tmp_path_factory.mktemp("query") / "digits"
    torch.manual_seed(0)
    model = DIGITS.model()
    data = DIGITS.load()
    train(model, DIGITS, data, path, list(batches(len(data.train), STEPS, seed=0)))
    return path, model


@pytest.fixture(scope="module")
def run(digits: tuple[Path, nn.Module]) -> Path:
    return digits[0]


def pictures() -> Tensor:
    return DIGITS.load().test.images


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a wrong call says: on stderr, in one message, with exit code 2."""
    assert call("query", *arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("dualform: ")
    assert "Traceback" not in streams.err
    return streams.err


def test_tables_show_the_answer_of_every_layer(
    digits: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = digits
    assert call("query", path, "--test", "5", "--top", "3") == 0
    streams = capsys.readouterr()
    assert streams.err == ""
    inputs = DIGITS.preprocess(pictures()[5:6])
    answer = int(model(inputs).argmax())
    assert "digits test image 5" in streams.out
    assert f"The model answers {answer} with probability 0." in streams.out
    assert "Logits  " in streams.out
    blocks = re.split(r"\n(?=fc\d: the 3 largest scores of events\n)", streams.out)[1:]
    spotlight = dualform.open(path).attend(model, inputs)
    label = DIGITS.load().train.labels
    for block, layer in zip(blocks, spotlight, strict=True):
        top = spotlight[layer].top(3)
        header, _, *rows = block.splitlines()[1:6]
        assert header.split() == ["rank", "score", "event", "example", "step", "label"]
        found = [[float(cell.replace(",", "")) for cell in row.split()] for row in rows]
        numbers = (top.scores[0], top.events[0], top.examples[0], top.steps[0], label[top.examples[0]])
        expected = torch.stack([torch.arange(1, 4).double(), *(column.double() for column in numbers)], dim=1)
        torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-5, atol=0)
    assert "rows" in streams.out.split("\nHow: ")[1]


QUESTIONS: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    ([], {}, {}),
    (["--order", "smallest"], {"order": "smallest"}, {}),
    (["--order", "absolute"], {"order": "absolute"}, {}),
    (["--where", "label=3,8", "--where", "step=5:20"], {}, {"label": [3, 8], "step": slice(5, 20)}),
    (["--within", "label"], {"within": "label"}, {}),
    (["--within", "label,step", "--where", "step=:3"], {"within": ("label", "step")}, {"step": slice(None, 3)}),
]


@pytest.mark.parametrize(("options", "asked", "where"), QUESTIONS)
def test_json_is_the_librarys_answer(
    options: list[str],
    asked: dict[str, Any],
    where: dict[str, Any],
    digits: tuple[Path, nn.Module],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, model = digits
    reply = answered(capsys, path, "--top", "4", *options)
    spotlight = dualform.open(path).attend(model, DIGITS.preprocess(pictures()[:1]))
    assert [layer["layer"] for layer in reply["layers"]] == list(spotlight)
    for layer in reply["layers"]:
        top = spotlight[layer["layer"]].where(**where).top(4, **asked)
        (query,) = layer["queries"]
        flat = [getattr(top, name).reshape(-1) for name in ("scores", "events", "examples", "steps")]
        real = flat[1] >= 0
        rows = query["rows"]
        assert [row["score"] for row in rows] == flat[0][real].tolist()
        assert [row["event"] for row in rows] == flat[1][real].tolist()
        assert [row["example"] for row in rows] == flat[2][real].tolist()
        assert [row["step"] for row in rows] == flat[3][real].tolist()
        labels = DIGITS.load().train.labels[flat[2][real]].tolist()
        assert [row["columns"] for row in rows] == [{"label": label} for label in labels]
        assert [row["class_name"] for row in rows] == [str(label) for label in labels]
        if "within" in asked:
            assert top.groups is not None
            groups = [list(g) if isinstance(g, tuple) else g for g in top.groups for _ in range(4)]
            assert [row["group"] for row in rows] == [
                g for g, there in zip(groups, real.tolist(), strict=True) if there
            ]
        assert "rows" in layer["explain"]
        assert layer["weight"] == f"{layer['layer']}.weight"


def test_sums_contributions_and_totals_are_the_librarys(
    digits: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = digits
    options = ["--layer", "fc2", "--top", "3", "--by", "example", "--contributions", "3", "--totals", "label"]
    reply = answered(capsys, path, *options)
    asked = dualform.open(path).attend(model, DIGITS.preprocess(pictures()[:1]))["fc2"].contributions(unit=3)
    (layer,) = reply["layers"]
    (query,) = layer["queries"]
    top, totals = asked.top(3, by="example"), asked.totals(by="label")
    assert [row["group"] for row in query["rows"]] == top.groups[0]
    assert [row["score"] for row in query["rows"]] == top.scores[0].tolist()
    assert [row["events"] for row in query["rows"]] == top.counts[0].tolist()
    assert all(set(row["columns"]) == {"label"} for row in query["rows"])
    assert [total["group"] for total in query["totals"]] == list(totals.groups)
    assert [total["total"] for total in query["totals"]] == totals.values[0].tolist()
    assert call("query", path, *options) == 0
    text = capsys.readouterr().out
    assert "fc2: the 3 largest contributions to output 3 of groups by example" in text
    assert "totals by label" in text


def test_an_earlier_step_is_asked_of_the_model_of_that_step(
    digits: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = digits
    reply = answered(capsys, path, "--until", "10", "--top", "2", "--layer", "fc1", "--layer", "fc0")
    memory, inputs = dualform.open(path), DIGITS.preprocess(pictures()[:1])
    spotlight = memory.attend(model, inputs, until=10)
    assert [layer["layer"] for layer in reply["layers"]] == ["fc1", "fc0"]
    for layer in reply["layers"]:
        top = spotlight[layer["layer"]].top(2)
        assert [row["score"] for row in layer["queries"][0]["rows"]] == top.scores[0].tolist()
    best = memory.dual(model, until=10)(inputs)[0].max().item()
    assert reply["predictions"][0]["top"][0]["value"] == pytest.approx(best, rel=1e-6)
    assert (reply["until"], reply["steps"]) == (10, STEPS)
    assert call("query", path, "--until", "0", "--layer", "fc0") == 0
    text = capsys.readouterr().out
    assert f"after step 0 of {STEPS}" in text
    assert "no event" in text


def test_predictions_are_the_models(digits: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    path, model = digits
    (prediction,) = answered(capsys, path, "--test", "7", "--layer", "fc2")["predictions"]
    logits = model(DIGITS.preprocess(pictures()[7:8]))[0]
    best = logits.topk(3)
    assert [one["unit"] for one in prediction["top"]] == best.indices.tolist()
    assert [one["value"] for one in prediction["top"]] == pytest.approx(best.values.tolist(), rel=1e-6)
    assert [one["class_name"] for one in prediction["top"]] == [str(unit) for unit in best.indices.tolist()]
    assert prediction["probability"] == pytest.approx(logits.softmax(0).max().item(), rel=1e-6)
    assert prediction["label"] == str(int(DIGITS.load().test.labels[7]))


def test_classes_with_names_are_shown_by_name(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tuple(f"the digit {number}" for number in range(10))
    monkeypatch.setitem(
        RECIPES, "digits", dataclasses.replace(DIGITS, tasks=(dataclasses.replace(DIGITS.tasks[0], class_names=named),))
    )
    assert call("query", run, "--layer", "fc2", "--top", "2", "--totals", "label") == 0
    text = capsys.readouterr().out
    assert "The model answers the digit " in text
    assert re.search(r"step +label +class *\n", text)
    assert re.search(r"9 +-?[\d.,]+ +the digit 9", text)
    (layer,) = answered(capsys, run, "--layer", "fc2", "--by", "label", "--top", "2")["layers"]
    assert all(row["class_name"] == named[row["group"]] for row in layer["queries"][0]["rows"])


def test_every_key_of_the_json_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    records = [thing for thing in vars(replies).values() if dataclasses.is_dataclass(thing)]
    names = {field.name for record in records for field in dataclasses.fields(record)}
    assert len(names) > 30
    assert not {name for name in names if f"`{name}`" not in text}


def test_an_image_of_the_right_size_is_asked_about_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "three.png"
    Image.fromarray(pictures()[0].numpy()).save(file)
    ours = answered(capsys, run, "--image", file, "--top", "2")
    recipes = answered(capsys, run, "--top", "2")
    assert ours["layers"] == recipes["layers"]
    assert ours["inputs"] == "three.png"
    assert ours["notes"] == []
    assert ours["predictions"][0]["label"] is None
    assert call("query", run, "--image", file, "--layer", "fc0") == 0
    assert "which is" not in capsys.readouterr().out


def drawn(size: tuple[int, int] = (64, 64)) -> Image.Image:
    """A bright bar on a dark ground."""
    pixels = np.zeros(size[::-1], dtype=np.uint8)
    pixels[size[1] // 8 : -size[1] // 8, 3 * size[0] // 8 : 5 * size[0] // 8] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "CMYK", "1", "I;16", "I", "F", "YCbCr"])
def test_any_mode_becomes_the_same_grey(mode: str, tmp_path: Path) -> None:
    file = tmp_path / ("image.png" if mode in ("L", "RGB", "RGBA", "LA", "P", "1", "I;16") else "image.tiff")
    image = drawn()
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    image.convert(mode).save(file)
    found, notes = read_image(file, 8, 8)
    expected, _ = read_image(_saved(drawn(), tmp_path / "plain.png"), 8, 8)
    assert found.shape == (8, 8)
    assert (found.int() - expected.int()).abs().max() <= 2
    assert notes == ()


def test_what_is_transparent_gets_a_ground_on_which_the_ink_is_seen(tmp_path: Path) -> None:
    bar = drawn()
    for ink, expected in ((0, True), (255, False)):
        image = Image.new("RGBA", bar.size, (ink, ink, ink, 0))
        image.putalpha(bar)
        pixels, notes = read_image(_saved(image, tmp_path / "ink.png"), 8, 8)
        assert int(pixels.max()) - int(pixels.min()) > 200
        assert any("--invert" in note for note in notes) is expected


def test_an_image_of_another_shape_keeps_its_proportions(tmp_path: Path) -> None:
    pixels, notes = read_image(_saved(Image.new("L", (40, 10), 200), tmp_path / "wide.png"), 8, 8, invert=True)
    assert pixels.shape == (8, 8)
    assert pixels.unique().tolist() == [55]
    assert notes == ("the image has 40 × 10 pixels: it was fitted into 8 × 8.",)
    tiny, _ = read_image(_saved(Image.new("L", (1, 1), 9), tmp_path / "tiny.png"), 28, 28)
    assert tiny.unique().tolist() == [9]
    thin, _ = read_image(_saved(Image.new("L", (1, 3000), 9), tmp_path / "thin.png"), 8, 8)
    assert thin.shape == (8, 8)


def test_dark_ink_on_light_paper_is_noticed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = _saved(Image.fromarray(255 - np.asarray(drawn())), tmp_path / "paper.png")
    assert call("query", run, "--image", paper, "--layer", "fc0") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Note: the border is bright" in text
    assert "ask again with --invert" in text
    reply = answered(capsys, run, "--image", paper, "--invert", "--layer", "fc0")
    assert reply["notes"] == []
    straight = answered(capsys, run, "--image", _saved(drawn(), tmp_path / "bar.png"), "--layer", "fc0")
    assert straight["layers"] == reply["layers"]
    (note,) = answered(capsys, run, "--image", tmp_path / "bar.png", "--invert")["notes"]
    assert "ask without --invert" in note


def _saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_images_that_cannot_be_read_are_explained(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no such file" in complaint(capsys, run, "--image", tmp_path / "nothing.png")
    assert "this is no file" in complaint(capsys, run, "--image", tmp_path)
    (tmp_path / "text.png").write_text("no image")
    assert "cannot be read as an image" in complaint(capsys, run, "--image", tmp_path / "text.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    whole = _saved(Image.fromarray(noise), tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read as an image" in complaint(capsys, run, "--image", tmp_path / "cut.png")
    Image.fromarray(np.full((4, 4), -5.0, dtype=np.float32)).save(tmp_path / "negative.tiff")
    assert "from -5 to -5" in complaint(capsys, run, "--image", tmp_path / "negative.tiff")


def test_several_inputs_in_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = pictures()[:5].contiguous()
    save_file({"images": images}, tmp_path / "pixels.safetensors")
    save_file({"x": DIGITS.preprocess(images)}, tmp_path / "floats.safetensors")
    pixels = answered(capsys, run, "--inputs", tmp_path / "pixels.safetensors", "--top", "2")
    floats = answered(capsys, run, "--inputs", tmp_path / "floats.safetensors", "--top", "2")
    assert pixels["layers"] == floats["layers"]
    assert [layer["query_shape"] for layer in pixels["layers"]] == [[5]] * 3
    assert [query["index"] for query in pixels["layers"][0]["queries"]] == [[n] for n in range(5)]
    assert len(pixels["predictions"]) == 5
    one = answered(capsys, run, "--test", "4", "--top", "2")
    assert pixels["layers"][0]["queries"][4]["rows"] == one["layers"][0]["queries"][0]["rows"]
    assert call("query", run, "--inputs", tmp_path / "floats.safetensors", "--layer", "fc0", "--top", "1") == 0
    text = capsys.readouterr().out
    assert text.count("fc0: the largest score of events") == 3
    assert "floats.safetensors, query 2" in text
    assert "2 more queries are not shown: --json has all of them." in text


def test_one_image_without_a_batch_dimension(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"image": pictures()[0].contiguous()}, tmp_path / "one.safetensors")
    ours = answered(capsys, run, "--inputs", tmp_path / "one.safetensors")
    assert ours["layers"] == answered(capsys, run)["layers"]


def test_files_of_tensors_that_do_not_fit_are_explained(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no such file" in complaint(capsys, run, "--inputs", tmp_path / "no.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors in here")
    assert "must be a safetensors file" in complaint(capsys, run, "--inputs", tmp_path / "text.safetensors")
    save_file({}, tmp_path / "empty.safetensors")
    assert "holds no tensor" in complaint(capsys, run, "--inputs", tmp_path / "empty.safetensors")
    save_file({"x": torch.rand(2, 9, 9)}, tmp_path / "nine.safetensors")
    text = complaint(capsys, run, "--inputs", tmp_path / "nine.safetensors")
    assert "cannot take these inputs (one tensor: float32 [2, 9, 9])" in text
    save_file({"a": torch.rand(2, 8, 8), "b": torch.rand(2)}, tmp_path / "two.safetensors")
    text = complaint(capsys, run, "--inputs", tmp_path / "two.safetensors")
    assert "holds the tensors a, b" in text
    assert "forward(images" in text


MODULE = """
import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.fc = nn.Linear(6, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)

    def forward(self, left, right):
        return self.norm(self.fc(left + right))


def single():
    return Pair(torch.float32)


def wide():
    return nn.Linear(3, 3)


def broken():
    raise RuntimeError("no licence")


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory without a recipe, and its model in a module of the user's, in the directory they are in."""
    (tmp_path / "own_models.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    for name in ("own_models", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    space: dict[str, Any] = {}
    exec(MODULE, space)
    torch.manual_seed(0)
    model = space["Pair"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    columns = {"colour": ["red", "a,b", "red", "blue"] * 5, "weight": torch.arange(20) / 2, "odd": [False, True] * 10}
    with dualform.record(model, optimizer, tmp_path / "run", examples=columns) as recorder:
        for step in range(4):
            ids, x, _ = small.batch(step)
            with recorder.batch(ids):
                model(x, 2 * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    save_file(model.eval().state_dict(), tmp_path / "state.safetensors")
    torch.manual_seed(1)
    tensors = {"left": torch.randn(2, 6, dtype=torch.float64), "right": torch.randn(2, 6, dtype=torch.float64)}
    save_file(tensors, tmp_path / "inputs.safetensors")
    return tmp_path / "run"


def test_a_model_of_the_users_gets_the_memorys_weights(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reply = answered(capsys, own, "--model", "own_models:Pair", "--inputs", "inputs.safetensors", "--top", "3")
    from safetensors.torch import load_file

    space: dict[str, Any] = {}
    exec(MODULE, space)
    model = space["Pair"]()
    model.load_state_dict(load_file("state.safetensors"))
    inputs = load_file("inputs.safetensors")
    top = dualform.open(own).attend(model, inputs)["fc"].top(3)
    for number, query in enumerate(reply["layers"][0]["queries"]):
        assert [row["score"] for row in query["rows"]] == top.scores[number].tolist()
        assert [row["example"] for row in query["rows"]] == top.examples[number].tolist()
        assert set(query["rows"][0]["columns"]) == {"colour", "weight", "odd"}
    outputs = model.eval()(**inputs)
    assert reply["predictions"][1]["top"][0]["value"] == outputs[1].max().item()
    assert reply["predictions"][1]["probability"] is None
    assert reply["model"] == "own_models:Pair"
    assert call("query", own, "--model", "own_models:Pair", "--inputs", "inputs.safetensors") == 0
    text = capsys.readouterr().out
    assert "The model's largest output is number" in text
    assert "colour" in text


def test_a_model_that_is_one_layer_with_several_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(2, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, "run") as recorder, recorder.batch([0, 1]):
        model(torch.randn(2, 5, 4)).square().sum().backward()
        optimizer.step()
    save_file({"x": inputs}, "x.safetensors")
    (tmp_path / "line_model.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 3)\n")
    given = ["run", "--model", "line_model:make", "--inputs", "x.safetensors", "--top", "2"]
    reply = answered(capsys, *given)
    (layer,) = reply["layers"]
    assert (layer["layer"], layer["query_shape"]) == ("", [2, 2])
    assert [query["index"] for query in layer["queries"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [one["index"] for one in reply["predictions"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    top = dualform.open("run").attend(model, inputs)[""].top(2)
    assert [row["position"] for row in layer["queries"][3]["rows"]] == top.positions[3].tolist()
    assert call("query", *given) == 0
    text = capsys.readouterr().out
    assert "the model at [0, 1]: the 2 largest scores of events" in text
    assert "position" in text
    assert "1 more query is not shown" in text


def test_wrong_models_are_explained(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--inputs", "inputs.safetensors", "--model"]
    expected = {
        "own_models": "must have the form package.module:factory",
        "own_models:": "must have the form package.module:factory",
        "not_there:make": "No module named 'not_there'",
        "own_broken:make": "No module named 'nothing_of_this_name'",
        "own_models:Pear": "has no 'Pear'",
        "own_models:number": "is no function that returns a model, but int",
        "own_models:broken": "RuntimeError: no licence",
        "own_models:torch.zeros": "calling it without arguments failed",
        "own_models:nn.Flatten": "fc.weight should be float64 [4, 6], found nothing",
        "own_models:wide": "fc.weight should be float64 [4, 6], found nothing",
        "own_models:single": "fc.weight should be float64 [4, 6], found float32 [4, 6]",
    }
    for model, message in expected.items():
        assert message in complaint(capsys, own, *given, model), model


def test_without_a_recipe_the_user_is_told_what_to_give(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(capsys, own)
    assert "names no recipe" in text
    assert "--model package.module:factory" in text
    assert "--inputs FILE.safetensors" in text
    assert "--model needs --inputs" in complaint(capsys, own, "--model", "own_models:Pair")
    text = complaint(capsys, own, "--model", "own_models:Pair", "--inputs", "inputs.safetensors", "--save", "x.png")
    assert "needs a memory with a recipe" in text


def test_a_recipe_that_is_not_known_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.run(tmp_path / "run", recipe="cooking")
    text = complaint(capsys, tmp_path / "run")
    assert "names the recipe 'cooking', which this dualform does not have" in text


def test_a_run_that_was_not_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    data = DIGITS.load()
    for keep in ("all", "keys"):
        model = DIGITS.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        recorder = dualform.record(model, optimizer, tmp_path / keep, keep=keep, recipe="digits").start()
        with recorder.batch(torch.arange(4)):
            inputs = DIGITS.preprocess(data.train.images[:4])
            torch.nn.functional.cross_entropy(model(inputs), data.train.labels[:4]).backward()
        optimizer.step()
        recorder.commit()
        if keep == "all":
            (prediction,) = answered(capsys, tmp_path / keep, "--top", "2")["predictions"]
            best = model(DIGITS.preprocess(data.test.images[:1]))[0].max().item()
            assert prediction["top"][0]["value"] == pytest.approx(best, rel=1e-5)
        else:
            text = complaint(capsys, tmp_path / keep)
            assert "was not closed, so its last weights are not stored" in text
            assert "keep='keys' holds no gradients" in text
        recorder.close()
        assert call("query", tmp_path / keep, "--layer", "fc0") == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layer fc7", "'fc7' is not recorded; recorded layers: fc0, fc1, fc2"),
        ("--by colour", "there is no column 'colour'"),
        ("--within colour", "there is no column 'colour'"),
        ("--totals colour", "there is no column 'colour'"),
        ("--by image", "column 'image' has shape"),
        ("--where colour=red", "there is no column 'colour'"),
        ("--where label", "takes COLUMN=VALUE"),
        ("--where label=six", "this column holds whole numbers"),
        ("--where label=1:2:3", "this column holds whole numbers"),
        ("--by label --within label", "cannot be asked for together"),
        ("--top 0", "--top must be at least 1, not 0"),
        ("--test 360", "digits has 360 test examples, numbered from 0 to 359"),
        ("--test -1", "numbered from 0 to 359"),
        ("--until 26", "a step from 0 to 25"),
        ("--contributions 10", "--contributions of fc2: unit must be a whole number from 0 to 9"),
        ("--test 1 --image x.png", "--test and --image name different inputs"),
        ("--invert", "--invert needs --image"),
        ("--save figure.jpg", "a figure is saved as .png, .svg, .pdf"),
        ("--save not/there/figure.png", "there is no directory"),
        ("--save figure.png --by label", "--by label has none"),
    ],
)
def test_a_beginners_mistakes(options: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in complaint(capsys, run, *options.split())


def test_options_that_do_not_exist(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--order", "best"], ["--top", "many"], ["--tops", "3"]):
        assert call("query", run, *wrong) == 2
        streams = capsys.readouterr()
        assert wrong[0] in streams.err
        assert "Traceback" not in streams.err


def test_conditions_are_read_by_the_kind_of_the_column(own: Path) -> None:
    memory = dualform.open(own)
    for text, value in {
        "colour=red": "red",
        "colour=red,blue": ["red", "blue"],
        "colour=a,b": "a,b",
        "weight=0.5": 0.5,
        "weight=1:2.5": slice(1.0, 2.5),
        "odd=true": True,
        "odd=0": False,
        "step=2": 2,
        "step=2:": slice(2, None),
        "example=1,2,3": [1, 2, 3],
        "position=:4": slice(None, 4),
    }.items():
        assert condition(memory, text) == (text.partition("=")[0], value)
        memory.attend(None, {"fc": torch.rand(6)})["fc"].where(**dict([condition(memory, text)])).top(1)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "PNG"])
def test_a_figure_in_every_format(ending: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"figure.{ending}"
    assert call("query", run, "--save", file, "--top", "2", "--layer", "fc1") == 0
    assert f"The figure is in {file}." in capsys.readouterr().out.replace("\n", "")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending.lower()]
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    "options", ["--by example", "--within label", "--contributions 3 --order smallest", "--until 5", "--until 0"]
)
def test_figures_of_other_questions(
    options: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figure.png"
    assert answered(capsys, run, "--save", file, "--layer", "fc2", *options.split())["figure"] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_figure_shows_every_example_once(digits: tuple[Path, nn.Module]) -> None:
    path, model = digits
    memory = dualform.open(path)
    asked = memory.attend(model, DIGITS.preprocess(pictures()[:1]))["fc0"]
    rows = best_examples(asked, 10)
    assert len({row.example for row in rows}) == 10
    best: dict[int, float] = {}
    scores, ids = asked.scores()[0], asked.top(memory.events(0, STEPS))
    for example, score in zip(ids.examples[0].tolist(), ids.scores[0].tolist(), strict=True):
        best.setdefault(example, score)
    assert scores.max().item() == rows[0].score
    assert {row.example: row.score for row in rows} == dict(list(best.items())[:10])


def commands(page: Path) -> list[list[str]]:
    """The calls of dualform on a page, as lists of arguments; a line may hold several."""
    lines = [line[2:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("$ ")]
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [call[1:] for call in words if call[0].endswith("dualform")]


@pytest.mark.parametrize("page", [DOCS, DOCS.parents[1] / "README.md"], ids=lambda page: page.name)
def test_the_commands_of_the_docs_work(
    page: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "colours", raising=False)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(run)
    _saved(drawn(), tmp_path / "photo.png")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if page == DOCS:
        (tmp_path / "colours.py").write_text(blocks[0])
        exec("\n".join(blocks), {})
    # These take minutes or do not end; they have tests of their own.
    found = [arguments for arguments in commands(page) if arguments[0] not in ("demo", "reproduce", "serve")]
    assert {"query", "export"} <= {arguments[0] for arguments in found}
    for arguments in found:
        to_file = arguments.index(">") if ">" in arguments else None
        assert call(*arguments[:to_file]) == 0, (arguments, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [("PIL", "plot", ["--image", "x.png"]), ("matplotlib.figure", "plot", ["--save", "x.png"])],
)
def test_a_missing_extra_gives_the_command_to_type(module: str, extra: str, options: list[str], run: Path) -> None:
    arguments = ["query", str(run), *options]
    code = f"import sys; sys.modules[{module!r}] = None; from dualform.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"pip install 'dualform[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
