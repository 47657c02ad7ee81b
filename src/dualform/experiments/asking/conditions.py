"""Conditions on events as they are typed: COLUMN=VALUE, COLUMN=A,B,C, COLUMN=START:STOP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dualform
from dualform.errors import BadQuery

NUMBERS = ("step", "example", "position")


def condition(memory: dualform.Memory, text: str) -> tuple[str, Any]:
    """A column and the value that COLUMN=VALUE asks of it: a value, `a,b,c` a list of them, `3:7` a slice."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BadQuery(f"--where takes COLUMN=VALUE, COLUMN=A,B,C or COLUMN=START:STOP, not {text!r}.")
    if name in NUMBERS:
        return name, _parsed(text, value, int)
    column = memory.column(name)
    if column.categories is not None:
        # A text may itself hold commas and colons.
        return name, value if value in column.categories or "," not in value else value.split(",")
    if column.values.dtype == torch.bool:
        return name, _parsed(text, value, _truth)
    return name, _parsed(text, value, float if column.values.is_floating_point() else int)


def _parsed(text: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        if ":" in value:
            start, stop = (kind(part) if part else None for part in value.split(":"))
            return slice(start, stop)
        values = [kind(part) for part in value.split(",")]
    except ValueError:
        holds = {float: "numbers", int: "whole numbers", _truth: "true and false"}[kind]
        raise BadQuery(f"--where {text}: this column holds {holds}; give one, A,B,C or START:STOP.") from None
    return values[0] if len(values) == 1 else values


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")
