"""Which events a question is about, and how they are grouped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.memory import StoredMemory

MANY = 5_000_000
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

    @property
    def by_example(self) -> bool:
        """Whether all events of an example are alike to this condition."""
        return self.of_example is not None or self.column == "example"


@dataclass(frozen=True)
class Exclusion:
    """Some conditions must not all hold: the complement of a `where`."""

    conditions: tuple[Condition, ...]

    def holds(self, block: Block) -> Bool[Tensor, " events"]:
        """Which events of a block are not left out."""
        return ~torch.stack([condition.holds(block) for condition in self.conditions]).all(dim=0)

    @property
    def by_example(self) -> bool:
        """Whether all events of an example are alike to this."""
        return all(condition.by_example for condition in self.conditions)


def _matches(values: Tensor, wanted: Any, column: str) -> Bool[Tensor, "..."]:
    """Which values are equal to the wanted one, among several, or inside a slice (start ≤ value < stop)."""
    # In the widest type of their kind: a narrow one would wrap around what it cannot hold.
    values = values.double() if values.is_floating_point() and values.dtype != torch.float32 else values
    values = values if values.is_floating_point() else values.to(torch.int64)
    if isinstance(wanted, slice) and wanted.step not in (None, 1):
        raise BadQuery(f"where({column}=slice(…)) takes a start and a stop, no step.")
    try:
        if isinstance(wanted, slice):
            holds = torch.ones_like(values, dtype=torch.bool)
            if wanted.start is not None:
                holds &= values >= wanted.start
            if wanted.stop is not None:
                holds &= values < wanted.stop
            return holds
        if isinstance(wanted, (set, frozenset)):
            wanted = list(wanted)
        # By way of numpy, where a plain float has 64 bits: as fp32 it would equal no fp64 value.
        found: Tensor = wanted if isinstance(wanted, Tensor) else torch.as_tensor(np.asarray(wanted))
        if found.is_complex() or found.ndim > 1:
            raise TypeError
        found = found.to(torch.int64) if found.dtype == torch.bool else found
        common = values.dtype if values.is_floating_point() else torch.promote_types(values.dtype, found.dtype)
        return torch.isin(values.to(common), found.to(common))
    except (TypeError, ValueError, RuntimeError):
        raise BadQuery(f"column {column!r} holds numbers; where({column}={wanted!r}) does not fit.") from None


@dataclass(frozen=True)
class Selection:
    """Conditions that all must hold."""

    conditions: tuple[Condition | Exclusion, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def narrowed(self, memory: StoredMemory, where: Mapping[str, Any] | None) -> Selection:
        """This selection and the conditions of a `where`.

        Values: one value, a list of values, a slice (start ≤ value < stop), or a boolean array over examples.
        """
        if where is not None and not isinstance(where, Mapping):
            raise BadQuery(f"where is a dict from columns to values, not {where!r}.")
        return Selection(self.conditions + _conditions(memory, where or {}))

    def without(self, memory: StoredMemory, columns: Mapping[str, Any]) -> Selection:
        """This selection less the events for which all conditions hold; no conditions leave out nothing."""
        added = _conditions(memory, columns)
        return Selection((*self.conditions, Exclusion(added))) if added else self

    @property
    def by_example(self) -> bool:
        """Whether an example's events are all selected, or none of them."""
        return all(condition.by_example for condition in self.conditions)

    def holds(self, block: Block) -> Bool[Tensor, " events"]:
        """Which events of a block are selected."""
        chosen = torch.ones(len(block), dtype=torch.bool)
        for condition in self.conditions:
            chosen &= condition.holds(block)
        return chosen

    def apply(self, block: Block) -> Block:
        """The events of a block for which all conditions hold."""
        for condition in self.conditions:
            block = block.select(condition.holds(block))
        return block


def _mask(value: Any) -> Bool[Tensor, "..."] | None:
    """A boolean array, whatever kind of sequence it comes as; None for anything else."""
    if isinstance(value, (str, slice, set, frozenset)):
        return None
    if isinstance(value, Tensor):
        return value if value.dtype == torch.bool and value.ndim > 0 else None
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return torch.from_numpy(array.copy()) if array.dtype == np.bool_ and array.ndim > 0 else None


def _conditions(memory: StoredMemory, columns: Mapping[str, Any]) -> tuple[Condition, ...]:
    return tuple(_condition(memory, column, value) for column, value in columns.items())


