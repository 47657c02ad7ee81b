"""Random and adversarial runs as hypothesis strategies, and questions to them that are answered by a loop."""

from __future__ import annotations

import atexit
import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import plain
from dualform.memory.disk import disk
from dualform.queries import Attention
from plain import DIM_IN, DIM_OUT, EXAMPLES, Call, Event, History

COLUMNS = [
    "label",
    "name",
    "step",
    "example",
    "position",
    ("name", "label"),
    ("step", "label"),
    ("position", "example"),
]
KINDS = ("gauss", "ties", "zero", "relu", "fixed", "nan", "infinite", "cancel")
FAMILIES = (("relu",), ("fixed",), ("relu", "fixed"), ("gauss", "ties", "zero"), KINDS)
_count = itertools.count()
_directory = tempfile.TemporaryDirectory(prefix="dualform-scripts-")
atexit.register(_directory.cleanup)


@dataclass(frozen=True)
class Script:
    """A run to be recorded: for every step the kinds of its calls, with ids or without, and where it commits."""

    seed: int
    steps: tuple[tuple[tuple[str, bool], ...], ...]
    commits: tuple[int, ...]
    examples: int

    @property
    def calls(self) -> list[list[Call]]:
        generator = np.random.default_rng(self.seed)
        return [[_call(generator, kind, with_ids, self.examples) for kind, with_ids in calls] for calls in self.steps]

    def record(self) -> History:
        # Not durable: a run for every example that hypothesis tries.
        with mock.patch.object(disk, "sync"), mock.patch.object(disk, "sync_directory"):
            return plain.recorded(new_path(), self.calls, self.commits)


def new_path() -> Path:
    return Path(_directory.name) / str(next(_count))


def forget(history: History) -> None:
    shutil.rmtree(history.memory.path)


def rows_of(kind: str, generator: np.random.Generator, count: int) -> Tensor:
    if kind == "relu":
        return plain.rows("zero", generator, count).abs()
    if kind == "infinite":
        numbers = plain.rows("ties", generator, count)
        numbers[generator.random((count, DIM_IN)) < 0.1] = float(generator.choice([np.inf, -np.inf]))
        return numbers
    return plain.rows(kind, generator, count)


def _call(generator: np.random.Generator, kind: str, with_ids: bool, examples: int) -> Call:
    positions = int(generator.integers(1, 3))
    ids = generator.integers(0, examples, generator.integers(1, 9)).tolist()
    count = len(ids) * positions
    if kind == "fixed":
        # The same key for an example and position whenever it comes: stored once.
        table = np.abs(np.random.default_rng(5).standard_normal((EXAMPLES, 2, DIM_IN))).astype(np.float32)
        keys = torch.from_numpy(np.stack([table[i, p] for i in ids for p in range(positions)]))
    else:
        keys = rows_of(kind, generator, count)
    gradients = torch.from_numpy(generator.standard_normal((count, DIM_OUT))).float()
    return Call(keys, gradients, ids if with_ids else None)


def scripts(families: Sequence[Sequence[str]] = FAMILIES) -> st.SearchStrategy[Script]:
    """Runs of a few steps, whose calls are of one kind or of several of a family."""

    def build(seed: int, chosen: list[str], shape: list[int], commits: list[int], bare: int, examples: int) -> Script:
        numbers = itertools.count()
        steps = tuple(
            tuple((chosen[next(numbers) % len(chosen)], step != bare) for _ in range(calls))
            for step, calls in enumerate(shape, start=1)
        )
        return Script(seed, steps, tuple(commits), examples)

    return st.builds(
        build,
        st.integers(0, 2**32),
        _some_of(families, least=1),
        st.lists(st.integers(1, 3), min_size=1, max_size=6),
        st.lists(st.integers(1, 5), max_size=3, unique=True),
        st.integers(0, 6),
        st.sampled_from([2, 4, EXAMPLES - 1]),
    )


def _some_of(families: Sequence[Sequence[str]], least: int) -> st.SearchStrategy[list[str]]:
    return st.sampled_from(families).flatmap(
        lambda family: st.lists(st.sampled_from(family), min_size=least, max_size=5)
    )


def queries(families: Sequence[Sequence[str]] = FAMILIES) -> st.SearchStrategy[Tensor]:
    """Some queries, each of its own kind: some are negative, not finite or zero."""

    def build(seed: int, chosen: list[str]) -> Tensor:
        generator = np.random.default_rng(seed)
        rows = [rows_of("gauss" if kind == "fixed" else kind, generator, 1) for kind in chosen]
        return torch.cat([torch.empty(0, DIM_IN), *rows])

    return st.builds(build, st.integers(0, 2**32), _some_of(families, least=1))


Narrow = tuple[str, dict[str, Any], Callable[[Event], bool]]
"""A method of an attention, its arguments, and which events are left."""

MASK = [True, False, True, True, False, False, True, False, True]
WHERES: list[tuple[dict[str, Any], Callable[[Event], bool]]] = [
    ({"label": 7}, lambda event: event.label == 7),
    ({"name": ["a", "b"]}, lambda event: event.name in ("a", "b")),
    ({"example": slice(2, 6)}, lambda event: 2 <= event.example < 6),
    ({"example": -1}, lambda event: event.example == -1),
    ({"example": MASK}, lambda event: event.example >= 0 and MASK[event.example]),
    ({"step": slice(2, 4)}, lambda event: 2 <= event.step < 4),
    ({"position": 1}, lambda event: event.position == 1),
    ({"label": [0, 7], "step": [1, 2, 5]}, lambda event: event.label in (0, 7) and event.step in (1, 2, 5)),
    ({"label": 2, "name": "a"}, lambda event: event.label == 2 and event.name == "a"),
]


def narrowings() -> st.SearchStrategy[list[Narrow]]:
    """No, one or two of `where` and `exclude`."""

    def build(chosen: tuple[dict[str, Any], Callable[[Event], bool]], method: str) -> Narrow:
        columns, holds = chosen
        return method, columns, holds if method == "where" else lambda event: not holds(event)

    one = st.builds(build, st.sampled_from(WHERES), st.sampled_from(["where", "exclude"]))
    return st.lists(one, max_size=2)


def narrowed(asked: Any, narrowing: Sequence[Narrow]) -> Any:
    for method, columns, _ in narrowing:
        asked = getattr(asked, method)(**columns)
    return asked


def kept(events: Sequence[Event], narrowing: Sequence[Narrow]) -> list[Event]:
    return [event for event in events if all(holds(event) for _, _, holds in narrowing)]


def attention_of(history: History, queries: Tensor, until: int | None) -> Attention:
    return history.memory.attend(None, {"fc": queries}, until=until)["fc"]


def is_sum(found: float, events: Sequence[Event], query: list[float], absolute: bool) -> bool:
    """Whether a number is the sum of the scores of some events, up to the rounding of their products."""
    terms = [plain.dot(event.key, query) for event in events]
    products = [abs(a * b) for event in events for a, b in zip(event.key, query, strict=True)]
    size = math.fsum(products) if all(map(math.isfinite, products)) else 0.0
    return plain.close(found, [abs(term) for term in terms] if absolute else terms, slack=size)
