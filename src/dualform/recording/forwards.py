"""How calls of a module are seen: its forward is swapped for one that also tells of each call.

Torch calls a module with forward hooks by a longer way, which costs more than all that is done there. A swapped forward
costs next to nothing, and the user's hooks come after it, as they would come after a first hook of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from dualform.layers import SWAPPED

Watcher = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Is told the arguments and the output of a call; must not raise."""


class Watching:
    """One who is told of the calls of a module, until it is removed."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self._module, self._watcher = module, watcher
        if not _is_swapped(module):
            _swap(module)
        watchers = _watchers(module)
        watchers.append(watcher)
        self._watchers = watchers

    def remove(self) -> None:
        """Stop being told; when nobody is, the module has its own forward again."""
        if self._watcher in self._watchers:
            self._watchers.remove(self._watcher)
        # Somebody else may have swapped it again, and calls ours.
        if not self._watchers and _is_swapped(self._module) and _watchers(self._module) is self._watchers:
            del self._module.__dict__["forward"]


def _is_swapped(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), SWAPPED)


def _watchers(module: nn.Module) -> list[Watcher]:
    watchers: list[Watcher] = getattr(vars(module)["forward"], SWAPPED)
    return watchers


def _swap(module: nn.Module) -> None:
    plain = type(module).forward
    watchers: list[Watcher] = []

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if self is module:  # and not a copy of it
            for watcher in watchers:
                watcher(args, kwargs, output)
        return output

    setattr(forward, SWAPPED, watchers)
    # Bound to the module: its deep copies have one of their own, and a pickle takes the class's.
    module.__dict__["forward"] = MethodType(forward, module)