def _condition(memory: StoredMemory, name: str, value: Any) -> Condition:
    column = None if name in _OF_BLOCK else memory.column(name)
    mask = _mask(value)
    among = column is not None and column.values.dtype == torch.bool and mask is not None and len(mask) < len(column)
    if mask is not None and not among:
        if mask.ndim != 1 or len(mask) < memory.manifest.examples or name in ("step", "position"):
            raise BadQuery(
                f"where({name}=mask): a boolean array needs an entry for each of the {memory.manifest.examples:,} "
                f"examples and chooses among them; this one has shape {list(mask.shape)}."
            )
        return Condition(name, mask)
    if column is None:
        _matches(
            torch.empty(0, dtype=torch.int64), value, name
        )  # what does not fit is told now, not at the first block
        return Condition(name, None, value)
    if column.values.ndim != 1:
        raise BadQuery(f"column {name!r} has shape {list(column.values.shape)}: it cannot choose events.")
    if column.categories is not None:
        if isinstance(value, slice):
            raise BadQuery(f"column {name!r} holds texts: where({name}=…) takes a text or a list of texts, no slice.")
        many = isinstance(value, (list, tuple, set, frozenset, np.ndarray))
        value = [column.code(item) for item in value] if many else [column.code(value)]
    return Condition(name, _matches(column.values, value, name))


@dataclass(frozen=True)
class Grouping:
    """Groups of events by one or several columns; a column that has no value for an event puts it nowhere.

    `_tables` give the group of every example, or of every number that an event itself has (None: the number it is).
    """

    names: tuple[str, ...]
    groups: Sequence[Any]
    _tables: tuple[Int64[Tensor, " values"] | None, ...]
    _sizes: tuple[int, ...]

    @classmethod
    def by(cls, memory: StoredMemory, columns: str | tuple[str, ...]) -> Grouping:
        """Grouping by a column, or by a tuple of columns (every combination is a group)."""
        names = (columns,) if isinstance(columns, str) else tuple(columns) if isinstance(columns, tuple | list) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise BadQuery(f"by and within take a column or a tuple of columns, not {columns!r}.")
        values: list[Sequence[Any]] = []
        tables: list[Tensor | None] = []
        for name in names:
            if name in _OF_BLOCK:
                sizes = {
                    "step": memory.steps + 1,
                    "example": memory.manifest.examples,
                    "position": memory.manifest.positions,
                }
                values.append(range(sizes[name]))
                tables.append(None)
            else:
                found, codes = memory.column(name).groups
                values.append(tuple(found))
                tables.append(codes)
        count = math.prod(len(options) for options in values)
        if count > MANY:
            raise BadQuery(
                f"grouping by {', '.join(names)} makes {count:,} groups; at most {MANY:,} are summed at once."
            )
        groups = values[0] if isinstance(columns, str) else tuple(itertools.product(*values))
        return cls(names, groups, tuple(tables), tuple(len(options) for options in values))

    @classmethod
    def of_steps(cls, edges: Int64[Tensor, " edges"]) -> Grouping:
        """Bins of steps: bin i holds the steps from edges[i] to before edges[i + 1]."""
        table = torch.searchsorted(edges, torch.arange(int(edges[-1])), right=True) - 1
        return cls(("step",), range(len(edges) - 1), (table,), (len(edges) - 1,))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What tells this grouping from others: its columns, and who is in which group."""
        tables = [
            None if table is None else xxhash.xxh3_64_hexdigest(table.numpy().tobytes()) for table in self._tables
        ]
        return self.names, self._sizes, *tables

    @property
    def by_example(self) -> bool:
        """Whether all events of an example are in one group."""
        return not {"step", "position"} & set(self.names)

    def codes(self, block: Block) -> Int64[Tensor, " events"]:
        """The number of each event's group; −1 for none."""
        result = torch.zeros(len(block), dtype=torch.int64)
        nowhere = torch.zeros(len(block), dtype=torch.bool)
        for name, table, size in zip(self.names, self._tables, self._sizes, strict=True):
            codes = _numbers(block, name if name in _OF_BLOCK else "example")
            if table is not None:
                inside = (codes >= 0) & (codes < len(table))
                codes = torch.where(inside, table[codes.where(inside, 0)], -1) if len(table) else codes.new_full((), -1)
            nowhere |= codes < 0
            result = result * size + codes
        return torch.where(nowhere, -1, result)
