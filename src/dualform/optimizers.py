"""With which coefficient the optimiser finally put a gradient into a weight.

Every optimiser of the SGD family is linear in (W, velocity) with scalar coefficients,

    [W; v] ← M_s [W; v] + b_s G_s,        so        W_T = c_0 W0 + d_0 v_0 + Σ_s c_s G_s,

and one backward sweep over the journalled settings gives all c_s for any end step T.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

# Bits of a journalled step of one parameter.
ACTIVE = 1  # the optimiser stepped it with a gradient that was not None
FIRST = 2  # no velocity existed just before the step
NESTEROV = 4
MAXIMIZE = 8
DECOUPLED = 16  # the decay acts on the weight, not through the gradient
LINEAR = 32  # the step is one of the SGD family: its coefficients are exact
HALF = 128  # the product that made the gradient was in half precision
UNEXPLAINED = 64  # the probe found something in the gradient that the events did not make

COLUMNS = ("lr", "momentum", "dampening", "weight_decay", "l2")


class Settings(NamedTuple):
    """The settings with which one step treats one parameter; `l2` is a decay found inside the user's loss."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    l2: float = 0.0
    flags: int = 0

    @property
    def row(self) -> tuple[float, ...]:
        """The journalled numbers, in the order of COLUMNS."""
        return self[:-1]


Reader = Callable[[Mapping[str, Any], Mapping[str, Any]], Settings]
"""From a parameter group and the parameter's state just before the step to its settings."""

