"""Table 1 and the signed votes, against sums over every event, one class after the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from dualform.experiments.paper.votes import votes
from tiny import Twin

SEEDS = (0, 1)


def cells(vote: Tensor, twin: Twin) -> dict[str, float]:
    """Of the images it gets wrong, how often the vote is the label, and the answer; of the others, the label."""
    found: dict[str, list[bool]] = {"target": [], "output": [], "right": []}
    answers, labels = twin.logits().argmax(1).tolist(), twin.data.test.labels.tolist()
    for voted, answer, label in zip(vote.tolist(), answers, labels, strict=True):
        if answer == label:
            found["right"].append(voted == label)
        else:
            found["target"].append(voted == label)
            found["output"].append(voted == answer)
    return {name: 100 * sum(hits) / len(hits) for name, hits in found.items()}


def added(twin: Twin) -> Tensor:
    """What the events of every class add to every logit of every test image: [images, classes, logits]."""
    alpha, values = twin.scores(twin.data.test)["fc2"], twin.layers["fc2"].values(twin.steps)
    sums = []
    for task, label in twin.classes():
        chosen = twin.of_class(task, label)
        sums.append((alpha[:, chosen] + 1) @ values[chosen])
    return torch.stack(sums, dim=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layer", ["fc0", "fc1", "fc2"])
def test_table_1_is_the_vote_of_absolute_scores(layer: str, seed: int, paper: Any) -> None:
    twin = tiny.twin("single", seed)
    scores = twin.scores(twin.data.test)[layer].abs()
    totals = torch.stack([scores[:, twin.of_class(0, label)].sum(1) for label in range(10)], dim=1)
    assert paper.raw("single", "votes", seed)["layers"][layer] == pytest.approx(cells(totals.argmax(1), twin), rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_class_that_adds_most_to_its_own_logit(seed: int, paper: Any) -> None:
    twin = tiny.twin("single", seed)
    own = added(twin)[:, torch.arange(10), torch.arange(10)]
    found = paper.raw("single", "votes", seed)["classes"]
    assert found == pytest.approx(cells(own.argmax(1), twin), rel=1e-8)
    # A vote of the signed sums is not the vote of the absolute scores by another name.
    assert found != paper.raw("single", "votes", seed)["layers"]["fc2"]


@pytest.mark.parametrize("seed", SEEDS)
def test_rebuilt_logits_answer_as_the_model_does(seed: int, paper: Any) -> None:
    twin, found = tiny.twin("single", seed), paper.part("single", "votes", seed)
    logits = twin.logits()
    rebuilt = twin.initial(twin.data.test) + added(twin).sum(1)
    apart = float((rebuilt - logits).abs().max() / logits.abs().max())
    assert max(apart, found.apart) < 1e-5
    assert found.images == len(twin.data.test) == 360
    assert found.wrong == int((logits.argmax(1) != twin.data.test.labels).sum()) > 0
    assert found.images - found.undecided <= found.agreeing <= found.images
    assert found.undecided == 0
    assert found.agreeing == found.images
    assert (found.rebuilt.target, found.rebuilt.output, found.rebuilt.right) == (0.0, 100.0, 100.0)
    assert cells(rebuilt.argmax(1), twin) == {"target": 0.0, "output": 100.0, "right": 100.0}


def test_the_parts_of_a_logit_are_the_librarys(paper: Any) -> None:
    """The plain values are the ones that the memory itself gives its events."""
    twin, run = tiny.twin("single"), paper.run("single")
    one = run.data.test[5:6]
    attention = run.attend(one)["fc2"]
    plain = twin.contributions(one)
    for unit in (0, 7):
        scores = attention.contributions(unit=unit).scores()[0].double()
        torch.testing.assert_close(scores, plain[:, unit], rtol=1e-4, atol=1e-7 * float(plain.abs().max()))
    torch.testing.assert_close(attention.initial()[0], twin.initial(one)[0], rtol=1e-6, atol=1e-7)


def test_where_nothing_is_wrong_there_is_no_share(paper: Any) -> None:
    run = paper.run("single")
    only_right = replace(run.data, test=run.data.test[run.right.nonzero()[:, 0]])
    found = votes(replace(run, data=only_right))
    assert found.wrong == 0
    assert found.rebuilt.target != found.rebuilt.target  # NaN
    assert found.rebuilt.right == 100.0
    only_wrong = replace(run.data, test=run.data.test[(~run.right).nonzero()[:, 0]])
    found = votes(replace(run, data=only_wrong))
    assert found.wrong == found.images == found.agreeing
    assert found.rebuilt.right != found.rebuilt.right
