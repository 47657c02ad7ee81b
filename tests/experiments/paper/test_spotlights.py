"""The numbers of the figures: every score of every event is computed plainly, sorted, summed and counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dualform
import tiny
from dualform.experiments.asking.models import rebuilt_model
from dualform.experiments.datasets import Split
from dualform.experiments.matches import best_examples
from dualform.experiments.paper import spotlights as module
from dualform.experiments.paper.pushes import pushes
from dualform.experiments.paper.run import Run
from dualform.experiments.paper.settings import Showcase
from dualform.experiments.paper.spotlights import spotlights
from dualform.experiments.training import train
from tiny import BEST, Twin

CASES = [(name, place) for name, one in tiny.EXPERIMENTS.items() for place in range(len(one.showcases))]
LAYERS = ("fc0", "fc1", "fc2")


def shown(paper: Any, name: str, place: int) -> tuple[Twin, Any, Split]:
    """The plain training, a spotlight of its analysis, and the test image."""
    twin, found = tiny.twin(name), paper.part(name, "spotlights").showcases[place]
    return twin, found, twin.test_image(found.task, found.index)


def order(scores: Tensor) -> list[int]:
    """Events by descending score, in fp32 as the library's, and ascending number."""
    return scores.float().argsort(descending=True, stable=True).tolist()


