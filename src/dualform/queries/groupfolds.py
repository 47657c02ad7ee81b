"""Folds of groups: what the events of every group made of every weight, so that any mask of groups is a sum.

A derived part, in derived/folds: made at first use, made anew where it is damaged, of another run or of fewer steps.
Deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash
from jaxtyping import Float64
from torch import Tensor
from tqdm import tqdm

from dualform.blocks import Block
from dualform.errors import BadQuery, DamagedMemory
from dualform.memory import StoredMemory
from dualform.memory.derived import FOLDS
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.queries.folds import Folds
from dualform.queries.selection import Grouping, Selection
from dualform.queries.sums import one_event_each
from dualform.queries.values import Coefficients, parameters_of, require_values

logger = logging.getLogger("dualform")
MOST = 64  # groups


@dataclass(frozen=True)
class GroupFolds:
    """For every parameter the part that each group's events made of it at the last step, [groups, …], in fp64."""

    grouping: Grouping
    parts: dict[str, Float64[Tensor, "groups ..."]]
    _folds: Folds
    _until: int

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for part in self.parts.values())

    def without(self, groups: Iterable[int]) -> dict[str, Float64[Tensor, "..."]]:
        """Every parameter without the events of some groups: the whole, less what they made."""
        left_out = sorted(set(groups))
        whole = self._folds.parameters(self._until, Selection())
        return {name: whole[name] - self.parts[name][left_out].sum(dim=0) for name in self.parts}


def group_folds(memory: StoredMemory, folds: Folds, columns: tuple[str, ...]) -> GroupFolds:
    """The folds of groups by some columns of examples, made where they are missing."""
    grouping = Grouping.by(memory, columns)
    if len(grouping.groups) > MOST or not grouping.by_example:
        raise BadQuery(
            f"{', '.join(columns)} makes {len(grouping.groups):,} groups; at most {MOST} groups of examples are folded."
        )
    for weight in range(len(memory.manifest.weights)):
        require_values(memory, weight, "a mask")

    def make() -> GroupFolds:
        parts = _read(memory, grouping)
        if parts is None:
            parts = _made(memory, grouping)
            _keep(memory, grouping, parts)
        return GroupFolds(grouping, parts, folds, memory.steps)

    return memory.room.get(("group folds", columns), make, lambda made: made.bytes)


def _made(memory: StoredMemory, grouping: Grouping) -> dict[str, Tensor]:
    """One pass over the events of every weight."""
    parts = {
        record.name: torch.zeros(len(grouping.groups), *record.shape, dtype=torch.float64)
        for record in memory.manifest.parameters
    }
    weights = range(len(memory.manifest.weights))
    total = sum(memory.events(weight, memory.steps) for weight in weights)
    with tqdm(total=total, desc="folding groups", unit="event", unit_scale=True, disable=None, leave=False) as progress:
        for weight in weights:
            for block in memory.blocks(weight, memory.steps):
                _add(memory, weight, grouping, block, parts)
                progress.update(len(block))
    return parts


def _add(memory: StoredMemory, weight: int, grouping: Grouping, block: Block, parts: dict[str, Tensor]) -> None:
    assert block.gradients is not None
    name, *biases = parameters_of(memory, weight)
    codes = grouping.codes(block)
    own, _ = Coefficients.of(memory, weight, None, memory.steps).of_events(block)
    order = torch.where((codes >= 0), codes, len(grouping.groups)).argsort(stable=True)
    found, counts = codes[order].unique_consecutive(return_counts=True)
    for code, chosen in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        # A pass that was dropped has coefficient 0, and may hold infinities.
        chosen = chosen[own[chosen] != 0]
        if code >= 0 and len(chosen):
            values = block.gradients[chosen].double() * own[chosen, None]
            parts[name][code].addmm_(values.T, block.keys[chosen].double())
    for bias in biases:
        _, of_bias = Coefficients.of(memory, weight, bias, memory.steps).of_events(block)
        used = (of_bias != 0) & (codes >= 0)
        parts[bias].index_add_(0, codes[used], block.gradients[used].double() * of_bias[used, None])


def _name(grouping: Grouping) -> str:
    return f"{FOLDS}/{xxhash.xxh3_64_hexdigest('/'.join(grouping.names).encode())}.safetensors"


def _fingerprint(memory: StoredMemory, grouping: Grouping) -> str:
    """What the folds depend on: the run, its segments, and who is in which group."""
    segments = [record.text for record in memory.manifest.segments]
    # An annotation may put an example into another group.
    codes = xxhash.xxh3_64_hexdigest(grouping.codes(one_event_each(memory.manifest.examples)).numpy().tobytes())
    content = json.dumps([memory.manifest.id, memory.manifest.initial.checksums, segments, codes])
    return xxhash.xxh3_64_hexdigest(content.encode())


def _keep(memory: StoredMemory, grouping: Grouping, parts: dict[str, Tensor]) -> None:
    path = memory.path / _name(grouping)
    try:
        disk.make_directory(path.parent)
        write_sealed(path, parts, {"fingerprint": _fingerprint(memory, grouping)})
    except OSError as error:
        logger.info("no folds of groups are kept: %s", error)


def _read(memory: StoredMemory, grouping: Grouping) -> dict[str, Tensor] | None:
    name = _name(grouping)
    if not (memory.path / name).exists():
        return None
    try:
        file = TensorFile(memory.path, file=name)
        if file.metadata.get("fingerprint") == _fingerprint(memory, grouping):
            return {parameter: file.read(parameter) for parameter in file.names()}
    except (DamagedMemory, KeyError):
        logger.info("%s is damaged and made anew", memory.path / name)
    with contextlib.suppress(OSError):
        disk.remove(memory.path / name)
    return None
