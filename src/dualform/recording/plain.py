"""Torch as the recorder needs it, whatever the user's loop has switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def run_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function without gradients, without autocast, and with the CPU as the default device."""
    enabled = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # torch.no_grad() is four calls more, at every step
        # A default device is a function mode: without any, there is nothing to switch off.
        if not torch.is_autocast_enabled("cpu") and torch._C._len_torch_function_stack() == 0:
            return function(*arguments)
        with contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            return function(*arguments)
    finally:
        torch._C._set_grad_enabled(enabled)