def check_layer(layer: Any, scores: Tensor, twin: Twin) -> None:
    """Everything that a layer of a spotlight says, given the score of every event."""
    events, train = twin.layers[layer.name], twin.data.train
    for place, (task, label) in enumerate(twin.classes()):
        mine = scores[twin.of_class(task, label)]
        assert layer.scores[place] == pytest.approx(sorted(mine.tolist(), reverse=True)[:BEST], rel=1e-6, abs=1e-12)
        assert layer.totals[place] == pytest.approx(float(mine.abs().sum()), rel=1e-6)
    first: dict[int, int] = {}
    for event in order(scores):
        first.setdefault(int(events.examples[event]), event)
    expected = list(first.items())[: module.MATCHES]
    assert [match.example for match in layer.matches] == [example for example, _ in expected]
    assert [match.step for match in layer.matches] == [int(events.steps[event]) for _, event in expected]
    assert [match.score for match in layer.matches] == pytest.approx([float(scores[e]) for _, e in expected], rel=1e-6)
    for match in layer.matches:
        assert (match.task, match.label) == (train.tasks[match.example], train.labels[match.example])
    bins = min(module.BINS, twin.steps)
    counted = [0] * bins
    for event in order(scores)[:BEST]:
        counted[(int(events.steps[event]) - 1) * bins // twin.steps] += 1
    assert list(layer.steps) == counted
    assert sum(layer.steps) == min(BEST, len(scores))


@pytest.mark.parametrize(("name", "place"), CASES)
def test_scores_totals_matches_and_times_are_those_of_every_event(name: str, place: int, paper: Any) -> None:
    twin, found, image = shown(paper, name, place)
    scores = twin.scores(image)
    assert [layer.name for layer in found.layers] == list(LAYERS)
    for layer in found.layers:
        assert len(layer.scores) == len(layer.totals) == 10 * len(twin.recipe.tasks)
        assert len({match.example for match in layer.matches}) == 3
        check_layer(layer, scores[layer.name][0], twin)


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_image_its_label_and_its_answer(name: str, place: int, paper: Any) -> None:
    twin, found, image = shown(paper, name, place)
    case = tiny.EXPERIMENTS[name].showcases[place]
    logits = twin.logits()[twin.data.test.tasks == case.task]
    labels, answers = twin.data.test.of(case.task).labels, logits.argmax(1)
    of_class = [at for at, label in enumerate(labels.tolist()) if label == case.label]
    fitting = [at for at in of_class if (int(answers[at]) == case.label) is case.right]
    if case.index is not None:
        assert (found.index, found.note) == (case.index, "")
    elif fitting:
        assert (found.index, found.note) == (fitting[0], "")
    else:
        assert found.index == of_class[0]
        assert found.note == "the model gets no image of this class right: the first one is shown"
    assert (found.figure, found.task) == (case.figure, case.task)
    assert found.label == case.label == int(image.labels[0])
    assert found.answer == int(answers[found.index])
    assert found.probability == pytest.approx(float(logits[found.index].double().softmax(0).max()), rel=1e-6)


def test_weighted_scores_have_the_size_of_the_error(paper: Any) -> None:
    twin, found, image = shown(paper, "single", 0)
    scores = twin.scores(image)
    assert [layer.name for layer in found.weighted] == list(LAYERS)
    for layer in found.weighted:
        sizes = twin.layers[layer.name].values(twin.steps).norm(dim=1)
        check_layer(layer, scores[layer.name][0].abs() * sizes, twin)


@pytest.mark.parametrize(("name", "place"), CASES[1:])
def test_only_the_single_tasks_first_image_is_weighted(name: str, place: int, paper: Any) -> None:
    assert paper.part(name, "spotlights").showcases[place].weighted == ()


def test_only_the_first_run_shows_images(paper: Any) -> None:
    for name in tiny.EXPERIMENTS:
        files = {file.stem for file in paper.folder(name, 1).path.glob("*.json")}
        first = {file.stem for file in paper.folder(name, 0).path.glob("*.json")}
        assert first - files == {"spotlights", "pushes"}
        assert files < first


@pytest.fixture(scope="module", params=[3, 7])
def young(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps: fewer events than the figures of the paper show."""
    with tiny.registered():
        experiment = tiny.EXPERIMENTS["single"].shortened(request.param)
        data, path = tiny.ONE.load(), tmp_path_factory.mktemp("young") / "memory"
        torch.manual_seed(0)
        train(tiny.ONE.model(), tiny.ONE, data, path, list(experiment.batches(data.train, 0)))
        memory = dualform.open(path)
        return Run(experiment, memory, rebuilt_model(memory, tiny.ONE.model, None), data)


@pytest.fixture
def papers_best(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "BEST", 500)
    return 500


def test_a_young_memory_has_fewer_events_than_are_asked_for(young: Run, papers_best: int) -> None:
    (found, other) = spotlights(young).showcases
    events = 128 * young.memory.steps
    labels = young.data.train.labels
    steps = young.memory.steps
    ids = torch.cat(list(young.experiment.batches(young.data.train, 0)))
    for layer in (*found.layers, *found.weighted, *other.layers):
        assert [len(scores) for scores in layer.scores] == labels[ids].bincount(minlength=10).clamp(max=500).tolist()
        assert all(list(scores) == sorted(scores, reverse=True) for scores in layer.scores)
        assert len(layer.steps) == steps
        assert sum(layer.steps) == min(500, events)
    if events < 500:
        assert layer.steps == (128,) * steps


def test_a_class_that_the_model_never_gets_right_is_shown_with_a_note(young: Run) -> None:
    labels, answers = young.data.test.labels, young.answers
    missed = next(c for c in range(10) if not bool((answers == labels)[labels == c].any()))
    met = next(c for c in range(10) if bool((answers == labels)[labels == c].any()))
    base = Showcase("12a", 0, missed, scores=14, totals=15, matches=13)
    first = int((labels == missed).nonzero()[0, 0])
    assert young.find(base) == (first, "the model gets no image of this class right: the first one is shown")
    assert young.find(replace(base, right=False)) == (first, "")
    index, note = young.find(replace(base, label=met))
    assert index == int(((labels == met) & (answers == labels)).nonzero()[0, 0])
    assert note == ""
    experiment = replace(young.experiment, showcases=(replace(base, figure="3a", right=True),))
    (found,) = spotlights(replace(young, experiment=experiment)).showcases
    assert found.note.startswith("the model gets no image")
    assert found.index == first


def test_a_class_that_the_model_always_gets_right_is_shown_with_a_note(paper: Any) -> None:
    run = paper.run("continual")
    right = run.right | (run.data.test.tasks == 0)
    perfect = replace(run, data=replace(run.data, test=run.data.test[right.nonzero()[:, 0]]))
    case = Showcase("12d", 1, 4, scores=8, totals=9, matches=22, right=False)
    index, note = perfect.find(case)
    assert note == "the model gets no image of this class wrong: the first one is shown"
    assert index == int((perfect.data.test.of(1).labels == 4).nonzero()[0, 0])
    # An image that is right after all is nobody's wrong answer.
    shown = pushes(replace(perfect, experiment=replace(run.experiment, showcases=(case,)))).images
    assert {push.task for push in shown} == {0}


def test_best_examples_are_found_behind_many_events_of_one(paper: Any) -> None:
    """Of few examples, all events have to be looked at, and there may be fewer examples than asked for."""
    run, twin = paper.run("single"), tiny.twin("single")
    image = run.data.test[:1]
    scores, examples = twin.scores(image)["fc0"][0], twin.layers["fc0"].examples
    few = examples.unique()[:4].tolist()
    attention = run.attend(image)["fc0"].where(example=few)
    best = {example: float(scores[examples == example].max()) for example in few}
    expected = sorted(best.items(), key=lambda item: -item[1])
    for count, order in ((3, "largest"), (9, "largest"), (2, "smallest")):
        found = best_examples(attention, count, order=order)
        wanted = (expected if order == "largest" else expected[::-1])[:count]
        assert [one.example for one in found] == [example for example, _ in wanted]
        assert [one.score for one in found] == pytest.approx([score for _, score in wanted], rel=1e-6)
