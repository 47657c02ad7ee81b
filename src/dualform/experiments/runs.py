"""Where the memory of an experiment goes: a free directory, on a disk with room for it."""

import shutil
import sys
from pathlib import Path

from rich.console import Console
from torch import nn

from dualform.errors import BadCall


def free_path(out: Path, console: Console) -> Path:
    """Return `out`, or the next free name after it, so that no earlier memory is touched."""
    path, number = out, 2
    while path.exists():
        path, number = out.with_name(f"{out.name}-{number}"), number + 1
    if path != out:
        console.print(f"{out} exists already, so this memory goes into {path}.", soft_wrap=True)
    return path


def check_room(path: Path, model: nn.Module, events: int, console: Console) -> None:
    """Say how much room this many events in every linear layer may take; raise BadCall if there is less."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    floats = events * sum(module.in_features + module.out_features for module in linear)
    # Beside keys and gradients there are the events' numbers, the journal and the examples' columns.
    needed = round(1.05 * 4 * floats) + 10**8
    there = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise BadCall(
            f"The memory may take {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free in {there}. "
            "Choose another place (--out) or fewer steps (--steps)."
        )
    console.print(f"The memory may take {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.")


def command() -> str:
    """Return what to type for `dualform` here: after `make demo` it is not on the path of the shell."""
    if shutil.which("dualform"):
        return "dualform"
    python, here = Path(sys.executable), Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else python} -m dualform"
