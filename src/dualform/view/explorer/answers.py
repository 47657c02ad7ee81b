"""What an image attends to, as plain numbers for the page: the model's answer, and every layer's spotlight."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from dualform.errors import BadQuery
from dualform.queries import Attention, Spotlight
from dualform.queries.attend import attend, uses_of
from dualform.queries.results import TopEvents
from dualform.queries.spotlight import Contributions
from dualform.view.explorer.levers import Input, Levers
from dualform.view.explorer.models import Models, apart
from dualform.view.explorer.subject import ImageSubject, Subject

MATCHES = 8
BEST = 500  # of a class, in the chart of scores
BINS = 40
PARTS = ("spotlights", "scores", "timeline")


class Answers:
    """The questions of the page about one subject."""

    def __init__(self, subject: Subject, images: ImageSubject) -> None:
        self.memory, self.images = subject.memory, images
        self.models = Models(subject.memory, images)

    def answer(self, asked: Input, levers: Levers, part: str) -> dict[str, Any]:
        """A part of what the page shows of an image."""
        if part not in PARTS:
            raise BadQuery(f"part is one of {', '.join(PARTS)}, not {part[:40]!r}.")
        if levers.until == 0:
            if part != "spotlights":
                raise BadQuery("before the first step there are no events: ask for a later step.")
            return {"prediction": self._prediction(self.models.of(levers), asked), "layers": []}
        model = self.models.of(levers)
        spotlight = self._spotlight(model, asked, levers)
        last = list(spotlight)[-1]
        layers = []
        for name in spotlight:
            attention, direction, measure = spotlight[name], None, "score"
            if name == last and levers.measure == "contributions":
                direction, measure = self._direction(levers, asked, model)
            whole = attention if direction is None else attention.contributions(direction=direction)
            layer = whole
            if levers.without:
                layer = whole.where(example=~self.images.of_groups(set(levers.without)))
            found: dict[str, Any] = {"layer": name, "measure": measure}
            if part == "spotlights":
                found |= self._matches(layer) | self._totals(name, attention, direction, levers)
            else:
                found |= self._scores(layer) if part == "scores" else self._timeline(layer)
            layers.append(found)
        if part != "spotlights":
            return {"layers": layers}
        return {"prediction": self._prediction(model, asked), "layers": layers}

    def _spotlight(self, model: nn.Module, asked: Input, levers: Levers) -> Spotlight:
        found = attend(self.memory, apart(model), self._inputs(asked), self.memory.steps, None)
        if levers.until is None:
            return found
        return self.memory.attend(None, {name: found[name].queries for name in found}, until=levers.until)

    def _inputs(self, asked: Input) -> Tensor:
        return self.images.preprocess(asked.pixels[None], asked.task)

    @torch.no_grad()
    def _direction(self, levers: Levers, asked: Input, model: nn.Module) -> tuple[Tensor, str]:
        """Along which outputs contributions are measured, and in words."""
        names = self.images.tasks[asked.task].class_names
        outputs = model(self._inputs(asked))[0]
        unit = int(outputs.argmax()) if levers.unit is None else levers.unit
        direction = torch.zeros(len(outputs), dtype=torch.float64)
        direction[unit] = 1.0
        if levers.against is None or levers.against == unit:
            return direction, f"adds to {names[unit]}"
        direction[levers.against] = -1.0
        return direction, f"adds to {names[unit]} rather than {names[levers.against]}"

    @torch.no_grad()
    def _prediction(self, model: nn.Module, asked: Input) -> dict[str, Any]:
        logits = model(self._inputs(asked))[0].double()
        names = self.images.tasks[asked.task].class_names
        answer = int(logits.argmax())
        return {
            "answer": answer,
            "class_name": names[answer],
            "class_names": names,
            "logits": logits.tolist(),
            "probabilities": logits.softmax(0).tolist(),
            "label": asked.label,
            "label_name": None if asked.label is None else names[asked.label],
        }

    def _matches(self, layer: Attention | Contributions) -> dict[str, Any]:
        """Best matches of different examples."""
        top, best = self._different(layer)
        matches = []
        for place in best:
            example = int(top.examples[0, place])
            found = self._described(example) | {"score": float(top.scores[0, place]), "step": int(top.steps[0, place])}
            matches.append(found | {"image": picture(self.images.train.images[example])})
        return {"matches": matches, "explain": top.explain()}

    def _totals(
        self, name: str, attention: Attention, direction: Tensor | None, levers: Levers
    ) -> dict[str, list[float]]:
        """Every class's total. What is left out are whole classes, so those of the others are the same without it."""
        if direction is not None and levers.until is None:
            weight, _, use = uses_of(self.memory)[name]
            record = self.memory.manifest.weights[weight]
            values = self.models.totals(record.name, use.bias, attention.queries[0], direction)
            sums = dict(zip(self._groups, values, strict=True))
        else:
            asked = attention if direction is None else attention.contributions(direction=direction)
            totals = asked.totals(by=self._by, absolute=direction is None)
            sums = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
        left_out = {self._groups[self.images.groups.index(group)] for group in levers.without}
        return {"totals": [0.0 if group in left_out else sums.get(group, 0.0) for group in self._groups]}

    def _different(self, layer: Attention | Contributions) -> tuple[TopEvents, list[int]]:
        """Events among the best, and which of them are the first of their example."""
        most = 4 * MATCHES
        while True:
            top = layer.top(most)
            first: dict[int, int] = {}
            for place, example in enumerate(top.examples[0].tolist()):
                if example >= 0:
                    first.setdefault(example, place)
            if len(first) >= MATCHES or int(top.events[0, -1]) < 0:
                return top, list(first.values())[:MATCHES]
            most *= 4

    def _scores(self, layer: Attention | Contributions) -> dict[str, Any]:
        """The best events of every class, in descending order."""
        top = layer.top(BEST, within=self._by)
        places = {group: place for place, group in enumerate(top.groups or ())}
        classes: list[dict[str, list[Any]]] = []
        for group in self._groups:
            if group not in places:
                classes.append({"scores": [], "examples": [], "steps": []})
                continue
            at = top.events[0, places[group]] >= 0
            fields = {"scores": top.scores, "examples": top.examples, "steps": top.steps}
            classes.append({name: field[0, places[group]][at].tolist() for name, field in fields.items()})
        return {"classes": classes, "explain": top.explain()}

    def _timeline(self, layer: Attention | Contributions) -> dict[str, Any]:
        """How the sum over all events spreads over training."""
        found = layer.timeline(BINS, absolute=isinstance(layer, Attention))
        return {"edges": found.edges.tolist(), "values": found.values[0].tolist(), "explain": found.explain()}

    def _described(self, example: int) -> dict[str, Any]:
        task, label = int(self.images.train.tasks[example]), int(self.images.train.labels[example])
        one = self.images.tasks[task]
        return {"example": example, "task": one.title, "label": label, "class_name": one.class_names[label]}

    @property
    def _by(self) -> str | tuple[str, ...]:
        columns = self.images.columns
        return columns[0] if len(columns) == 1 else columns

    @property
    def _groups(self) -> list[Any]:
        """The memory's names of every class, in the order of the page."""
        tasks = self.images.tasks
        if len(tasks) == 1:
            return [label for _, label in self.images.groups]
        return [(tasks[task].name, label) for task, label in self.images.groups]


@lru_cache(maxsize=1)
def _pillow() -> Any:
    from PIL import Image

    return Image


def png(pixels: UInt8[Tensor, "height width"]) -> bytes:
    """An image as a PNG file, with dark ink on a light ground."""
    content = io.BytesIO()
    _pillow().fromarray((255 - pixels).numpy()).save(content, "PNG", compress_level=1)
    return content.getvalue()


def picture(pixels: UInt8[Tensor, "height width"]) -> str:
    """An image inside an answer."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")
