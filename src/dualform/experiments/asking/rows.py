"""The answers of one layer as rows: what a table prints and JSON holds."""

from __future__ import annotations

from typing import Any

import numpy as np

import dualform
from dualform.experiments.asking.models import recipe_of
from dualform.queries import Attention
from dualform.queries.attend import uses_of
from dualform.queries.results import TopEvents, TopGroups
from dualform.queries.spotlight import Contributions
from dualform.view.replies import EventRow, GroupRow, GroupTotal, LayerReply, QueryReply, Question

Asked = Attention | Contributions


class Columns:
    """What the examples table says of an example: every column that has one value for each."""

    def __init__(self, memory: dualform.Memory) -> None:
        chosen = recipe_of(memory)
        self.class_names: tuple[str, ...] = chosen.class_names if chosen is not None else ()
        tasks = chosen.tasks if chosen is not None else ()
        self._named = {task.name: task.class_names for task in tasks}
        columns = (memory.column(name) for name in memory.columns)
        self._columns = [column for column in columns if column.values.ndim == 1]

    def of(self, example: int) -> dict[str, Any]:
        """The columns of an example; none for an event without one."""
        found = {}
        for column in self._columns:
            if 0 <= example < len(column):
                value = column.values[example].item()
                found[column.name] = value if column.categories is None else column.categories[int(value)]
        return found

    def class_name(self, label: Any, task: Any = None) -> str | None:
        """The name of the class that a label stands for, in its task, where a recipe names it."""
        whole = isinstance(label, int) and not isinstance(label, bool)
        names = self._named.get(task, self.class_names)
        return names[label] if whole and 0 <= label < len(names) else None


def layer_reply(memory: dualform.Memory, layer: str, asked: Asked, question: Question, columns: Columns) -> LayerReply:
    """Ask one layer and put its answers into rows."""
    found: TopEvents | TopGroups
    if question.by is not None:
        found = asked.top(question.top, by=named_columns(question.by), order=question.order)
    else:
        within = None if question.within is None else named_columns(question.within)
        found = asked.top(question.top, within=within, order=question.order)
    explain = found.explain()
    totals = None
    if question.totals is not None:
        summed = asked.totals(by=named_columns(question.totals))
        explain += f", totals by {summed.explain()}"
        named = [columns.class_name(group) if question.totals == "label" else None for group in summed.groups]
        totals = [
            tuple(GroupTotal(*row) for row in zip(summed.groups, named, values, strict=True))
            for values in summed.values.tolist()
        ]
    queries = [
        QueryReply(
            index=place(number, asked.query_shape),
            rows=event_rows(found, number, columns)
            if isinstance(found, TopEvents)
            else group_rows(found, number, question.by or "", columns),
            totals=None if totals is None else totals[number],
        )
        for number in range(len(found.scores))
    ]
    weight = memory.manifest.weights[uses_of(memory)[layer][0]]
    uses = tuple(use.map for use in weight.uses)
    return LayerReply(layer, weight.name, uses, asked.query_shape, explain, tuple(queries))


def event_rows(found: TopEvents, query: int, columns: Columns) -> tuple[EventRow, ...]:
    """The best events of one query, group by group where they were asked for within a column."""
    fields = (found.scores, found.events, found.examples, found.steps, found.positions, found.uses)
    rows = []
    of_groups = [field[query].reshape(-1, found.scores.shape[-1]).tolist() for field in fields]
    groups = [None] if found.groups is None else found.groups
    for group, *lists in zip(groups, *of_groups, strict=True):
        for rank, (score, event, example, step, position, use) in enumerate(zip(*lists, strict=True), start=1):
            if event >= 0:
                values = columns.of(example)
                name = columns.class_name(values.get("label"), values.get("task"))
                rows.append(EventRow(rank, score, event, example, step, position, use, group, name, values))
    return tuple(rows)


def group_rows(found: TopGroups, query: int, by: str, columns: Columns) -> tuple[GroupRow, ...]:
    """The best groups of one query."""
    rows = []
    numbers = zip(found.groups[query], found.scores[query].tolist(), found.counts[query].tolist(), strict=True)
    for rank, (group, score, count) in enumerate(numbers, start=1):
        if group is not None:
            values = columns.of(group) if by == "example" else {}
            name = columns.class_name(group if by == "label" else values.get("label"), values.get("task"))
            rows.append(GroupRow(rank, score, group, count, name, values))
    return tuple(rows)


def named_columns(text: str) -> str | tuple[str, ...]:
    """A column, or several joined by commas.

    >>> named_columns("label"), named_columns("task,label")
    ('label', ('task', 'label'))
    """
    return tuple(text.split(",")) if "," in text else text


def place(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a query in its layer's query shape, from its number."""
    return tuple(int(at) for at in np.unravel_index(number, shape)) if shape else ()
