"""Cross-task attention: what of all scores, and of the ten best, belongs to the other task's events."""

from typing import Any

import pytest

import tiny


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["joint", "continual"])
def test_shares_of_the_other_task(name: str, seed: int, paper: Any) -> None:
    twin, found = tiny.twin(name, seed), paper.part(name, "crossings", seed)
    assert found.images == tiny.IMAGES
    assert [(row.task, row.layer) for row in found.rows] == [
        (task, layer) for task in ("upright", "turned") for layer in ("fc0", "fc1", "fc2")
    ]
    for task in (0, 1):
        all_scores = twin.scores(twin.data.test.of(task)[: tiny.IMAGES])
        for row in found.rows[3 * task : 3 * task + 3]:
            scores = all_scores[row.layer]
            other = twin.data.train.tasks[twin.layers[row.layer].examples] != task
            shares, best = [], []
            for image in scores:
                shares.append(float(image[other].abs().sum() / image.abs().sum()))
                tops = image.float().argsort(descending=True, stable=True)[:10]
                best.append(float(other[tops].double().mean()))
            assert row.attention == pytest.approx(100 * sum(shares) / len(shares), rel=1e-6)
            assert row.best == pytest.approx(100 * sum(best) / len(best), rel=1e-6, abs=1e-9)
            assert 0 <= row.best <= 100
            assert 0 < row.attention < 100


def test_the_single_task_has_no_other(paper: Any) -> None:
    assert not (paper.folder("single").path / "crossings.json").exists()
    assert not (paper.folder("joint").path / "masks.json").exists()
