"""A reply as a figure: the image, the model's answer, and in every layer the training images it draws on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

import dualform
from dualform.errors import BadCall, BadQuery
from dualform.experiments.asking.inputs import Inputs, output_names
from dualform.experiments.asking.models import require_recipe
from dualform.experiments.asking.rows import Asked, Columns
from dualform.experiments.matches import best_examples
from dualform.view.figures import check_format, save, spotlight_figure
from dualform.view.panels import Exhibit, Match, Panel
from dualform.view.replies import EventRow, GroupRow, LayerReply, Question, Reply

MATCHES = 10  # of a layer, in two lines
TITLE = 22  # characters that fit above the test image


def check_figure(memory: dualform.Memory, question: Question, inputs: Inputs, path: Path) -> None:
    """BadCall where no figure can be drawn of this, before anything is computed."""
    check_format(path)
    if not path.absolute().parent.is_dir():
        raise BadCall(f"--save {path}: there is no directory {path.absolute().parent}.")
    if memory.manifest.recipe is None or inputs.images is None:
        raise BadCall("--save draws images, so it needs a memory with a recipe and inputs that are its images.")
    if question.by not in (None, "example"):
        raise BadCall(
            f"--save draws training images, and --by {question.by} has none: ask --by example, or without --by."
        )
    if "label" not in memory.columns:
        raise BadQuery(
            "--save shows the attention of every class and needs the column 'label': memory.annotate(label=…)."
        )


def draw(
    memory: dualform.Memory,
    reply: Reply,
    inputs: Inputs,
    first: Mapping[str, Asked],
    columns: Columns,
    path: Path,
) -> Path:
    """Draw the first input's reply and return the file; `first` is what was asked of every layer for it alone."""
    prediction, question = reply.predictions[0], reply.question
    if prediction.probability is None or inputs.images is None:
        raise BadCall("--save shows the answer of a recipe's model; this model's outputs are not the recipe's classes.")
    images, names = training_images(memory), output_names(memory, inputs)
    panels = tuple(panel(layer, first[layer.layer], question, images, columns) for layer in reply.layers)
    if question.contributions is None:
        words = {"largest": "best matches", "smallest": "lowest scores", "absolute": "largest scores of either sign"}
        what = f"{words[question.order]} in training"
    else:
        words = {"largest": "largest", "smallest": "most negative", "absolute": "largest, of either sign,"}
        what = f"{words[question.order]} contributions to output {question.contributions}"
    where = f"\nwhere {' and '.join(question.where)}" if question.where else ""
    signed = question.contributions is not None
    short = reply.inputs if len(reply.inputs) <= TITLE else f"{reply.inputs[: TITLE - 1]}…"
    share = f"share of {'this' if question.where else 'all'} attention, by class"
    exhibit = Exhibit(
        image=inputs.images[0],
        title=f"{short}\nafter step {reply.until:,}" if reply.until < reply.steps else short,
        label=prediction.label,
        answer=prediction.answer,
        probability=prediction.probability,
        class_names=names,
        panels=panels,
        matches_title=what + where,
        shares_title="sum of contributions, by class" if signed else share,
        signed=signed,
    )
    return save(spotlight_figure(exhibit), path)


def training_images(memory: dualform.Memory) -> UInt8[Tensor, "examples height width"]:
    """The training images by their ids: the memory's own column, or else the recipe's data set."""
    if "image" in memory.columns:
        stored = memory.column("image").values
        if stored.ndim == 3 and stored.dtype == torch.uint8:
            return stored
    return require_recipe(memory).load().train.images


def panel(
    layer: LayerReply, asked: Asked, question: Question, images: UInt8[Tensor, "_ _ _"], columns: Columns
) -> Panel:
    """A layer's matches, each another training image, and what every class draws."""
    signed = question.contributions is not None
    totals = asked.totals(by="label", absolute=not signed)
    sums = torch.zeros(len(columns.class_names), dtype=torch.float64)
    for group, total in zip(totals.groups, totals.values[0].tolist(), strict=True):
        if columns.class_name(group) is not None:
            sums[group] = total
    measure, most = "adds" if signed else "score", min(question.top, MATCHES)
    rows = layer.queries[0].rows
    if question.by is not None:
        matches = [match(row, images, measure) for row in rows[:most]]
    elif question.within is not None:
        matches = [match(row, images, measure) for row in rows if row.rank == 1][:most]
    else:
        matches = other_examples(asked, question, images, columns, measure)
    return Panel(layer.layer, tuple(matches), sums if signed else sums / max(sums.sum().item(), 1e-300))


def other_examples(
    asked: Asked, question: Question, images: UInt8[Tensor, "_ _ _"], columns: Columns, measure: str
) -> list[Match]:
    """The best events of different examples."""
    found = []
    for best in best_examples(asked, min(question.top, MATCHES), order=question.order):
        values = columns.of(best.example)
        label = columns.class_name(values.get("label"), values.get("task")) or str(values.get("label", "?"))
        found.append(Match(images[best.example], label, best.score, best.step, best.example, measure))
    return found


def match(row: EventRow | GroupRow, images: UInt8[Tensor, "_ _ _"], measure: str) -> Match:
    """A row with its picture."""
    example = row.example if isinstance(row, EventRow) else int(row.group)
    label = row.class_name or str(row.columns.get("label", "?"))
    step, events = (row.step, None) if isinstance(row, EventRow) else (0, row.events)
    return Match(images[example], label, row.score, step, example, measure, events)
