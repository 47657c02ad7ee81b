"""Asking a memory from the shell, without a line of Python: its model is built anew and run on the inputs."""

from dualform.experiments.asking.ask import ask
from dualform.experiments.asking.inputs import Source

__all__ = ["Source", "ask"]
