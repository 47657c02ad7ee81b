"""A reply as tables in the terminal: for every query the model's answer, and in every layer what it draws on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from dualform.errors import MissingExtra
from dualform.view.pictures import can_show_blocks, picture
from dualform.view.replies import EventRow, GroupRow, LayerReply, Prediction, QueryReply, Question, Reply

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise MissingExtra(
        "Tables in the terminal need rich, which is not installed: pip install 'dualform[cli]'"
    ) from error

SHOWN = 3  # queries; JSON has all of them
COLUMNS = 4  # of the examples table, beside the numbers of an event


def show_reply(reply: Reply, console: Console, images: UInt8[Tensor, "images height width"] | None = None) -> None:
    """Print the reply, and beside the answers the images they are about."""
    several = max([len(reply.predictions), *(len(layer.queries) for layer in reply.layers)])
    for number in range(min(several, SHOWN)):
        prediction = reply.predictions[number] if number < len(reply.predictions) else None
        image = images[number] if images is not None and number < len(images) else None
        heading = _heading(reply, number if several > 1 else None, prediction)
        console.print(_beside(image, heading, console))
        for layer in reply.layers:
            if number < len(layer.queries):
                _show_layer(reply, layer, layer.queries[number], console)
    for note in reply.notes:
        console.print(Text(f"Note: {note}"))
    if several > SHOWN:
        rest = several - SHOWN
        console.print(f"{rest:,} more {'query is' if rest == 1 else 'queries are'} not shown: --json has all of them.")
    if reply.figure is not None:
        console.print(f"The figure is in {reply.figure}.", soft_wrap=True)
    console.print(_how(reply))


def asked_for(question: Question) -> str:
    """What the rows are, in a few words.

    >>> asked_for(Question(top=3, contributions=6, order="smallest", where=("label=4",)))
    'the 3 smallest contributions to output 6 of events where label=4'
    """
    what = "score" if question.contributions is None else "contribution"
    many = f"{question.order} {what}" if question.top == 1 else f"{question.top:,} {question.order} {what}s"
    many = many.replace("absolute", "largest absolute")
    to = "" if question.contributions is None else f" to output {question.contributions}"
    of = "events" if question.by is None else f"groups by {question.by}"
    where = f" where {' and '.join(question.where)}" if question.where else ""
    within = "" if question.within is None else f", of every {question.within}"
    return f"the {many}{to} of {of}{where}{within}"


def _how(reply: Reply) -> str:
    ways = {layer.explain for layer in reply.layers}
    if len(ways) == 1:
        return f"How: {ways.pop()}{' in every layer' if len(reply.layers) > 1 else ''}."
    return "How: " + "; ".join(f"{layer.layer or 'the model'} by {layer.explain}" for layer in reply.layers) + "."


def _heading(reply: Reply, number: int | None, prediction: Prediction | None) -> Text:
    text = Text(reply.inputs, "bold")
    if number is not None:
        text.append(f", query {number}")
    if reply.until != reply.steps:
        text.append(f", after step {reply.until:,} of {reply.steps:,}")
    if prediction is not None:
        text.append(f"\n\n{prediction.sentence}\n{prediction.outputs}", "not bold")
    return text


def _beside(image: UInt8[Tensor, "height width"] | None, heading: Text, console: Console) -> Padding:
    if image is None:
        return Padding(heading, (1, 0))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(picture(image, columns=18, blocks=can_show_blocks(console)), heading)
    return Padding(grid, (1, 0))


def _show_layer(reply: Reply, layer: LayerReply, query: QueryReply, console: Console) -> None:
    place = f" at {list(query.index)}" if len(layer.query_shape) > 1 else ""
    title = Text.assemble((layer.layer or "the model", "bold"), f"{place}: {asked_for(reply.question)}")
    parts: list[Any] = [title, _rows(reply.question, query.rows, layer)]
    if query.totals is not None:
        parts += [Text(f"totals by {reply.question.totals}"), _totals(query)]
    console.print(Group(*parts), "")


def _rows(question: Question, rows: Sequence[EventRow | GroupRow], layer: LayerReply) -> Table | Text:
    if not rows:
        return Text("  no event")
    groups = question.by or question.within
    columns, decimals = _columns(rows, groups), _decimals([row.score for row in rows])
    # A class that is called like its number needs no column of its own.
    named = any(row.class_name not in (None, str(row.columns.get("label", row.group))) for row in rows)
    table = _table()
    table.add_column("rank", justify="right")
    table.add_column("score" if question.contributions is None else "adds", justify="right")
    if groups is not None:
        table.add_column(groups, justify="right")
    numbers = ["event", "example", "step"] if question.by is None else ["events"]
    numbers += ["position"] if any(isinstance(row, EventRow) and row.position for row in rows) else []
    for name in numbers:
        table.add_column(name, justify="right")
    for name in columns:
        table.add_column(name, justify="right", overflow="ellipsis", no_wrap=True)
    several = question.by is None and len(layer.uses) > 1
    if several:
        table.add_column("through")
    if named:
        table.add_column("class", overflow="ellipsis", no_wrap=True)
    for row in rows:
        cells = [str(row.rank), f"{row.score:,.{decimals}f}"]
        cells += [] if groups is None else [_cell(row.group)]
        cells += [_cell(getattr(row, name)) for name in numbers]
        cells += [_cell(row.columns.get(name)) for name in columns]
        cells += [layer.uses[row.use]] if several and isinstance(row, EventRow) else []
        table.add_row(*cells, *([row.class_name or ""] if named else []))
    return table


def _totals(query: QueryReply) -> Table:
    assert query.totals is not None
    named = any(total.class_name not in (None, str(total.group)) for total in query.totals)
    table = _table()
    for name in ("group", "total"):
        table.add_column(name, justify="right")
    if named:
        table.add_column("class")
    decimals = _decimals([total.total for total in query.totals])
    for total in query.totals:
        table.add_row(_cell(total.group), f"{total.total:,.{decimals}f}", *([total.class_name or ""] if named else []))
    return table


def _columns(rows: Sequence[EventRow | GroupRow], groups: str | None) -> list[str]:
    """The columns that are shown beside the groups: the label first, then by name."""
    names = {name for row in rows for name in row.columns} - {groups}
    return sorted(names, key=lambda name: (name != "label", name))[:COLUMNS]


def _decimals(numbers: Sequence[float]) -> int:
    """How many decimals show six digits of the largest of some numbers, so that all stand in one column."""
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    return min(max(5 - math.floor(math.log10(largest)), 0), 12) if largest else 0


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="")


def _cell(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_cell, value))
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
