"""Results as JSON files that are written whole: records of numbers, texts, tuples and dicts, by their types."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
FORMAT = 1  # of the results; others are computed anew


def write(path: Path, value: Any, seconds: float) -> None:
    """Write a record and how long it took, by rename."""
    content = {"format": FORMAT, "seconds": round(seconds, 3), "result": plain(value)}
    write_json(path, content)


def read(kind: type[T], path: Path) -> tuple[T, float] | None:
    """The record in a file and how long it took; None where there is none of this format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        return made(kind, content["result"]), float(content["seconds"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write JSON by rename, so that an interruption never leaves half a file."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False), encoding="utf-8")
    os.replace(unfinished, path)


def plain(value: Any) -> Any:
    """A record as JSON has it: NaN, which JSON does not have, is null.

    >>> plain((1.5, float("nan")))
    [1.5, None]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def made(kind: Any, value: Any) -> Any:
    """What `plain` made of a record, back as its type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: made(hints[field.name], value[field.name]) for field in dataclasses.fields(kind)})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(made(arguments[0], item) for item in value)
    if origin is dict:
        return {key: made(arguments[1], item) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else made(inner, value)
    if kind is float:
        return math.nan if value is None else float(value)
    return value
