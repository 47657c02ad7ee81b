"""Means and deviations over runs, recomputed from the runs' own files."""

import json
import math
import statistics
from typing import Any

import pytest

import tiny
from dualform.experiments.paper.results import Spread

SEEDS = (0, 1)


@pytest.fixture(scope="module")
def results(paper: Any) -> dict[str, Any]:
    text = (paper.out / "results.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return found


def spread(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return {"mean": mean, "deviation": deviation, "runs": len(values)}


def same(found: dict[str, float], values: list[float]) -> None:
    assert found == pytest.approx(spread(values), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("name", tiny.EXPERIMENTS)
def test_accuracies(name: str, results: dict[str, Any], paper: Any) -> None:
    summary = results["experiments"][name]["summary"]
    tasks = [task.name for task in tiny.EXPERIMENTS[name].recipe.tasks]
    assert list(summary["accuracy"]) == tasks
    for task in tasks:
        values = [paper.raw(name, "checks", seed)["accuracy"][task] for seed in SEEDS]
        assert values[0] != values[1]
        same(summary["accuracy"][task], values)


def test_votes(results: dict[str, Any], paper: Any) -> None:
    summary = results["experiments"]["single"]["summary"]
    runs = [paper.raw("single", "votes", seed) for seed in SEEDS]
    assert list(summary["table 1"]) == ["fc0", "fc1", "fc2"]
    for field in ("target", "output", "right"):
        for layer, cells in summary["table 1"].items():
            same(cells[field], [run["layers"][layer][field] for run in runs])
        for vote in ("rebuilt", "classes"):
            same(summary["signed votes"][vote][field], [run[vote][field] for run in runs])


def test_crossings_and_masks(results: dict[str, Any], paper: Any) -> None:
    for name in ("joint", "continual"):
        rows = results["experiments"][name]["summary"]["cross-task attention"]
        runs = [paper.raw(name, "crossings", seed)["rows"] for seed in SEEDS]
        assert [(row["task"], row["layer"]) for row in rows] == [(row["task"], row["layer"]) for row in runs[0]]
        for place, row in enumerate(rows):
            for field in ("attention", "best"):
                same(row[field], [run[place][field] for run in runs])
    rows = results["experiments"]["continual"]["summary"]["masks"]
    runs = [paper.raw("continual", "masks", seed)["rows"] for seed in SEEDS]
    for place, row in enumerate(rows):
        assert {key: row[key] for key in ("without", "layer", "until")} == {
            key: runs[0][place][key] for key in ("without", "layer", "until")
        }
        for task in ("upright", "turned"):
            same(row["accuracy"][task], [run[place]["accuracy"][task] for run in runs])
    assert len(rows) == len(runs[0]) == 10


@pytest.mark.parametrize("name", tiny.EXPERIMENTS)
def test_settings_and_every_run_are_there(name: str, results: dict[str, Any], paper: Any) -> None:
    found, experiment = results["experiments"][name], tiny.EXPERIMENTS[name]
    assert found["settings"]["phases"] == [
        {"tasks": list(phase.tasks), "steps": phase.steps} for phase in experiment.phases
    ]
    assert found["settings"]["recipe_name"] == experiment.recipe_name
    assert [case["figure"] for case in found["settings"]["showcases"]] == [c.figure for c in experiment.showcases]
    assert [run["seed"] for run in found["runs"]] == list(SEEDS)
    for seed, run in zip(SEEDS, found["runs"], strict=True):
        for part in (one.name for one in paper.folder(name, seed).parts):
            assert run[part] == paper.raw(name, part, seed), part
        seconds = {file.stem for file in paper.folder(name, seed).path.glob("*.json")}
        assert set(run["seconds"]) == seconds
        assert all(value >= 0 for value in run["seconds"].values())
    assert found["runs"][1]["spotlights"] is None


def test_the_request_and_the_machine_are_written_down(results: dict[str, Any]) -> None:
    assert results["request"] == {"experiments": "images", "runs": 2, "seed": 0, "steps": None}
    assert list(results["experiments"]) == ["single", "joint", "continual"]
    assert {"dualform", "torch", "python", "machine", "data", "format"} < set(results)
    assert "scikit-learn" in results["data"] and "turned and inverted" in results["data"]


@pytest.mark.parametrize("values", [[3.0], [1.0, 3.0], [97.1, 96.2, 95.5, 96.9, 97.0], [2.0, math.nan, 4.0]])
def test_a_spread_is_the_mean_and_the_deviation_of_what_is_known(values: list[float]) -> None:
    known = [value for value in values if value == value]
    found = Spread.of(values)
    assert found.runs == len(known)
    assert found.mean == pytest.approx(statistics.fmean(known))
    assert found.deviation == pytest.approx(statistics.pstdev(known))
    assert str(found) == (f"{found.mean:.1f}" if len(known) == 1 else f"{found.mean:.1f} ± {found.deviation:.1f}")


def test_of_nothing_there_is_no_mean() -> None:
    for found in (Spread.of([]), Spread.of([math.nan, math.nan])):
        assert (found.runs, str(found)) == (0, "–")
        assert math.isnan(found.mean)
