"""The settings of the experiments: the paper's, and batches that go through the right tasks."""

from itertools import pairwise

import pytest
import torch

import tiny
from dualform.errors import BadCall
from dualform.experiments import training
from dualform.experiments.paper import settings
from dualform.experiments.paper.settings import CONTINUAL, JOINT, SINGLE, Experiment, Phase, chosen
from dualform.experiments.recipes import RECIPES


def ids(experiment: Experiment, seed: int) -> list[list[int]]:
    train = experiment.recipe.load().train
    return [batch.tolist() for batch in experiment.batches(train, seed)]


@pytest.mark.parametrize("name", tiny.EXPERIMENTS)
def test_every_phase_goes_through_its_tasks_without_replacement(name: str) -> None:
    experiment = tiny.EXPERIMENTS[name]
    train, found = experiment.recipe.load().train, ids(experiment, seed=0)
    assert len(found) == experiment.steps
    for phase in experiment.phases:
        mine, found = found[: phase.steps], found[phase.steps :]
        of_phase = {at for at, task in enumerate(train.tasks.tolist()) if task in phase.tasks}
        epoch = len(of_phase) // 128
        assert phase.steps > 2 * epoch
        for begin in range(0, phase.steps, epoch):
            stretch = [example for batch in mine[begin : begin + epoch] for example in batch]
            assert len(set(stretch)) == len(stretch) == 128 * len(mine[begin : begin + epoch])
            assert set(stretch) <= of_phase
        first, second = mine[:epoch], mine[epoch : 2 * epoch]
        assert first != second
        everything = {example for batch in mine for example in batch}
        assert len(everything) > 0.99 * len(of_phase)
        assert {int(task) for task in train.tasks[list(everything)]} == set(phase.tasks)
    assert not found


def test_joint_batches_mix_the_tasks() -> None:
    experiment = tiny.EXPERIMENTS["joint"]
    tasks = experiment.recipe.load().train.tasks
    shares = [float(tasks[batch].double().mean()) for batch in ids(experiment, seed=0)]
    assert all(0.25 < share < 0.75 for share in shares)


@pytest.mark.parametrize("name", tiny.EXPERIMENTS)
def test_batches_depend_on_the_seed_and_on_nothing_else(name: str) -> None:
    experiment = tiny.EXPERIMENTS[name]
    torch.manual_seed(1)
    once = ids(experiment, seed=3)
    torch.manual_seed(2)
    assert ids(experiment, seed=3) == once
    others = [ids(experiment, seed) for seed in range(4)]
    assert all(one != other for one, other in pairwise(others))
    if len(experiment.phases) == 2:
        half = experiment.phases[0].steps
        size = len(experiment.recipe.load().train.of(0))
        assert [[example - size for example in batch] for batch in once[half:]] != once[:half]


def test_fewer_steps_are_the_first_steps() -> None:
    experiment = tiny.EXPERIMENTS["continual"]
    short = experiment.shortened(7)
    assert short.steps == 14
    assert ids(short, 0)[:7] == ids(experiment, 0)[:7]
    assert ids(short, 0)[7:] == ids(experiment, 0)[90:97]
    assert experiment.shortened(None) is experiment


def test_the_settings_are_the_papers() -> None:
    assert SINGLE.phases == (Phase((0,), 3000),)
    assert JOINT.phases == (Phase((0, 1), 5000),)
    assert CONTINUAL.phases == (Phase((0,), 3000), Phase((1,), 3000))
    assert [(one.recipe_name, one.section) for one in (SINGLE, JOINT, CONTINUAL)] == [
        ("mnist", "5.2"),
        ("mnist-and-fashion", "5.3"),
        ("mnist-and-fashion", "5.4"),
    ]
    cases = [case for one in (SINGLE, JOINT, CONTINUAL) for case in one.showcases]
    assert sorted(case.figure for case in cases) == ["12a", "12b", "12c", "12d", "12e", "12f", "3a", "3b"]
    assert {case.figure: case.index for case in cases if case.index is not None} == {"3a": 5938, "3b": 981}
    assert [case.figure for case in cases if not case.right] == ["12d"]
    # The distribution plots, the totals and the top examples, as they are numbered in the paper.
    assert sorted(case.scores for case in cases) == [4, 6, 8, 14, 17, 20, 24, 27]
    assert sorted(case.totals for case in cases) == [5, 7, 9, 15, 18, 21, 25, 28]
    assert sorted(case.matches for case in cases) == [10, 11, 13, 16, 19, 22, 23, 26]
    assert (settings.BEST, settings.MATCHES, training.BATCH) == (500, 3, 128)


def test_groups_are_classes_within_tasks() -> None:
    assert SINGLE.groups == "label"
    assert JOINT.groups == CONTINUAL.groups == ("task", "label")
    assert all(one.recipe is RECIPES[one.recipe_name] for one in (SINGLE, JOINT, CONTINUAL))


def test_images_are_all_experiments() -> None:
    assert [one.name for one in chosen("images")] == ["single", "joint", "continual"]
    assert [one.name for one in chosen("joint")] == ["joint"]
    with pytest.raises(
        BadCall, match="There is no experiment 'triple'; there are single, joint, continual and images."
    ):
        chosen("triple")
    with pytest.raises(BadCall, match="steps must be at least 1, not 0"):
        SINGLE.shortened(0)
