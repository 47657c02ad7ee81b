"""Which optimiser steps which recorded parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dualform.recording.targets import Target

Group = tuple[Mapping[str, Any], list[Tensor]]
"""A parameter group, and the parameters it had when it was looked at."""
Owned = list[tuple[Target, Mapping[str, Any]]]
"""Recorded parameters, each with its group."""


class Owners:
    """Optimisers and what they own; groups may come, change and go."""

    def __init__(self, parameters: Sequence[Target], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._by_parameter = {id(target.parameter): target for target in parameters}
        self._groups: dict[int, tuple[list[Group], Owned]] = {}
        self._owner: dict[Target, int] = {}
        self.look_up()

    def look_up(self) -> None:
        """Look at all groups again."""
        for index in range(len(self._optimizers)):
            self.owned(index)

    def of(self, target: Target) -> int:
        """The number of the optimiser that steps a parameter; −1 for none."""
        return self._owner.get(target, -1)

    @property
    def targets(self) -> list[Target]:
        """Every parameter that any of them steps."""
        return list(self._owner)

    def owned(self, index: int) -> Owned:
        """The recorded parameters of an optimiser; another list only where its groups have changed."""
        groups = self._optimizers[index].param_groups
        before, owned = self._groups.get(index, ([], []))
        if len(groups) == len(before) and all(map(_is_same_group, groups, before)):
            return owned
        owned = [
            (self._by_parameter[id(parameter)], group)
            for group in groups
            for parameter in group["params"]
            if id(parameter) in self._by_parameter
        ]
        self._groups[index] = [(group, [*group["params"]]) for group in groups], owned
        for target, _ in owned:
            self._owner.setdefault(target, index)
        return owned


def _is_same_group(group: Mapping[str, Any], before: Group) -> bool:
    now, (known, parameters) = group["params"], before
    return group is known and len(now) == len(parameters) and all(map(is_, now, parameters))
