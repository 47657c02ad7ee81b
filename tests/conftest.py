"""What must be set before dualform is imported: run-time shape checks, one thread, hypothesis profiles."""

import contextlib
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the subprocesses that tests start
os.environ.setdefault("MPLBACKEND", "Agg")

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

if "dualform" in sys.modules:
    raise RuntimeError("dualform was imported before tests/conftest.py, so its shapes would go unchecked")
install_import_hook("dualform", "beartype.beartype")

torch.set_num_threads(1)

# "ci" is also the name of a profile of hypothesis's own, which this one replaces.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionstart() -> None:
    """Import our packages in the ordinary way: collecting doctests, pytest would load them past the hook."""
    source = Path(__file__).parents[1] / "src"
    for init in sorted(source.glob("dualform/**/__init__.py")):
        # What fails here fails again, with its traceback, when it is collected.
        with contextlib.suppress(Exception):
            importlib.import_module(".".join(init.parent.relative_to(source).parts))
