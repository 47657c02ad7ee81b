"""Wrong answers: everything that pushed them adds up to the difference of the logits."""

from collections import Counter, defaultdict
from typing import Any

import pytest

import tiny
from dualform.experiments.paper.pushes import EXAMPLES

NAMES = list(tiny.EXPERIMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_images_are_wrong_ones_of_figures_and_the_first_of_every_task(name: str, paper: Any) -> None:
    twin, found = tiny.twin(name), paper.part(name, "pushes").images
    answers, labels, tasks = twin.logits().argmax(1), twin.data.test.labels, twin.data.test.tasks
    expected = []
    for case in tiny.EXPERIMENTS[name].showcases:
        if not case.right:
            wrong = (answers != labels)[tasks == case.task] & (labels[tasks == case.task] == case.label)
            expected.append((case.task, int(wrong.nonzero()[0, 0])))
    for task in range(len(twin.recipe.tasks)):
        wrong = (answers != labels)[tasks == task].nonzero()[:, 0].tolist()
        expected += [(task, index) for index in wrong[: tiny.ALONE if name == "single" else 1]]
    assert [(push.task, push.index) for push in found] == list(dict.fromkeys(expected))
    for push in found:
        of_task = tasks == push.task
        assert push.label == int(labels[of_task][push.index]) != push.answer == int(answers[of_task][push.index])


@pytest.mark.parametrize("name", NAMES)
def test_classes_and_the_initial_part_add_up_to_the_difference(name: str, paper: Any) -> None:
    twin = tiny.twin(name)
    for push in paper.part(name, "pushes").images:
        image = twin.test_image(push.task, push.index)
        logits = twin.logits()[twin.data.test.tasks == push.task][push.index].double()
        difference = float(logits[push.answer] - logits[push.label])
        added = twin.contributions(image)
        along = added[:, push.answer] - added[:, push.label]
        sizes = float(along.abs().sum())
        initial = twin.initial(image)[0]
        assert difference > 0
        assert push.difference == pytest.approx(difference, rel=1e-6, abs=1e-6)
        assert push.initial == pytest.approx(float(initial[push.answer] - initial[push.label]), rel=1e-6, abs=1e-7)
        for total, (task, label) in zip(push.totals, twin.classes(), strict=True):
            expected = float(along[twin.of_class(task, label)].sum())
            assert total == pytest.approx(expected, rel=1e-4, abs=1e-7 * sizes)
        assert push.initial + sum(push.totals) == pytest.approx(push.difference, abs=1e-6 * sizes)
        assert push.apart == pytest.approx(abs(push.initial + sum(push.totals) - push.difference), abs=1e-7)
        assert push.apart <= 1e-6 * sizes


@pytest.mark.parametrize("name", NAMES)
def test_pushers_are_sums_over_all_events_of_an_example(name: str, paper: Any) -> None:
    twin = tiny.twin(name)
    examples = twin.layers["fc2"].examples.tolist()
    for push in paper.part(name, "pushes").images:
        added = twin.contributions(twin.test_image(push.task, push.index))
        along = (added[:, push.answer] - added[:, push.label]).tolist()
        sums, counts = defaultdict(float), Counter(examples)
        for example, value in zip(examples, along, strict=True):
            sums[example] += value
        ranked = sorted(sums, key=lambda example: -sums[example])
        for pushers, expected in ((push.towards, ranked[:EXAMPLES]), (push.against, ranked[::-1][:EXAMPLES])):
            assert [one.example for one in pushers] == expected
            assert [one.added for one in pushers] == pytest.approx([sums[one] for one in expected], rel=1e-4)
            assert [one.events for one in pushers] == [counts[one] for one in expected]
            train = twin.data.train
            assert all(
                (one.task, one.label) == (train.tasks[one.example], train.labels[one.example]) for one in pushers
            )
        assert push.towards[0].added > 0 > push.against[0].added
