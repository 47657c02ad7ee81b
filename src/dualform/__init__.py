"""Dualform turns a training run into an exact memory: which training examples does a prediction draw on?"""

from dualform import errors as errors
from dualform.api import Memory
from dualform.api import open_memory as open
from dualform.dual import Certificate
from dualform.recording import Recorder, record

__all__ = ["Certificate", "Memory", "open", "record", "Recorder"]  # noqa: RUF022 (case does not count)
