"""How calls of a module are seen: its forward is swapped for one that also tells of each call.

Torch calls a module with forward hooks by a longer way, which costs more than all that is done there. A swapped forward
costs next to nothing, and the user's hooks come after it, as they would come after a first hook of ours.

What hangs on the module itself would go with its copies, and call the module they were made of. So what they are made
of is swapped too, and holds nothing of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from dualform.layers import OwnForward

Watcher = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Is told the arguments and the output of a call; must not raise."""


class Watching:
    """One who is told of the calls of a module, until it is removed."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self._module, self._watcher = module, watcher
        forward = vars(module).get("forward")
        if not isinstance(forward, SeenForward):
            forward = SeenForward(module)
            vars(module)["forward"] = forward
            vars(module).update({name: MethodType(function, module) for name, function in _COPYING.items()})
        self._watchers = forward.watchers
        self._watchers.append(watcher)

    def remove(self) -> None:
        """Stop being told; when nobody is, the module is as it was."""
        if self._watcher in self._watchers:
            self._watchers.remove(self._watcher)
        if not self._watchers:
            _give_back(self._module)


class SeenForward(OwnForward):
    """What a module's own forward computes; who watches is told."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.watchers: list[Watcher] = []
        self.__signature__ = inspect.signature(MethodType(type(module).forward, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        output = type(module).forward(module, *args, **kwargs)
        for watcher in self.watchers:
            watcher(args, kwargs, output)
        return output

    def __reduce__(self) -> Any:
        """A copy, where a module copies all that it has, is that of the module's copy: nobody watches it."""
        return type(self), (self.module,)


def _state(module: nn.Module) -> Any:
    """What copy and pickle take of a module."""
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    ours = _ours(state)
    return {name: value for name, value in state.items() if name not in ours}


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    _give_back(replica)
    return replica


_COPYING: dict[str, Callable[[nn.Module], Any]] = {"__getstate__": _state, "_replicate_for_data_parallel": _replica}


def _ours(attributes: Mapping[str, Any]) -> list[str]:
    """Which of a module's attributes are ours, and not what somebody else has put there meanwhile."""
    ours = [name for name, own in _COPYING.items() if getattr(attributes.get(name), "__func__", None) is own]
    return ["forward", *ours] if isinstance(attributes.get("forward"), SeenForward) else ours


def _give_back(module: nn.Module) -> None:
    for name in _ours(vars(module)):
        del vars(module)[name]
