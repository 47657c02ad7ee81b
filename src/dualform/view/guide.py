"""README.txt of an export: what each file is, and how pandas, DuckDB and faiss read it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualform.api import Memory
from dualform.view.parquet import VALUES, event_columns, example_columns

FIRST_LINE = "Exported by dualform"

COLUMNS = {
    "event": "the event's number, from 0, in the order of training",
    "step": "the optimiser step that used it, from 1",
    "example": "the id of its example; −1 where none was given",
    "position": "its place within the example, 0 where there is one",
    "use": "through which layer it went: a number, listed above",
    "backward": "the number of its backward pass",
    "key": "the row of keys-….npy that is its key; a key that came again is stored once",
    "coefficient": "c after the last step: the event's value is c · gradient",
    "bias_coefficient": "the same for its part of the bias",
}


@dataclass(frozen=True)
class Exported:
    """One weight of an export: how its files are called, and what is in its arrays."""

    weight: int
    name: str
    file: str
    uses: tuple[str, ...]
    events: int
    keys: int
    dim_in: int
    dim_out: int
    stored: torch.dtype
    gradients: torch.dtype | None

    @property
    def written(self) -> torch.dtype:
        """The dtype of the exported keys."""
        return exported_dtype(self.stored)


def exported_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype in which an array is exported: numpy has no bfloat16."""
    return torch.float32 if stored == torch.bfloat16 else stored


def guide(memory: Memory, exported: Sequence[Exported], gradients: bool) -> str:
    """The text of README.txt."""
    manifest, version = memory.manifest, importlib.metadata.version("dualform")
    optimizers = ", ".join(one.name for one in manifest.optimizers)
    columns, others = example_columns(memory)
    lines = [
        f"{FIRST_LINE} {version} from {memory.path} ({memory.steps:,} steps of {optimizers}).",
        "",
        f"examples.parquet  a row an example: {', '.join(['id', *(column.name for column in columns)])}",
    ]
    lines += (
        [f"                  left out, having more than one number an example: {', '.join(others)}"] if others else []
    )
    for one in exported:
        kinds = "events-, keys-, gradients-" if gradients else "events-, keys-"
        shape = f"{one.events:,} events, {one.keys:,} keys [{one.dim_in}] {_name(one.written)}"
        shape += f", gradients [{one.dim_out}]" if gradients else ""
        uses = ", ".join(f"{number} {name or 'the model'}" for number, name in enumerate(one.uses))
        lines += ["", f"{kinds}{one.file}", f"    {one.name}: {shape}; use: {uses}"]
        if one.stored == torch.bfloat16:
            lines.append("    Its keys were recorded as bfloat16, which numpy lacks: the same numbers, as float32.")
        if VALUES[0] not in event_columns(memory, one.weight):
            lines.append("    Its events have no values (see memory.certificate()), so there is no coefficient.")
    lines += [f"    Not exact: {finding.parameter}: {finding.reason}" for finding in manifest.findings]
    shown = dict.fromkeys(name for one in exported for name in event_columns(memory, one.weight))
    lines += ["", "Columns of the events:"]
    lines += [f"    {name.ljust(16)}  {COLUMNS[name]}" for name in shown]
    first = exported[0]
    lines += ["", _EXAMPLE.format(file=first.file, dim=first.dim_in)]
    return "\n".join(lines)


_EXAMPLE = """The score of an event is the dot product of its key and a query.

pandas
    events = pd.read_parquet("events-{file}.parquet")
    examples = pd.read_parquet("examples.parquet").set_index("id")
    keys = np.load("keys-{file}.npy", mmap_mode="r")
    events["score"] = (keys @ query)[events["key"]]             # query: [{dim}]
    events.nlargest(10, "score").join(examples, on="example")

DuckDB
    SELECT x.*, count(*) AS events, max(e.step) AS last_step
    FROM 'events-{file}.parquet' e JOIN 'examples.parquet' x ON e.example = x.id
    GROUP BY ALL ORDER BY events DESC LIMIT 10;

faiss
    index = faiss.IndexFlatIP({dim})
    index.add(np.ascontiguousarray(keys, dtype=np.float32))
    scores, rows = index.search(queries, 10)                    # queries: [n, {dim}] float32
    events[events["key"].isin(rows[0])]                         # the events of these keys
"""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
