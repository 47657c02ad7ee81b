"""The best matches of a query, each another training example."""

from __future__ import annotations

from dataclasses import dataclass

from dualform.queries import Attention
from dualform.queries.spotlight import Contributions


@dataclass(frozen=True)
class Best:
    """The best event of an example."""

    example: int
    score: float
    step: int


def best_examples(
    asked: Attention | Contributions, count: int, query: int = 0, order: str = "largest"
) -> tuple[Best, ...]:
    """The examples of a query's best events: an example has one in each epoch, which may all score the same."""
    most = 4 * count
    while True:
        top = asked.top(most, order=order)
        first: dict[int, Best] = {}
        rows = zip(top.examples[query].tolist(), top.scores[query].tolist(), top.steps[query].tolist(), strict=True)
        for example, score, step in rows:
            if example >= 0:
                first.setdefault(example, Best(example, score, step))
        if len(first) >= count or int(top.events[query, -1]) < 0:
            return tuple(first.values())[:count]
        most *= 4
