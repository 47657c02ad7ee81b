"""Networks made of some of the events: against sums written out, and against the weights of the very step."""

from typing import Any

import pytest
import torch

import tiny

BEFORE = tiny.STEPS
ROWS = [(None, None, 2 * BEFORE), (None, None, BEFORE)] + [
    (without, layer, 2 * BEFORE) for without in ("turned", "upright") for layer in (None, "fc0", "fc1", "fc2")
]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_says_what_it_leaves_out(seed: int, paper: Any) -> None:
    rows = paper.part("continual", "masks", seed).rows
    assert [(row.without, row.layer, row.until) for row in rows] == ROWS


@pytest.mark.parametrize("seed", [0, 1])
def test_the_trained_network_and_the_one_before_the_second_task(seed: int, paper: Any) -> None:
    twin, rows = tiny.twin("continual", seed), paper.part("continual", "masks", seed).rows
    assert rows[0].accuracy == pytest.approx(twin.accuracy(), rel=1e-8)
    # The network that a plain loop had after the first task, not a sum of events.
    assert rows[1].accuracy == pytest.approx(twin.accuracy(twin.weights[BEFORE]), rel=1e-8)
    travelled = paper.memory("continual", seed).weights(until=BEFORE)
    for name, expected in twin.weights[BEFORE].items():
        torch.testing.assert_close(travelled[name], expected, rtol=1e-5, atol=1e-6)
    assert rows[1].accuracy["upright"] == paper.raw("continual", "masks", seed)["rows"][1]["accuracy"]["upright"]
    assert rows[0].accuracy != rows[1].accuracy


@pytest.mark.parametrize("seed", [0, 1])
def test_networks_without_the_events_of_a_task(seed: int, paper: Any) -> None:
    twin, rows = tiny.twin("continual", seed), paper.part("continual", "masks", seed).rows
    memory = paper.memory("continual", seed)
    for number, row in enumerate(rows[2:], start=2):
        kept = twin.data.train.tasks != twin.recipe.task(row.without)
        masked = twin.rebuilt(kept)
        if row.layer is None:
            (other,) = {task.name for task in twin.recipe.tasks} - {row.without}
            for name, value in memory.weights(where={"task": other}).items():
                torch.testing.assert_close(value, masked[name], rtol=1e-4, atol=1e-6)
            assert not torch.equal(masked["fc0.weight"], twin.weights[-1]["fc0.weight"])
        else:
            final = twin.weights[-1]
            masked = {name: masked[name] if name.split(".")[0] == row.layer else final[name] for name in final}
        assert row.accuracy == pytest.approx(twin.accuracy(masked), rel=1e-8), number


def test_a_mask_is_not_the_earlier_network(paper: Any) -> None:
    """What momentum still carried of the first task is in the one, and not in the other."""
    memory, twin = paper.memory("continual"), tiny.twin("continual")
    masked, earlier = memory.weights(where={"task": "upright"}), memory.weights(until=BEFORE)
    moved = (twin.weights[BEFORE]["fc1.weight"] - twin.weights[0]["fc1.weight"]).norm()
    apart = float((masked["fc1.weight"] - earlier["fc1.weight"]).norm() / moved)
    assert 1e-3 < apart < 0.5
