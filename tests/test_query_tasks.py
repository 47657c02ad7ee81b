"""`dualform query` on a memory of two tasks: inputs, answers and training examples are each called by their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import dualform
import tiny
from commands import answered, call
from dualform.experiments.asking import exhibit
from dualform.experiments.training import train
from tiny import NAMES, TWO

STEPS = 25


@pytest.fixture(autouse=True)
def small_experiments() -> Iterator[None]:
    with tiny.registered():
        yield


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A memory of a short joint training, and the model it leads to."""
    path, data = tmp_path_factory.mktemp("tasks") / "joint", TWO.load()
    torch.manual_seed(0)
    model = TWO.model()
    with tiny.registered():
        train(model, TWO, data, path, list(tiny.EXPERIMENTS["joint"].batches(data.train, 0))[:STEPS])
    return path, model


def plain_inputs(task: int, index: int) -> torch.Tensor:
    """(pixel − mean) / std of a task's test image."""
    chosen = TWO.tasks[task]
    image = chosen.load().test.images[index].float()
    return ((image - chosen.mean) / chosen.std)[None]


@pytest.mark.parametrize(("options", "task"), [([], 0), (["--task", "upright"], 0), (["--task", "turned"], 1)])
def test_the_task_chooses_the_test_example_and_its_normalisation(
    options: list[str], task: int, joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = joint
    reply = answered(capsys, path, "--test", "7", "--top", "4", *options)
    name, labels = TWO.tasks[task].name, TWO.tasks[task].load().test.labels
    assert reply["inputs"] == f"{name} test image 7"
    inputs = plain_inputs(task, 7)
    logits = model(inputs)[0].detach()
    (prediction,) = reply["predictions"]
    best = logits.topk(3)
    assert [one["unit"] for one in prediction["top"]] == best.indices.tolist()
    assert [one["value"] for one in prediction["top"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    own = TWO.tasks[task].class_names
    assert [one["class_name"] for one in prediction["top"]] == [own[unit] for unit in best.indices.tolist()]
    assert prediction["label"] == own[int(labels[7])]
    spotlight = dualform.open(path).attend(model, inputs)
    for layer in reply["layers"]:
        top = spotlight[layer["layer"]].top(4)
        assert [row["event"] for row in layer["queries"][0]["rows"]] == top.events[0].tolist()
        assert [row["score"] for row in layer["queries"][0]["rows"]] == top.scores[0].tolist()


def test_training_examples_are_called_by_the_classes_of_their_own_task(
    joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = joint
    train_split = TWO.load().train
    met = set()
    for options in (["--within", "task"], ["--by", "example"]):
        reply = answered(capsys, path, "--task", "turned", "--top", "5", *options)
        for layer in reply["layers"]:
            for row in layer["queries"][0]["rows"]:
                example = row["example"] if "example" in row else row["group"]
                task, label = int(train_split.tasks[example]), int(train_split.labels[example])
                met.add(task)
                assert row["columns"] == {"task": TWO.tasks[task].name, "label": label}
                assert row["class_name"] == TWO.tasks[task].class_names[label]
    assert met == {0, 1}


def test_the_tables_name_the_classes(joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    path, model = joint
    assert call("query", path, "--task", "turned", "--test", "7", "--layer", "fc2", "--within", "task") == 0
    text = capsys.readouterr().out
    answer = NAMES[int(model(plain_inputs(1, 7)).argmax())]
    label = NAMES[int(TWO.tasks[1].load().test.labels[7])]
    assert f"The model answers {answer} with probability" in text
    assert answer == label or f"it is {label}" in text
    assert any(f" {name}" in text for name in NAMES)
    assert "turned" in text and "upright" in text


def test_of_both_tasks_a_label_has_both_names(
    joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = joint
    reply = answered(capsys, path, "--by", "label", "--top", "10", "--layer", "fc1", "--totals", "label")
    (query,) = reply["layers"][0]["queries"]
    for row in (*query["rows"], *query["totals"]):
        assert row["class_name"] == f"{row['group']} / {NAMES[row['group']]}"


def test_groups_of_task_and_label(joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    path, model = joint
    reply = answered(capsys, path, "--by", "task,label", "--top", "20", "--layer", "fc1")
    rows = reply["layers"][0]["queries"][0]["rows"]
    assert sorted(tuple(row["group"]) for row in rows) == sorted(
        (task.name, label) for task in TWO.tasks for label in range(10)
    )
    found = dualform.open(path).attend(model, plain_inputs(0, TWO.showcase))["fc1"].totals(by=("task", "label"))
    sums = dict(zip(found.groups, found.values[0].tolist(), strict=True))
    assert all(row["score"] == pytest.approx(sums[tuple(row["group"])], rel=1e-6) for row in rows)


def test_events_of_one_task_alone(joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = joint
    reply = answered(capsys, path, "--where", "task=turned", "--top", "6")
    rows = [row for layer in reply["layers"] for row in layer["queries"][0]["rows"]]
    assert len(rows) == 18
    assert {row["columns"]["task"] for row in rows} == {"turned"}


def test_an_image_says_as_which_task_it_is_taken(
    joint: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = joint
    file = tmp_path / "one.png"
    test = TWO.tasks[0].load().test
    light = test.images[(test.labels < 5).nonzero()[0]]  # on dark, as an image file is expected to be
    Image.fromarray(light[0].numpy()).save(file)
    reply = answered(capsys, path, "--image", file, "--layer", "fc2")
    assert reply["notes"] == ["the image is normalised as upright is; --task turned takes it as another task's."]
    assert reply["predictions"][0]["top"][0]["class_name"] in tiny.UPRIGHT.class_names
    assert answered(capsys, path, "--image", file, "--task", "upright", "--layer", "fc2") == reply | {"notes": []}
    other = answered(capsys, path, "--image", file, "--task", "turned", "--layer", "fc2")
    assert other["notes"] == []
    task = TWO.tasks[1]
    best = model((light.float() - task.mean) / task.std)[0].max().item()
    assert other["predictions"][0]["top"][0]["value"] == pytest.approx(best, rel=1e-5)
    assert other["predictions"][0]["top"][0]["class_name"] in NAMES
    assert call("query", path, "--image", file, "--layer", "fc2") == 0
    assert "Note: the image is normalised as upright is" in " ".join(capsys.readouterr().out.split())


def test_images_in_a_file_are_normalised_as_their_task(
    joint: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = joint
    images = TWO.tasks[1].load().test.images[:3].contiguous()
    save_file({"x": images}, tmp_path / "x.safetensors")
    reply = answered(capsys, path, "--inputs", tmp_path / "x.safetensors", "--task", "turned", "--layer", "fc0")
    logits = model(torch.cat([plain_inputs(1, number) for number in range(3)])).detach()
    for prediction, row in zip(reply["predictions"], logits, strict=True):
        assert prediction["top"][0]["value"] == pytest.approx(row.max().item(), rel=1e-5)
        assert prediction["top"][0]["class_name"] == NAMES[int(row.argmax())]


def test_images_in_a_file_say_as_which_task_they_are_taken(
    joint: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": TWO.tasks[1].load().test.images[:2].contiguous()}, tmp_path / "x.safetensors")
    reply = answered(capsys, joint[0], "--inputs", tmp_path / "x.safetensors", "--layer", "fc0")
    assert any("normalised as upright" in note for note in reply["notes"])


@pytest.mark.parametrize("options", [[], ["--test", "3"], ["--image", "x.png"]])
def test_a_task_that_there_is_not_is_refused(
    options: list[str], joint: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    given = [str(tmp_path / "x.png") if option == "x.png" else option for option in options]
    assert call("query", joint[0], "--task", "sideways", *given) == 2
    error = capsys.readouterr().err
    assert "The recipe tiny-two has no task 'sideways'; it has upright and turned." in error
    assert "Traceback" not in error


def test_a_test_image_that_a_task_does_not_have_is_refused(
    joint: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("query", joint[0], "--task", "turned", "--test", "360") == 2
    assert "turned has 360 test examples, numbered from 0 to 359" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--by", "example"], ["--within", "task"], ["--contributions", "3"]])
def test_a_figure_of_a_tasks_image(
    options: list[str],
    joint: tuple[Path, nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = []
    figure = exhibit.spotlight_figure
    monkeypatch.setattr(exhibit, "spotlight_figure", lambda found: drawn.append(found) or figure(found))
    file = tmp_path / "figure.png"
    given = ["--task", "turned", "--test", "7", "--layer", "fc2", "--top", "4", "--save", file, *options]
    reply = answered(capsys, joint[0], *given)
    assert reply["figure"] == str(file)
    with Image.open(file) as opened:
        assert opened.width > 600
    (shown,) = drawn
    assert torch.equal(shown.image, TWO.tasks[1].load().test.images[7])
    assert shown.class_names == NAMES
    assert (shown.label, shown.answer) == (
        reply["predictions"][0]["label"],
        reply["predictions"][0]["top"][0]["class_name"],
    )
    train_split = TWO.load().train
    (panel,) = shown.panels
    assert panel.matches
    for match in panel.matches:
        task, label = (int(column[match.example]) for column in (train_split.tasks, train_split.labels))
        assert match.label == TWO.tasks[task].class_names[label]
        assert torch.equal(match.image, train_split.images[match.example])