_NOTHING: dict[str, Any] = {}
_PLAIN = {float, int, bool}
_sgd_values = itemgetter("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
_readers: dict[type[torch.optim.Optimizer], Reader] = {}


@functools.cache
def _reader(kind: type[torch.optim.Optimizer], step: Callable[..., Any]) -> Reader | None:
    # A subclass with a step of its own may do anything.
    own = inspect.unwrap(step)
    return next((r for of, r in _readers.items() if issubclass(kind, of) and own is inspect.unwrap(of.step)), None)


def register(kind: type[torch.optim.Optimizer]) -> Callable[[Reader], Reader]:
    """Declare how an optimiser of the SGD family is read; a decorator for a `Reader`."""

    def add(reader: Reader) -> Reader:
        _readers[kind] = reader
        _reader.cache_clear()
        return reader

    return add


@register(torch.optim.SGD)
def _sgd(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    return _sgd_settings(_sgd_values(group), state.get("momentum_buffer") is None)


def _sgd_settings(values: Sequence[Any], first: bool) -> Settings:
    *rates, nesterov, maximize = values
    flags = ACTIVE | LINEAR | (FIRST if first else 0)
    flags |= (NESTEROV if nesterov else 0) | (MAXIMIZE if maximize else 0)
    lr, momentum, dampening, weight_decay = map(float, rates)
    return Settings(lr, momentum, dampening, weight_decay, flags=flags)


@register(torch.optim.ASGD)
def _asgd(group: Mapping[str, Any], state: Mapping[str, Any]) -> Settings:
    # ASGD's own decay λ_A acts like weight decay; its rate is kept in the state and changes every step.
    # Before the first step torch makes that state from lr, in fp32 unless fp64 is the default.
    wide = torch.get_default_dtype() == torch.float64
    first = torch.tensor(float(group["lr"]), dtype=torch.float64 if wide else torch.float32)
    eta = float(state.get("eta", first))
    flags = ACTIVE | LINEAR | (MAXIMIZE if group["maximize"] else 0)
    return Settings(lr=eta, weight_decay=float(group["weight_decay"]) + float(group["lambd"]), flags=flags)


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser belongs to the SGD family, so that every event has an exact value."""
    kind: Any = type(optimizer)
    return _reader(kind, kind.step) is not None


def read_settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    """The settings of the step about to be made on a parameter whose gradient is not None.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> settings = read_settings(sgd, sgd.param_groups[0], weight)
    >>> settings.lr, settings.momentum, bool(settings.flags & FIRST)
    (0.1, 0.9, True)
    """
    kind: Any = type(optimizer)
    reader = _reader(kind, kind.step)
    # `optimizer.state` is a defaultdict: indexing a missing parameter would leave an entry behind.
    state = optimizer.state.get(parameter, {})
    if reader is not None:
        return reader(group, state)
    decay = float(group.get("weight_decay") or 0.0)
    return Settings(lr=float(group.get("lr", float("nan"))), weight_decay=decay, flags=ACTIVE)


class SettingsReader:
    """Reads the settings of one optimiser's steps; those of plain SGD are made anew only where something changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states: Mapping[Tensor, Mapping[str, Any]] = {}
        self._each: list[Mapping[str, Any]] = []
        self._of: dict[int, Mapping[str, Any]] = {}
        self._made: dict[tuple[int, bool], tuple[tuple[Any, ...], Settings]] = {}

    def read(self, parameters: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> list[Settings]:
        """The settings of the step about to be made on these parameters, each with its group."""
        kind: Any = type(self._optimizer)
        if _reader(kind, kind.step) is not _sgd:
            return [read_settings(self._optimizer, group, parameter) for parameter, group in parameters]
        states = self._optimizer.state
        same = states is self._states and len(states) == len(self._each)
        if not same or not all(map(is_, states.values(), self._each)):
            # By their number: to look a tensor up in a dictionary takes a call of the interpreter.
            self._states, self._each = states, [*states.values()]
            self._of = {id(parameter): state for parameter, state in states.items()}
        found: list[Settings] = []
        before, before_first = None, False
        for parameter, group in parameters:
            first = self._of.get(id(parameter), _NOTHING).get("momentum_buffer") is None
            if group is not before or first is not before_first:
                before, before_first = group, first
                settings = self._settings(group, first)
            found.append(settings)
        return found

    def _settings(self, group: Mapping[str, Any], first: bool) -> Settings:
        values = _sgd_values(group)
        if not _PLAIN.issuperset(map(type, values)):  # a tensor or an array may change and stay the same object
            return _sgd_settings(values, first)
        made = self._made.get((id(group), first))
        if made is None or made[0] != values:
            made = self._made[id(group), first] = values, _sgd_settings(values, first)
        return made[1]


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step hook fires for a `super().step()` inside a step of the same optimiser.

    torch wraps the step of every class with the hooks, so a subclass that calls its parent's step runs them twice.
    """
    frame, wrappers = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            wrappers += 1
        frame = frame.f_back  # type: ignore[assignment]
    return wrappers > 1


def why_not_exact(optimizer_name: str) -> str:
    """Why an optimiser outside the SGD family gives no value per event."""
    return (
        f"{optimizer_name} has no scalar dual form: each step scales the gradient elementwise or not linearly, "
        "so no single coefficient per event rebuilds the weight; scores are exact, values are not available"
    )


@dataclass(frozen=True)
class Coefficients:
    """c_0, d_0 and c_s of one parameter for one end step: W = c_0 W0 + d_0 v_0 + Σ_s c_s G_s."""

    initial: float
    velocity: float
    steps: Float64[np.ndarray, " steps"]


def transitions(
    settings: Float64[np.ndarray, "steps columns"], flags: UInt8[np.ndarray, " steps"]
) -> tuple[Float64[np.ndarray, "steps 2 2"], Float64[np.ndarray, "steps 2"]]:
    """M_s and b_s of every step from what the journal says of it."""
    lr, momentum, dampening, weight_decay, l2 = settings.T
    active = (flags & ACTIVE) > 0
    first = (flags & FIRST) > 0
    sign = np.where(flags & MAXIMIZE, -1.0, 1.0)
    decoupled = (flags & DECOUPLED) > 0
    coupled = np.where(decoupled, 0.0, weight_decay) + sign * l2
    shrink = np.where(decoupled, lr * weight_decay, 0.0)
    has_velocity = momentum != 0
    kept = np.where(has_velocity, np.where(first, 0.0, momentum), 1.0)
    taken = np.where(has_velocity, np.where(first, 1.0, 1.0 - dampening), 0.0)
    nesterov = ((flags & NESTEROV) > 0) & has_velocity
    # W ← W − η (direct·h + through·v) with h = σ k G + coupled·W, the velocity v as it was before the step.
    direct = np.where(nesterov, 1.0 + momentum * taken, np.where(has_velocity, taken, 1.0))
    through = np.where(has_velocity, np.where(nesterov, momentum * kept, kept), 0.0)

    matrices = np.empty((len(flags), 2, 2))
    matrices[:, 0, 0] = 1.0 - shrink - lr * direct * coupled
    matrices[:, 0, 1] = -lr * through
    matrices[:, 1, 0] = taken * coupled
    matrices[:, 1, 1] = kept
    inputs = np.stack([-sign * lr * direct, sign * taken], axis=1)
    matrices[~active] = np.eye(2)
    inputs[~active] = 0.0
    return matrices, inputs


def coefficients(
    settings: Float64[np.ndarray, "steps columns"], flags: UInt8[np.ndarray, " steps"], of_velocity: bool = False
) -> Coefficients:
    """The backward sweep: u = [1, 0], or [0, 1] for the velocity; for s = T…1: c_s = u·b_s, then u ← u M_s.

    >>> plain = np.array([[0.1, 0, 0, 0, 0]] * 2)
    >>> coefficients(plain, np.array([ACTIVE, ACTIVE], dtype=np.uint8)).steps
    array([-0.1, -0.1])
    """
    matrices, inputs = transitions(settings, flags)
    result = np.empty(len(flags))
    weight, velocity = (0.0, 1.0) if of_velocity else (1.0, 0.0)
    sweep = zip(reversed(matrices.tolist()), reversed(inputs.tolist()), strict=True)
    for at, (((a, b), (c, d)), (into_weight, into_velocity)) in enumerate(sweep):
        result[len(result) - 1 - at] = weight * into_weight + velocity * into_velocity
        weight, velocity = weight * a + velocity * c, weight * b + velocity * d
    return Coefficients(weight, velocity, result)
