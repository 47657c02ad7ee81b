"""The report: one self-contained page with every figure and table, and the figures as files of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualform.experiments.datasets import Dataset
from dualform.experiments.paper.drawing import (
    Drawn,
    draw_inputs,
    draw_masks,
    draw_push,
    draw_showcase,
    draw_time,
    draw_weighted,
    layer_title,
    mask_title,
)
from dualform.experiments.paper.results import Results
from dualform.experiments.paper.settings import PAPER_ACCURACY, PAPER_TABLE
from dualform.view.page import Page, save_both

SETTINGS = (
    "A network 784–800–800–10 with relu and biases, PyTorch's default initialisation; SGD with learning rate 0.003, "
    "momentum 0.9, and the global norm of the gradient clipped at 1; mean cross-entropy, batches of 128 without "
    "replacement within an epoch; 40,053 training images of each data set, normalised by one mean and one standard "
    "deviation each. The paper says “vanilla SGD”; its published code, which this follows, has momentum and clipping. "
)
STEPS = "The single task has the paper's 3,000 steps (its code: 5,000)."
SHORTENED = "Every phase of training was shortened to {:,} steps; the paper has 3,000, in joint training 5,000."
CAUTION = (
    "What is shown is exact as a sum: a layer's output is its initial part plus what every event adds. It is not "
    "causal: leaving events out is an ablation, not a retraining, and the keys of hidden layers were made by a network "
    "that other events had shaped."
)

FIELDS = {"target": "wrong: true label", "output": "wrong: answer", "right": "right: label"}


class Report:
    """A page that is filled experiment by experiment; every figure also becomes a PNG and an SVG file."""

    def __init__(self, out: Path, data: dict[str, Dataset]) -> None:
        self.page, self._data, self._figures = (
            Page("The dual form of neural networks: image experiments"),
            data,
            out / "figures",
        )
        self._figures.mkdir(parents=True, exist_ok=True)
        self._drawn: set[str] = set()

    def show(self, *drawn: Drawn) -> None:
        """Put figures side by side, and into files."""
        shown = []
        for one in drawn:
            self._drawn.add(one.name)
            shown.append(
                (
                    save_both(one.figure, self._figures / one.name),
                    (one.figure.get_figwidth(), one.figure.get_figheight()),
                    one.caption,
                )
            )
        self.page.figures(*shown)

    def clear(self, earlier: set[str]) -> list[str]:
        """Remove those figures of an earlier report that this one does not have; the names of all of this one."""
        for name in earlier - self._drawn:
            for suffix in (".png", ".svg"):
                (self._figures / f"{name}{suffix}").unlink(missing_ok=True)
        return sorted(self._drawn)

    def experiment(self, one: Results) -> None:
        """The section of one experiment."""
        experiment, data = one.experiment, self._data[one.experiment.recipe_name]
        self.page.section(f"{experiment.title} (Section {experiment.section})", experiment.name)
        self._accuracy(one)
        if one.first.votes is not None:
            self._votes(one)
        if one.first.masks is not None:
            self._masks(one)
        if one.first.crossings is not None:
            self._crossings(one)
        for showcase in experiment.showcases:
            self.page.heading(f"The test image of Figure {showcase.figure}")
            note = (
                next((shown.note for shown in one.first.spotlights.showcases if shown.figure == showcase.figure), "")
                if one.first.spotlights
                else ""
            )
            if note:
                self.page.text(f"Note: {note}.")
            self.show(*draw_showcase(one, showcase, data))
        self.page.heading("Training time, and the size of errors" if draw_weighted(one) else "Training time")
        self.show(*draw_time(one), *draw_weighted(one))
        self._pushes(one, data)

    def _accuracy(self, one: Results) -> None:
        tasks = one.experiment.recipe.tasks
        paper = PAPER_ACCURACY[one.experiment.name]
        rows = [
            [
                task.title,
                str(one.accuracy(task.name)),
                f"{paper[task.name]:.0f}",
            ]
            for task in tasks
        ]
        self.page.table(
            ["task", "here", "paper"], rows, "Test accuracy in per cent, mean ± standard deviation over runs."
        )
        rows = []
        for place, row in enumerate(one.first.checks.certificate):
            found = [run.checks.certificate[place] for run in one.runs]
            exact = f"{sum(one.exact for one in found)} of {len(found)}"
            reasons = dict.fromkeys(one.reason for one in found if not one.exact)
            rows.append([row.weight, _worst([one.residual for one in found]), _worst([one.rounding for one in found])])
            rows[-1].append("; ".join([exact, *reasons]))
        self.page.table(
            ["weight", "residual", "rounding", "exact"],
            rows,
            f"Certificate: how far each weight is from its initial value plus its {one.first.checks.events:,} events, "
            "relative to what was learned; the largest over runs. Exact means at most ten times what rounding leaves.",
        )

    def _votes(self, one: Results) -> None:
        self.page.heading("Table 1")
        rows = []
        for layer in one.experiment.layers:
            rows.append([layer_title(layer)])
            for field in FIELDS:
                mean, deviation = PAPER_TABLE[layer][field]
                rows[-1] += [str(one.vote(layer, field)), f"{mean:.1f} ± {deviation:.1f}"]
        self.page.table(
            ["layer", *(head for title in FIELDS.values() for head in (title, "paper"))],
            rows,
            "How often, in per cent, the class with the largest total of |score| is the true label or the model's "
            "answer: over the test images that the model gets wrong, and over those that it gets right.",
        )
        rows = []
        for vote, title in (
            ("rebuilt", "the unit with the largest initial() + Σ contributions"),
            ("classes", "the class g whose events add most to unit g"),
        ):
            rows.append([title, *(str(one.signed_vote(vote, field)) for field in FIELDS)])
        self.page.table(
            ["vote", *FIELDS.values()],
            rows,
            "Table 1 again with signed contributions to the logits (layer-2). The first vote is the model's own output "
            "by construction; the second is what the training classes say.",
        )
        agreeing = sum(run.votes.agreeing for run in one.runs if run.votes)
        images = sum(run.votes.images for run in one.runs if run.votes)
        apart = max(run.votes.apart for run in one.runs if run.votes)
        self.page.text(
            f"Rebuilt logits answer as the model does for {agreeing:,} of {images:,} test images; they differ from the "
            f"model's by at most {apart:.0e} of the largest logit."
        )

    def _masks(self, one: Results) -> None:
        assert one.first.masks is not None
        recipe = one.experiment.recipe
        rows = [
            [
                ("" if row.layer is None else "… ") + mask_title(recipe, row),
                *(str(one.masked(place, task.name)) for task in recipe.tasks),
            ]
            for place, row in enumerate(one.first.masks.rows)
        ]
        self.page.heading("The mask that there is in the dual form")
        self.page.text(
            "The paper notes that with an attention mask on the events of the second task the network would be as good "
            "on the first as before. Here it is, exactly: the sum without these events, at the last step. Time travel "
            "rebuilds the network as it was; a mask differs from it by what the momentum still carried."
        )
        self.page.table(
            ["model", *(task.title for task in recipe.tasks)], rows, "Test accuracy in per cent, over all runs."
        )
        self.show(*draw_masks(one))

    def _crossings(self, one: Results) -> None:
        first = one.first.crossings
        assert first is not None
        recipe = one.experiment.recipe
        rows = []
        for place, row in enumerate(first.rows):
            title = recipe.tasks[recipe.task(row.task)].title
            shares = (str(one.crossing(place, field)) for field in ("attention", "best"))
            rows.append([title, layer_title(row.layer), *shares])
        self.page.heading("Cross-task attention")
        self.page.table(
            ["test images of", "layer", "of all attention", "of the ten best events"],
            rows,
            f"How much goes to events of the other task, in per cent: means over {first.images:,} test images a task.",
        )

    def _pushes(self, one: Results, data: Dataset) -> None:
        pushes = one.first.pushes
        if pushes is None or not pushes.images:
            return
        self.page.heading("Wrong answers, and who pushed them")
        for push in pushes.images:
            self.show(draw_push(one, push, data))


def _worst(numbers: Sequence[float | None]) -> str:
    """The largest of some numbers, if all are known."""
    known = [number for number in numbers if number is not None]
    return f"{max(known):.1e}" if len(known) == len(numbers) else "not measured"


def write_report(
    out: Path, results: Sequence[Results], data: dict[str, Dataset], about: dict[str, Any], earlier: set[str]
) -> list[str]:
    """Write report.html and the figures, and remove those of the earlier report; the names of all figures."""
    report = Report(out, data)
    page = report.page
    asked = about["request"]["steps"]
    seeds = ", ".join(str(run.seed) for run in results[0].runs)
    page.text(
        "The image experiments of “The Dual Form of Neural Networks Revisited” (Irie, Csordás, Schmidhuber, ICML "
        "2022), from exact memories of the training runs.",
        SETTINGS + (STEPS if asked in (None, 3000) else SHORTENED.format(asked)),
        CAUTION,
    )
    page.contents()
    rows = []
    for one in results:
        steps = " + ".join(f"{phase.steps:,}" for phase in one.experiment.phases)
        seconds = [sum(run.seconds.values()) for run in one.runs]
        rows.append([one.experiment.title, steps, str(len(one.runs)), f"{sum(seconds) / len(seconds):.0f} s"])
    page.table(
        ["experiment", "steps", "runs", "a run took"],
        rows,
        f"Seeds {seeds}; figures are of the first. dualform {about['dualform']}, torch {about['torch']}, "
        f"{about['machine']}.",
    )
    page.text(f"Data: {about['data']}")
    page.section("Inputs", "inputs")
    report.show(*draw_inputs(results, data))
    for one in results:
        report.experiment(one)
    figures = report.clear(earlier)
    unfinished = out / "report.html.part"
    unfinished.write_text(page.html(), encoding="utf-8")
    os.replace(unfinished, out / "report.html")
    return figures
