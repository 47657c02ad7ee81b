"""One question to all layers: the model is built anew, run on the inputs, and every layer is asked the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from tqdm import tqdm

import dualform
from dualform.errors import BadCall, BadQuery
from dualform.experiments.asking.conditions import condition
from dualform.experiments.asking.inputs import Source, output_names, read_inputs
from dualform.experiments.asking.models import factory, rebuilt_model, require_recipe
from dualform.experiments.asking.rows import Asked, Columns, layer_reply, place
from dualform.queries import Attention
from dualform.queries.attend import find_map
from dualform.view.replies import Output, Prediction, Question, Reply


def ask(
    memory: dualform.Memory, question: Question, source: Source, save: Path | None = None
) -> tuple[Reply, UInt8[Tensor, "images height width"] | None]:
    """Answer a question about the inputs that `source` names, with a figure in `save`; also their images, if any."""
    source.check()
    question.check()
    memory.require_events()
    build = factory(source.model) if source.model is not None else require_recipe(memory).model
    layers = [find_map(memory, layer) for layer in question.layers]
    conditions = [condition(memory, text) for text in question.where]
    inputs = read_inputs(memory, source)
    if save is not None:
        from dualform.experiments.asking.exhibit import check_figure, draw

        check_figure(memory, question, inputs, save)
    model = rebuilt_model(memory, build, question.until)
    outputs = run(model, inputs.tensors)
    spotlight = memory.attend(model, inputs.tensors, until=question.until)
    asked = {layer: narrowed(spotlight[layer], layer, question, conditions) for layer in layers or spotlight}
    columns = Columns(memory)
    replies = []
    for layer in tqdm(asked, "Asking", unit="layer", disable=None, leave=False):
        replies.append(layer_reply(memory, layer, asked[layer], question, columns))
    reply = Reply(
        memory=str(memory.path),
        recipe=memory.manifest.recipe,
        model=source.model,
        inputs=inputs.title,
        steps=memory.steps,
        until=memory.end(question.until),
        question=question,
        predictions=predictions(outputs, inputs.labels, output_names(memory, inputs)),
        layers=tuple(replies),
        notes=inputs.notes,
    )
    if save is not None:
        first = {layer: narrowed(spotlight[layer][:1], layer, question, conditions) for layer in asked}
        reply = dataclasses.replace(reply, figure=str(draw(memory, reply, inputs, first, columns, save)))
    return reply, inputs.images


def run(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor | None:
    """The model's outputs, or its logits where it returns more than a tensor; None where it has neither."""
    if isinstance(inputs, dict):
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            raise BadCall(
                f"--inputs holds the tensors {', '.join(inputs)}, but the model is called as "
                f"forward{inspect.signature(model.forward)}: {error}. Name the tensors like its arguments."
            ) from None
    try:
        with torch.no_grad():
            found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except Exception as error:
        # Whatever a model of the user's raises: the inputs are the likely cause, so they are described.
        given = inputs if isinstance(inputs, dict) else {"one tensor": inputs}
        shapes = ", ".join(
            f"{name}: {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in given.items()
        )
        raise BadCall(f"the model cannot take these inputs ({shapes}). {type(error).__name__}: {error}") from error
    found = getattr(found, "logits", found)
    return found if isinstance(found, Tensor) and found.is_floating_point() and found.ndim else None


def predictions(outputs: Tensor | None, labels: Sequence[int], class_names: Sequence[str]) -> tuple[Prediction, ...]:
    """The three largest outputs for every input, and the probability of the largest where the classes are known."""
    if outputs is None or not outputs.numel():
        return ()
    rows = outputs.reshape(-1, outputs.shape[-1])
    known = len(class_names) == rows.shape[1]
    made = []
    for number, row in enumerate(rows):
        best = row.topk(min(3, len(row)))
        units = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        made.append(
            Prediction(
                index=place(number, tuple(outputs.shape[:-1])),
                top=tuple(Output(unit, class_names[unit] if known else None, value) for unit, value in units),
                probability=float(row.double().softmax(0).max()) if known else None,
                label=class_names[labels[number]] if known and number < len(labels) else None,
            )
        )
    return tuple(made)


def narrowed(attention: Attention, layer: str, question: Question, conditions: Sequence[tuple[str, Any]]) -> Asked:
    """A layer's attention, or its contributions to a unit, over the events that fulfil all conditions."""
    for name, value in conditions:
        attention = attention.where(**{name: value})
    if question.contributions is None:
        return attention
    try:
        return attention.contributions(unit=question.contributions)
    except BadQuery as error:
        raise BadQuery(f"--contributions of {layer}: {error} `--layer NAME` asks another layer alone.") from None
