"""The model as the levers set it: at a step of its past, without some classes, or both."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualform.api import Memory
from dualform.queries.groupfolds import GroupFolds, group_folds
from dualform.view.explorer.levers import Levers
from dualform.view.explorer.subject import ImageSubject

KEPT = 12  # models


def apart(model: nn.Module) -> nn.Module:
    """A model of the same tensors, for hooks of its own: those of one question must not see another's passes."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Models:
    """The models of one memory, the last ones kept."""

    def __init__(self, memory: Memory, subject: ImageSubject) -> None:
        self._memory, self._subject = memory, subject
        self._kept: OrderedDict[object, nn.Module] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def has(self, levers: Levers) -> bool:
        """Whether a model is at hand."""
        return levers.model == (None, frozenset()) or levers.model in self._kept

    def of(self, levers: Levers) -> nn.Module:
        """The model, made by one thread at a time where it is not at hand."""
        if levers.model == (None, frozenset()):
            return self._subject.model
        found = self._find(levers)
        if found is None:
            with self._making:
                found = self._find(levers)
                if found is None:
                    found = self._with(self._weights(levers))
                    self._keep(levers, found)
        return found

    def totals(self, weight: str, bias: str | None, query: Tensor, direction: Tensor) -> list[float]:
        """What every class adds along a direction to the output of a layer, at the last step, by its fold."""
        folds = self._folds()
        parts = folds.last().weights
        added = direction @ (parts[weight] @ query.double()).T
        if bias is not None:
            added = added + parts[bias] @ direction
        known = [group if isinstance(group, tuple) else (group,) for group in folds.grouping.groups]
        sums = dict(zip(known, added[:-1].tolist(), strict=True))  # the last is of no class
        return [sums.get(name, 0.0) for name in self._names(self._subject.groups)]

    def _names(self, groups: Iterable[tuple[int, int]]) -> list[tuple[Any, ...]]:
        """The memory's names of some classes."""
        tasks = self._subject.tasks
        return [(tasks[task].name, label) if len(tasks) > 1 else (label,) for task, label in groups]

    def _find(self, levers: Levers) -> nn.Module | None:
        with self._lock:
            found = self._kept.get(levers.model)
            if found is not None:
                self._kept.move_to_end(levers.model)
            return found

    def _keep(self, levers: Levers, model: nn.Module) -> None:
        with self._lock:
            self._kept[levers.model] = model
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _weights(self, levers: Levers) -> Mapping[str, Tensor]:
        if not levers.without:
            return self._memory.weights(until=levers.until)
        folds = self._folds()
        until = self._memory.steps if levers.until is None else levers.until
        return folds.without(self._codes(folds, levers.without), until)

    def has_totals(self) -> bool:
        """Whether what every class adds is at hand."""
        return self._folds().at_hand

    def _folds(self) -> GroupFolds:
        return group_folds(self._memory, self._memory.folds, self._subject.columns)

    def _codes(self, folds: GroupFolds, groups: frozenset[tuple[int, int]]) -> list[int]:
        """The numbers of some classes among the groups of the folds."""
        known = [group if isinstance(group, tuple) else (group,) for group in folds.grouping.groups]
        return [known.index(name) for name in self._names(groups) if name in known]

    def _with(self, weights: Mapping[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self._subject.model).eval().requires_grad_(False)
        places = dict(model.named_parameters())
        with torch.no_grad():
            for name, place in places.items():
                if name in weights:
                    place.copy_(weights[name])
        return model
