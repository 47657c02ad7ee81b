"""The paper's experiments on the real data, in short: a narrower network, a few hundred steps, 1,000 test images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dualform.experiments.datasets import Dataset
from dualform.experiments.paper import Job, crossing, drawing, report, reproduce, settings, spotlights, store
from dualform.experiments.paper.folder import RunFolder
from dualform.experiments.paper.settings import CONTINUAL, JOINT, SINGLE, Showcase
from dualform.experiments.recipes import FASHION, MNIST, RECIPES, PaperNetwork, Task

pytestmark = pytest.mark.skipif(
    not (Path(os.environ.get("DUALFORM_DATA") or ".") / "fashion-mnist").is_dir(),
    reason="DUALFORM_DATA names no directory with MNIST and Fashion-MNIST in it",
)
IMAGES = 1000
STEPS = {"single": 250, "joint": 250, "continual": 200}
LAYERS = ("fc0", "fc1", "fc2")


@cache
def fewer(load: Any) -> Dataset:
    """Read once for all experiments."""
    data: Dataset = load()
    return replace(data, test=data.test[:IMAGES])


def shorter(task: Task) -> Task:
    return replace(task, load=partial(fewer, task.load))


def within(case: Showcase) -> Showcase:
    """The paper's image 5938 is not among the first 1,000."""
    return replace(case, index=None) if case.index is not None and case.index >= IMAGES else case


@pytest.fixture(autouse=True)
def real() -> Iterator[None]:
    """The paper's own experiments, not the small ones of this folder, with fewer test images."""
    with pytest.MonkeyPatch.context() as patch:
        one, two = shorter(MNIST), shorter(FASHION)
        narrow = partial(PaperNetwork, hidden=256)
        patch.setitem(RECIPES, "mnist", replace(RECIPES["mnist"], model=narrow, tasks=(one,)))
        both = replace(RECIPES["mnist-and-fashion"], model=narrow, tasks=(one, two))
        patch.setitem(RECIPES, both.name, both)
        for experiment in (SINGLE, JOINT, CONTINUAL):
            cases = tuple(within(case) for case in experiment.showcases[:1])
            patch.setitem(settings.EXPERIMENTS, experiment.name, replace(experiment, showcases=cases))
        for module in (spotlights, drawing):
            patch.setattr(module, "BEST", 50)
        patch.setattr(crossing, "IMAGES", 20)
        patch.setattr(report, "write_report", lambda *_: [])
        yield


def results(name: str, out: Path) -> Any:
    """The results of a short run of an experiment, and what the job said."""
    job, console = Job(name, out, runs=1, steps=STEPS[name]), tiny.quiet()
    reproduce(job, console)
    ((_, (folder,)),) = job.folders
    assert isinstance(folder, RunFolder)
    assert not folder.memory.exists()
    assert "MNIST from $DUALFORM_DATA" in tiny.said(console)
    found = folder.results()
    assert found.checks.steps == folder.experiment.steps
    assert found.checks.events == 128 * folder.experiment.steps
    assert found.checks.exact
    assert all(row.residual is not None and row.residual < 1e-4 for row in found.checks.certificate)
    assert store.plain(found)["seconds"].keys() == {"training", *(part.name for part in folder.parts)}
    return found


def check_spotlights(found: Any, classes: int) -> None:
    for shown in found.spotlights.showcases:
        for layer in shown.layers:
            assert [len(scores) for scores in layer.scores] == [50] * classes
            assert all(list(scores) == sorted(scores, reverse=True) for scores in layer.scores)
            # A total is of magnitudes, of more events than are shown.
            assert all(sum(scores) <= total for scores, total in zip(layer.scores, layer.totals, strict=True))
            assert len({match.example for match in layer.matches}) == 3
            assert layer.matches[0].score == max(scores[0] for scores in layer.scores)
            assert sum(layer.steps) == 50


def test_single_task(tmp_path: Path) -> None:
    found = results("single", tmp_path)
    assert found.checks.accuracy["mnist"] > 75
    votes = found.votes
    assert votes.images == IMAGES
    assert votes.wrong == IMAGES - round(IMAGES * found.checks.accuracy["mnist"] / 100)
    assert votes.agreeing >= IMAGES - votes.undecided
    assert (votes.rebuilt.target, votes.rebuilt.output, votes.rebuilt.right) == (0, 100, 100)
    assert votes.apart < 1e-5
    for layer in LAYERS:
        vote = votes.layers[layer]
        # Of what is right most is attended to as such; of what is wrong, the answer more often than the label.
        assert vote.right > 60
        assert vote.right > vote.output > vote.target
        assert vote.target + vote.output <= 100
    check_spotlights(found, 10)
    first = found.spotlights.showcases[0]
    assert (first.label, first.answer, first.note) == (6, 6, "")
    assert [layer.name for layer in first.weighted] == list(LAYERS)
    for push in found.pushes.images:
        assert push.difference > 0
        assert push.apart < 1e-4
        assert push.initial + sum(push.totals) == pytest.approx(push.difference, abs=1e-4)
    assert len(found.pushes.images) == tiny.ALONE


def test_joint_training(tmp_path: Path) -> None:
    found = results("joint", tmp_path)
    assert found.checks.accuracy["mnist"] > 65
    assert found.checks.accuracy["fashion-mnist"] > 55
    check_spotlights(found, 20)
    boot = found.spotlights.showcases[0]
    assert (boot.task, boot.index, boot.label) == (1, 981, 9)
    rows = {(row.task, row.layer): row for row in found.crossings.rows}
    assert found.crossings.images == 20
    for task in ("mnist", "fashion-mnist"):
        for layer in LAYERS:
            row = rows[task, layer]
            assert 0 <= row.best < 50, "the best matches are of the image's own task"
            assert 5 < row.attention < 70
        assert rows[task, "fc0"].best < 20
    assert [(push.task, push.label != push.answer) for push in found.pushes.images] == [(0, True), (1, True)]


def test_continual_learning(tmp_path: Path) -> None:
    found = results("continual", tmp_path)
    after, before = (row.accuracy for row in found.masks.rows[:2])
    assert (found.masks.rows[0].until, found.masks.rows[1].until) == (400, 200)
    assert after == found.checks.accuracy
    assert before["mnist"] > 70
    assert before["fashion-mnist"] < 30
    assert after["fashion-mnist"] > 60
    # The first task is forgotten, and is there again without the events of the second.
    assert after["mnist"] < before["mnist"] - 10
    rows = {(row.without, row.layer): row.accuracy for row in found.masks.rows[2:]}
    masked = rows["fashion-mnist", None]
    assert masked["mnist"] == pytest.approx(before["mnist"], abs=10)
    assert masked["mnist"] > after["mnist"] + 10
    assert masked["fashion-mnist"] < after["fashion-mnist"] - 20
    assert rows["mnist", None]["fashion-mnist"] > 30
    assert set(rows) == {(task, layer) for task in ("mnist", "fashion-mnist") for layer in (None, *LAYERS)}
    check_spotlights(found, 20)
    forgotten = found.spotlights.showcases[0]
    assert (forgotten.task, forgotten.label) == (0, 1)
    assert forgotten.answer != 1 or forgotten.note
    assert torch.tensor([row.attention for row in found.crossings.rows]).isfinite().all()
