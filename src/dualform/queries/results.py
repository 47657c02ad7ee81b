"""Answers: small frozen objects with tensors inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from dualform.errors import MissingExtra


@dataclass(frozen=True)
class Explanation:
    """How an answer was computed."""

    way: str
    rows: int
    nan: int = 0

    def __str__(self) -> str:
        apart = f"; {self.nan:,} NaN scores set apart" if self.nan else ""
        return f"{self.way}: {self.rows:,} rows read{apart}"


class _Answer:
    """What all answers can do: explain themselves, become a table, show in a notebook."""

    explanation: Explanation

    def explain(self) -> str:
        """Which way the answer was computed, and how many rows were read."""
        return str(self.explanation)

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        raise AssertionError("every answer defines its table")

    def to_pandas(self) -> Any:
        """The answer as a pandas table, a row for each query and rank (needs `pip install 'dualform[table]'`)."""
        try:
            import pandas
        except ImportError:
            raise MissingExtra("to_pandas() needs pandas: pip install 'dualform[table]'") from None
        header, rows = self._rows()
        return pandas.DataFrame(rows, columns=header)

    def __repr__(self) -> str:
        header, rows = self._rows()
        shown = [[_short(cell) for cell in row] for row in rows[:20]]
        widths = [max(len(row[at]) for row in [header, *shown]) for at in range(len(header))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *shown]
        ]
        if len(rows) > 20:
            lines.append(f"… {len(rows) - 20:,} more rows")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        header, rows = self._rows()
        cells = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(_short(c))}</td>" for c in row) + "</tr>" for row in rows[:20])
        more = f"<p>… {len(rows) - 20:,} more rows</p>" if len(rows) > 20 else ""
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{more}"


def _short(cell: Any) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True, repr=False)
class TopEvents(_Answer):
    """The best events of every query: [queries, k], or [queries, groups, k] with `within`."""

    scores: Float[Tensor, "queries *groups k"]
    events: Int64[Tensor, "queries *groups k"]
    examples: Int64[Tensor, "queries *groups k"]
    steps: Int64[Tensor, "queries *groups k"]
    positions: Int64[Tensor, "queries *groups k"]
    uses: Int64[Tensor, "queries *groups k"]
    explanation: Explanation
    groups: Sequence[Any] | None = None

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        names = ["score", "event", "example", "step", "position", "use"]
        tensors = [self.scores, self.events, self.examples, self.steps, self.positions, self.uses]
        columns = [tensor.reshape(-1).tolist() for tensor in tensors]
        k = self.scores.shape[-1]
        groups = list(self.groups) if self.groups is not None else [None]
        rows = []
        for at in range(self.scores.numel()):
            if columns[1][at] < 0:
                continue
            head = [
                at // (k * len(groups)),
                *([] if self.groups is None else [groups[at // k % len(groups)]]),
                at % k + 1,
            ]
            rows.append([*head, *(column[at] for column in columns)])
        return ["query", *([] if self.groups is None else ["group"]), "rank", *names], rows


@dataclass(frozen=True, repr=False)
class TopGroups(_Answer):
    """The best groups of every query by the sum over their events."""

    groups: Sequence[Sequence[Any]] = field()
    scores: Float[Tensor, "queries k"]
    counts: Int64[Tensor, "queries k"]
    explanation: Explanation

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        rows = []
        for query, found in enumerate(self.groups):
            for rank, group in enumerate(found):
                if group is not None:
                    score, count = float(self.scores[query, rank]), int(self.counts[query, rank])
                    rows.append([query, rank + 1, group, score, count])
        return ["query", "rank", "group", "score", "events"], rows


@dataclass(frozen=True, repr=False)
class Timeline(_Answer):
    """Sums over the events of stretches of training: bin i holds the steps from edges[i] to before edges[i + 1]."""

    edges: Int64[Tensor, " edges"]
    values: Float[Tensor, "queries bins"]
    counts: Int64[Tensor, " bins"]
    explanation: Explanation

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        edges, counts = self.edges.tolist(), self.counts.tolist()
        rows = [
            [query, edges[at], edges[at + 1] - 1, counts[at], total]
            for query, totals in enumerate(self.values.tolist())
            for at, total in enumerate(totals)
        ]
        return ["query", "first step", "last step", "events", "total"], rows


@dataclass(frozen=True, repr=False)
class Totals(_Answer):
    """Sums over the events of every group: `values` is [queries, groups], or [queries, groups, dim_out]."""

    groups: Sequence[Any]
    values: Float[Tensor, "queries groups *dim_out"]
    explanation: Explanation

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        rows = [
            [query, group, *self.values[query, at].reshape(-1).tolist()]
            for query in range(len(self.values))
            for at, group in enumerate(self.groups)
        ]
        width = self.values[0, 0].numel() if self.values.numel() else 1
        return ["query", "group", *(["total"] if width == 1 else [f"unit {u}" for u in range(width)])], rows
