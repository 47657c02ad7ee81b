"""A reply: what a memory says of some inputs, layer by layer, in plain numbers and texts for tables and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from dualform.errors import BadQuery
from dualform.view.panels import verdict


@dataclass(frozen=True)
class Question:
    """What is asked of every layer; `by`, `within` and `totals` are columns, several joined by commas."""

    layers: tuple[str, ...] = ()
    top: int = 10
    by: str | None = None
    within: str | None = None
    order: str = "largest"
    where: tuple[str, ...] = ()
    contributions: int | None = None
    until: int | None = None
    totals: str | None = None

    def check(self) -> None:
        """BadQuery for what cannot be asked, in the words of the command line."""
        if self.top < 1:
            raise BadQuery(f"--top must be at least 1, not {self.top}.")
        if self.by is not None and self.within is not None:
            raise BadQuery("--by and --within cannot be asked for together: give one of them.")


@dataclass(frozen=True)
class Output:
    """One output of the model, and the class it stands for where a recipe names it."""

    unit: int
    class_name: str | None
    value: float


@dataclass(frozen=True)
class Prediction:
    """The model's answer to one input: its largest outputs, and the true label where it is known."""

    index: tuple[int, ...]
    top: tuple[Output, ...]
    probability: float | None = None
    label: str | None = None

    @property
    def answer(self) -> str:
        """The class, or else the number, of the largest output."""
        best = self.top[0]
        return best.class_name or str(best.unit)

    @property
    def sentence(self) -> str:
        """What the model answers and, where it is known, whether that is right."""
        if self.probability is None:
            return f"The model's largest output is number {self.answer}."
        return verdict(self.answer, self.probability, self.label)

    @property
    def outputs(self) -> str:
        """The largest outputs, one after another."""
        named = (f"{one.class_name or one.unit}: {one.value:.4g}" for one in self.top)
        return f"{'Outputs' if self.probability is None else 'Logits'}  {'   '.join(named)}"


@dataclass(frozen=True)
class EventRow:
    """An event among the best; `use` is an index into the layer's uses, `group` that of `within`, where asked for."""

    rank: int
    score: float
    event: int
    example: int
    step: int
    position: int
    use: int
    group: Any
    class_name: str | None
    columns: dict[str, Any]


@dataclass(frozen=True)
class GroupRow:
    """A group among the best by the sum over its events; `columns` where the groups are examples."""

    rank: int
    score: float
    group: Any
    events: int
    class_name: str | None
    columns: dict[str, Any]


@dataclass(frozen=True)
class GroupTotal:
    """The sum over all events of a group."""

    group: Any
    class_name: str | None
    total: float


@dataclass(frozen=True)
class QueryReply:
    """The rows of one query; `index` is its place in the layer's query shape."""

    index: tuple[int, ...]
    rows: tuple[EventRow | GroupRow, ...]
    totals: tuple[GroupTotal, ...] | None = None


@dataclass(frozen=True)
class LayerReply:
    """One layer: its rows for every query, and how they were computed; `uses` are the maps that use its weight."""

    layer: str
    weight: str
    uses: tuple[str, ...]
    query_shape: tuple[int, ...]
    explain: str
    queries: tuple[QueryReply, ...]


@dataclass(frozen=True)
class Reply:
    """Everything that was asked and answered. Its fields are the keys of the JSON, in docs/cli.md."""

    memory: str
    recipe: str | None
    model: str | None
    inputs: str
    steps: int
    until: int
    question: Question
    predictions: tuple[Prediction, ...]
    layers: tuple[LayerReply, ...]
    notes: tuple[str, ...] = ()
    figure: str | None = None
    version: int = 1


def to_json(reply: Reply) -> str:
    """The reply as one JSON object; NaN and infinity, which JSON does not have, are null."""
    return json.dumps(_plain(dataclasses.asdict(reply)), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
