"""Which events a question is about, and how they are grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.memory import StoredMemory

_OF_BLOCK = ("step", "example", "position")


def _numbers(block: Block, column: str) -> Int64[Tensor, " events"]:
    return {"step": block.steps, "example": block.examples, "position": block.positions}[column]


@dataclass(frozen=True)
class Condition:
    """One column must have one of some values: by example (`of_example`), or by a number of the event itself."""

    column: str
    of_example: Bool[Tensor, " examples"] | None
    value: Any = None

    def holds(self, block: Block) -> Bool[Tensor, " events"]:
        """Which events of a block satisfy the condition; one without an example never does."""
        if self.of_example is None:
            return _matches(_numbers(block, self.column), self.value, self.column)
        inside = (block.examples >= 0) & (block.examples < len(self.of_example))
        return inside & self.of_example[block.examples.where(inside, 0)]


def _matches(values: Tensor, wanted: Any, column: str) -> Bool[Tensor, "..."]:
    if isinstance(wanted, slice):
        if wanted.step not in (None, 1):
            raise BadQuery(f"where({column}=slice(…)) takes a start and a stop, no step.")
        holds = torch.ones_like(values, dtype=torch.bool)
        if wanted.start is not None:
            holds &= values >= wanted.start
        if wanted.stop is not None:
            holds &= values < wanted.stop
        return holds
    try:
        # By way of numpy, where a plain float has 64 bits: as fp32 it would equal no fp64 value.
        found: Tensor = wanted if isinstance(wanted, Tensor) else torch.as_tensor(np.asarray(wanted))
    except (TypeError, ValueError, RuntimeError):
        raise BadQuery(
            f"column {column!r} holds numbers ({values.dtype}); where({column}={wanted!r}) does not fit."
        ) from None
    common = values.dtype if values.is_floating_point() else torch.promote_types(values.dtype, found.dtype)
    return torch.isin(values.to(common), found.to(common))


@dataclass(frozen=True)
class Selection:
    """Conditions that all must hold."""

    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def narrowed(self, memory: StoredMemory, where: Mapping[str, Any] | None) -> Selection:
        """This selection and the conditions of a `where`.

        Values: one value, a list of values, a slice (start ≤ value < stop), or a boolean array over examples.
        """
        added = tuple(_condition(memory, column, value) for column, value in (where or {}).items())
        return Selection(self.conditions + added)

    def apply(self, block: Block) -> Block:
        """The events of a block for which all conditions hold."""
        for condition in self.conditions:
            block = block.select(condition.holds(block))
        return block


def _condition(memory: StoredMemory, name: str, value: Any) -> Condition:
    if not isinstance(value, Tensor) and isinstance(value, (np.ndarray, list)):
        array = np.asarray(value)
        if array.dtype == np.bool_:
            value = torch.from_numpy(array)
    if isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1:
        if len(value) < memory.manifest.examples:
            raise BadQuery(
                f"where({name}=mask): a boolean array needs an entry for each of the {memory.manifest.examples:,} "
                f"examples; this one has {len(value):,}."
            )
        return Condition(name, value)
    if name in _OF_BLOCK:
        return Condition(name, None, value)
    column = memory.column(name)
    if column.values.ndim != 1:
        raise BadQuery(f"column {name!r} has shape {list(column.values.shape)}: it cannot choose events.")
    if column.categories is not None and not isinstance(value, slice):
        many = isinstance(value, (list, tuple, set, np.ndarray))
        value = [column.code(item) for item in value] if many else column.code(value)
    return Condition(name, _matches(column.values, list(value) if isinstance(value, set) else value, name))


@dataclass(frozen=True)
class Grouping:
    """Groups of events by one or several columns; a column that has no value for an event puts it nowhere."""

    names: tuple[str, ...]
    groups: tuple[Any, ...]
    _tables: tuple[Int64[Tensor, " examples"] | None, ...]
    _sizes: tuple[int, ...]

    @classmethod
    def by(cls, memory: StoredMemory, columns: str | tuple[str, ...]) -> Grouping:
        """Grouping by a column, or by a tuple of columns (every combination is a group)."""
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names:
            raise BadQuery("by and within take a column or a tuple of columns.")
        values: list[list[Any]] = []
        tables: list[Tensor | None] = []
        for name in names:
            if name in _OF_BLOCK:
                sizes = {
                    "step": memory.steps + 1,
                    "example": memory.manifest.examples,
                    "position": memory.manifest.positions,
                }
                values.append(list(range(sizes[name])))
                tables.append(None)
            else:
                found, codes = memory.column(name).groups
                values.append(found)
                tables.append(codes)
        groups: list[Any] = [()]
        for options in values:
            groups = [(*group, option) for group in groups for option in options]
        flat = tuple(group[0] for group in groups) if isinstance(columns, str) else tuple(groups)
        return cls(names, flat, tuple(tables), tuple(len(options) for options in values))

    def codes(self, block: Block) -> Int64[Tensor, " events"]:
        """The number of each event's group; −1 for none."""
        result = torch.zeros(len(block), dtype=torch.int64)
        nowhere = torch.zeros(len(block), dtype=torch.bool)
        for name, table, size in zip(self.names, self._tables, self._sizes, strict=True):
            if table is None:
                codes = _numbers(block, name)
            else:
                inside = (block.examples >= 0) & (block.examples < len(table))
                codes = torch.where(inside, table[block.examples.where(inside, 0)], -1)
            nowhere |= codes < 0
            result = result * size + codes
        return torch.where(nowhere, -1, result)
