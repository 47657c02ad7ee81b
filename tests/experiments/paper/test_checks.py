"""What every run is checked for: it is the training that it says it is, and its numbers are those of a plain loop."""

from typing import Any

import pytest
import torch

import tiny

RUNS = [(name, seed) for name in tiny.EXPERIMENTS for seed in (0, 1)]


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_the_run_is_the_plain_training_of_its_seed_bit_for_bit(name: str, seed: int, paper: Any) -> None:
    twin, memory = tiny.twin(name, seed), paper.memory(name, seed)
    for weight, expected in twin.weights[-1].items():
        assert torch.equal(memory.final(weight), expected), weight
    model = paper.run(name, seed).model
    assert all(torch.equal(value, twin.weights[-1][key]) for key, value in model.state_dict().items())
    for number, layer in enumerate(twin.layers):
        blocks = list(memory.blocks(number, memory.steps))
        plain = twin.layers[layer]
        assert torch.equal(torch.cat([block.keys for block in blocks]).double(), plain.keys)
        assert torch.equal(torch.cat([block.examples for block in blocks]).long(), plain.examples)
        assert torch.equal(torch.cat([block.steps for block in blocks]).long(), plain.steps)


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_accuracies_are_by_task(name: str, seed: int, paper: Any) -> None:
    found, expected = paper.part(name, "checks", seed).accuracy, tiny.twin(name, seed).accuracy()
    assert list(found) == [task.name for task in tiny.EXPERIMENTS[name].recipe.tasks]
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_certificate_rows_are_the_memorys_and_hold_in_fp64(name: str, seed: int, paper: Any) -> None:
    checks, memory, twin = paper.part(name, "checks", seed), paper.memory(name, seed), tiny.twin(name, seed)
    assert checks.exact
    rebuilt = twin.rebuilt()
    for row, expected in zip(checks.certificate, memory.certificate(), strict=True):
        assert (row.weight, row.exact, row.reason) == (expected.weight, expected.exact, expected.reason or "")
        assert row.residual == pytest.approx(expected.residual, rel=1e-6)
        assert row.rounding == pytest.approx(expected.rounding, rel=1e-6)
        last, first = (twin.weights[step][row.weight].double() for step in (-1, 0))
        residual = (last - rebuilt[row.weight].double()).norm() / (last - first).norm()
        assert max(row.residual, float(residual)) <= min(10 * row.rounding, 1e-5)
    assert checks.steps == twin.steps == memory.steps
    assert checks.events == 128 * twin.steps == len(twin.layers["fc0"].keys)
    files = sum(file.stat().st_size for file in memory.path.rglob("*") if file.is_file())
    assert 0 < checks.bytes <= files


def test_runs_of_other_seeds_are_other_runs(paper: Any) -> None:
    one, other = (paper.memory("single", seed).final("fc1.weight") for seed in (0, 1))
    assert not torch.equal(one, other)
