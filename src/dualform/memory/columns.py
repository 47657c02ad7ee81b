"""Columns of the examples table: numbers or texts indexed by example id, in one sealed file each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dualform.errors import BadCall, BadQuery
from dualform.memory.files import storable, write_sealed
from dualform.memory.mapped import TensorFile

RESERVED = ("event", "example", "position", "step")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Column:
    """One column: `values[id]`, or for texts `categories[values[id]]`."""

    name: str
    values: Tensor
    categories: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, name: str, array: Any) -> Column:
        """A column from what a user passes: a tensor, an array, a list of numbers or texts."""
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise BadCall(
                f"a column cannot be called {name!r}: names are letters, digits and _, "
                f"and {', '.join(RESERVED)} are always there."
            )
        refused = BadCall(f"column {name!r} must be an array of numbers or texts indexed by example id.")
        if isinstance(array, (str, bytes, Mapping, Set)) or not hasattr(array, "__len__"):
            raise refused
        if not isinstance(array, Tensor):
            if all(isinstance(item, str) for item in array) and len(array):
                return cls._of_texts(name, [str(item) for item in array])
            try:
                array = np.asarray(array)
                if array.dtype.kind in "ui" and array.dtype.itemsize in (2, 4, 8):
                    array = array.astype(np.int64, casting="safe" if array.dtype != np.uint64 else "unsafe")
                if array.dtype.kind in "biuf":
                    array = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
            except (TypeError, ValueError):
                raise refused from None
        if not isinstance(array, Tensor) or array.ndim == 0 or array.layout != torch.strided:
            raise refused
        if not storable(array.dtype):
            raise refused
        return cls(name, array.detach().cpu().contiguous())

    @classmethod
    def _of_texts(cls, name: str, texts: list[str]) -> Column:
        categories = sorted(set(texts))
        code = {text: at for at, text in enumerate(categories)}
        return cls(name, torch.tensor([code[text] for text in texts], dtype=torch.int64), tuple(categories))

    @property
    def groups(self) -> tuple[list[Any], Int64[Tensor, " examples"]]:
        """The distinct values in ascending order, and for each example the number of its value."""
        if self.categories is not None:
            return list(self.categories), self.values
        if self.values.ndim != 1:
            raise BadQuery(f"column {self.name!r} has shape {list(self.values.shape)}: it cannot form groups.")
        values, codes = torch.unique(self.values, return_inverse=True)
        if values.is_floating_point():
            codes = torch.where(self.values.isnan(), -1, codes)  # NaN is no group
            values = values[~values.isnan()]
        return values.tolist(), codes

    def code(self, value: Any) -> Any:
        """A value as it is stored: the category's number for a text."""
        if self.categories is None:
            return value
        if value not in self.categories:
            raise BadQuery(
                f"column {self.name!r} has no value {value!r}; it has {', '.join(map(repr, self.categories[:10]))}."
            )
        return self.categories.index(value)


def write_column(root: Path, column: Column) -> None:
    """Commit a column durably; it replaces one of the same name."""
    (root / "examples").mkdir(exist_ok=True)
    metadata = {} if column.categories is None else {"categories": json.dumps(column.categories)}
    write_sealed(root / "examples" / f"{column.name}.safetensors", {"values": column.values}, metadata)


def read_column(root: Path, name: str) -> Column:
    """A column, checked against its own checksum."""
    file = TensorFile(root, file=f"examples/{name}.safetensors")
    categories = file.metadata.get("categories")
    return Column(name, file.read("values"), None if categories is None else tuple(json.loads(categories)))


def column_names(root: Path) -> list[str]:
    """The columns a memory has, in alphabetical order."""
    files = (root / "examples").glob("*.safetensors")
    return sorted(path.stem for path in files if _NAME.fullmatch(path.stem))
