"""The events and the examples of a memory as Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualform.api import Memory
from dualform.errors import MissingExtra
from dualform.memory import Column
from dualform.memory.segment import read_calls
from dualform.queries.values import Coefficients, parameters_of, why_no_values

try:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet
except ModuleNotFoundError as error:
    raise MissingExtra("An export needs pyarrow, which is not installed: pip install 'dualform[table]'") from error

ROWS = 1 << 18  # of a row group, and how many are held at a time
NUMBERS = ("event", "step", "example", "position", "use", "backward", "key")
VALUES = ("coefficient", "bias_coefficient")


def event_columns(memory: Memory, weight: int) -> tuple[str, ...]:
    """The columns of a weight's events; those of values only where it has values."""
    return NUMBERS if why_no_values(memory, weight) else (*NUMBERS, *VALUES)


def write_events(memory: Memory, weight: int, path: Path, advance: Callable[[int], object]) -> None:
    """Write the events of a weight, in their order; `advance` is told the bytes as they are done."""
    names = event_columns(memory, weight)
    kinds = [(name, pyarrow.float64() if name in VALUES else pyarrow.int64()) for name in names]
    schema = pyarrow.schema(kinds)
    with parquet.ParquetWriter(path, schema) as writer:
        pending: list[Any] = []
        for columns in _events(memory, weight, names):
            pending.append(pyarrow.record_batch([column.numpy() for column in columns], schema=schema))
            advance(sum(column.nbytes for column in columns))
            if sum(len(batch) for batch in pending) >= ROWS:
                writer.write_table(pyarrow.Table.from_batches(pending, schema))
                pending = []
        writer.write_table(pyarrow.Table.from_batches(pending, schema))


def _events(memory: Memory, weight: int, names: tuple[str, ...]) -> Iterator[list[Tensor]]:
    """The columns of some events after another; read past the keys, which are large and exported by themselves."""
    coefficients = _coefficients(memory, weight) if VALUES[0] in names else None
    prefix = f"w{weight}"
    for file, record in memory.segments:
        if not record.events[weight]:
            continue
        calls, _ = read_calls(file, weight, 0, record.last_step)
        per_event = torch.repeat_interleave(calls[:, :3], calls[:, 3], dim=0)
        for start in range(0, len(per_event), ROWS):
            step, backward, use = per_event[start : start + ROWS].unbind(1)
            stop = start + len(step)
            own = torch.arange(start, stop)
            position, number = f"{prefix}/positions", f"{prefix}/numbers"
            columns = [
                own + record.first_events[weight],
                step,
                file.read(f"{prefix}/examples", start, stop),
                file.read(position, start, stop) if position in file else torch.zeros_like(step),
                use,
                backward,
                file.read(number, start, stop) if number in file else own + record.first_keys[weight],
            ]
            if coefficients is not None:
                columns += [coefficients[0][backward], coefficients[1][use, backward]]
            yield [column.contiguous() for column in columns]


def _coefficients(memory: Memory, weight: int) -> tuple[Tensor, Tensor]:
    """c of the weight by backward pass, and c^b of every use's bias (0 where it has none) by use and backward pass."""
    own = Coefficients.of(memory, weight, None, memory.steps).weight
    of_bias: dict[str | None, Tensor] = {None: torch.zeros_like(own)}
    for name in parameters_of(memory, weight)[1:]:
        found = Coefficients.of(memory, weight, name, memory.steps).bias
        assert found is not None
        of_bias[name] = found
    uses = memory.manifest.weights[weight].uses
    return own, torch.stack([of_bias[use.bias] for use in uses])


def example_columns(memory: Memory) -> tuple[list[Column], list[str]]:
    """The columns that have one value for each example, and the names of the others."""
    columns = [memory.column(name) for name in memory.columns]
    others = [column.name for column in columns if column.values.ndim != 1]
    return [column for column in columns if column.values.ndim == 1], others


def write_examples(memory: Memory, path: Path) -> None:
    """Write the examples table: id, and every column that has one value for each; texts are dictionary-encoded."""
    columns, _ = example_columns(memory)
    rows = max([memory.manifest.examples, *(len(column) for column in columns)])
    arrays = {"id": pyarrow.array(torch.arange(rows).numpy())}
    for column in columns:
        # A column of the user's may be called id, too.
        arrays[f"{column.name}_" if column.name == "id" else column.name] = _padded(_array(column), rows)
    parquet.write_table(pyarrow.table(arrays), path)


def _array(column: Column) -> Any:
    if column.categories is not None:
        codes = pyarrow.array(column.values.to(torch.int32).numpy())
        return pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(column.categories, pyarrow.string()))
    values = column.values
    # numpy has no bfloat16, and few readers of Parquet have half precision.
    return pyarrow.array((values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy())


def _padded(array: Any, rows: int) -> Any:
    """A column that was added with fewer entries than another has none for the last examples."""
    missing = pyarrow.nulls(rows - len(array), array.type)
    return pyarrow.chunked_array([array, missing]) if len(missing) else array
