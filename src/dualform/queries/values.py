"""Values: the coefficient of every event, and what the sum of events makes of a weight."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import NotExact, NotKept
from dualform.memory import StoredMemory
from dualform.optimizers import ACTIVE, LINEAR, why_not_exact
from dualform.queries.selection import Selection

logger = logging.getLogger("dualform")


def parameters_of(memory: StoredMemory, weight: int) -> list[str]:
    """The names of a weight and of the biases of its uses."""
    record = memory.manifest.weights[weight]
    return [record.name, *dict.fromkeys(use.bias for use in record.uses if use.bias)]


def why_no_values(memory: StoredMemory, weight: int) -> str | None:
    """Why the events of a weight have no exact values here; None where they have."""
    if memory.manifest.keep != "all":
        return f"keep={memory.manifest.keep!r} holds no gradients; record with keep='all' for values"
    for name in parameters_of(memory, weight):
        at = memory.manifest.parameter(name)
        flags = memory.journal.flags[:, at]
        other = (flags & ACTIVE > 0) & (flags & LINEAR == 0)
        if other.any():
            optimizer = memory.journal.optimizers[int(other.argmax())]
            return why_not_exact(memory.manifest.optimizers[optimizer].name)
    return None


def require_values(memory: StoredMemory, weight: int, question: str) -> None:
    """NotKept or NotExact where `question` needs values that this memory does not have."""
    reason = why_no_values(memory, weight)
    if reason is None:
        _tell_findings(memory, weight)
        return
    name = memory.manifest.weights[weight].name
    if memory.manifest.keep != "all":
        raise NotKept(f"{question} needs the gradients of {name}: {reason}.")
    raise NotExact(f"{question} needs a value for every event of {name}: {reason}.")


def _tell_findings(memory: StoredMemory, weight: int) -> None:
    """Tell once that values of a weight will not add up, where recording found a broken premise."""
    names = parameters_of(memory, weight)
    found = [finding for finding in memory.manifest.findings if finding.parameter in names]
    if found and weight not in memory.told:
        memory.told.add(weight)
        logger.warning("values of %s are not exact: %s", names[0], found[0].reason)


@dataclass(frozen=True)
class Coefficients:
    """c of the weight and c^b of a bias for every backward pass, at one end step."""

    weight: Float64[Tensor, " backwards"]
    bias: Float64[Tensor, " backwards"] | None
    bias_uses: tuple[int, ...]

    @classmethod
    def of(
        cls,
        memory: StoredMemory,
        weight: int,
        bias: str | None,
        until: int,
        velocity: bool = False,
        since: int = 0,
    ) -> Coefficients:
        """The coefficients with which a weight's events, and their part of `bias`, are in the model at `until`.

        `velocity` asks for those in the velocities instead, `since` only for the events after that step.
        """
        record = memory.manifest.weights[weight]
        uses = tuple(at for at, use in enumerate(record.uses) if bias is not None and use.bias == bias)
        of_events = memory.journal.event_coefficients
        return cls(
            of_events(memory.manifest.parameter(record.name), until, velocity, since),
            of_events(memory.manifest.parameter(bias), until, velocity, since) if bias else None,
            uses,
        )

    def of_events(self, block: Block) -> tuple[Float64[Tensor, " events"], Float64[Tensor, " events"]]:
        """c and c^b of every event of a block; c^b is 0 for an event that went through another bias."""
        weight = self.weight[block.backwards]
        if self.bias is None:
            return weight, torch.zeros_like(weight)
        through = torch.isin(block.uses, torch.tensor(self.bias_uses))
        return weight, torch.where(through, self.bias[block.backwards], 0.0)


def fold(
    memory: StoredMemory,
    weight: int,
    until: int,
    selection: Selection,
    velocity: bool = False,
    since: int = 0,
) -> tuple[Float64[Tensor, "dim_out dim_in"], dict[str, Float64[Tensor, " dim_out"]]]:
    """Σ e_t ⊗ x_t of the selected events, and Σ c^b g_t for every bias they went through; in fp64.

    With `velocity` their part of the velocities instead, with `since` only of the events after that step.
    """
    record = memory.manifest.weights[weight]
    biases = parameters_of(memory, weight)[1:]
    tables = {name: Coefficients.of(memory, weight, name, until, velocity, since) for name in biases}
    own = Coefficients.of(memory, weight, None, until, velocity, since)
    total = torch.zeros(record.dim_out, record.dim_in, dtype=torch.float64)
    sums = {name: torch.zeros(record.dim_out, dtype=torch.float64) for name in biases}
    values_of = _Values(memory, weight, record.dim_out) if _counting_pays(memory, weight, since, until) else None
    for block in memory.blocks(weight, until, since=since, gather=None if values_of is None else _as_numbers):
        block = selection.apply(block)
        coefficient, _ = own.of_events(block)
        used = coefficient != 0
        # A pass that was dropped has coefficient 0, and may hold infinities: it is left out, not multiplied.
        chosen = block.select(used)
        assert chosen.gradients is not None and block.gradients is not None
        values = chosen.gradients.double() * coefficient[used, None]
        if values_of is not None:
            values_of.add(chosen.keys[:, 0].long(), values)
        else:
            total.addmm_(values.T, chosen.keys.double())
        for name, table in tables.items():
            _, of_bias = table.of_events(block)
            used = of_bias != 0
            sums[name] += of_bias[used] @ block.gradients[used].double()
    return (total if values_of is None else values_of.times_keys(total)), sums


def _counting_pays(memory: StoredMemory, weight: int, since: int, until: int) -> bool:
    """Whether keys were used so much more often than they are stored that values are summed by key first."""
    keys = sum(record.keys[weight] for record in memory.manifest.segments)
    there = 8 * keys * memory.manifest.weights[weight].dim_out <= memory.resident // 4
    if not there or keys == memory.manifest.events(weight):
        return False
    return 2 * keys <= memory.events(weight, until) - (memory.events(weight, since) if since else 0)


def _as_numbers(weight: int, numbers: Int64[Tensor, " keys"]) -> Float64[Tensor, "keys 1"]:
    """In place of repeated keys their numbers."""
    return numbers.double()[:, None]


class _Values:
    """Σ e_t over the events of every stored key: Σ_t e_t ⊗ x_t = Σ_k (Σ_{t of k} e_t) ⊗ x_k."""

    def __init__(self, memory: StoredMemory, weight: int, dim_out: int) -> None:
        self._memory, self._weight = memory, weight
        keys = sum(record.keys[weight] for record in memory.manifest.segments)
        self._sums = torch.zeros(keys, dim_out, dtype=torch.float64)
        self._used = torch.zeros(keys, dtype=torch.bool)

    def add(self, keys: Int64[Tensor, " events"], values: Float64[Tensor, "events dim_out"]) -> None:
        """Take in events by the numbers of their keys."""
        self._sums.index_add_(0, keys, values)
        self._used[keys] = True

    def times_keys(self, total: Float64[Tensor, "dim_out dim_in"]) -> Float64[Tensor, "dim_out dim_in"]:
        """Add Σ_k (Σ e) ⊗ x_k; a key that no event used may hold infinities and is left out."""
        for first, keys in self._memory.stored_tiles(self._weight):
            used = self._used[first : first + len(keys)]
            sums = self._sums[first : first + len(keys)]
            if bool(used.all()):
                total.addmm_(sums.T, keys.double())
            else:
                total.addmm_(sums[used].T, keys[used].double())
        return total
