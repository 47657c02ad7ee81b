"""The machine that a figure was measured on, for the first line of every benchmark."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor by its name, where the system tells."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    return next((line.split(":")[-1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> str:
    """Processor, cores, torch's threads and version."""
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
