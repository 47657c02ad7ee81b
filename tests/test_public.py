"""What dualform offers is what `__all__` says, and all of it is explained."""

import inspect
import re
import types
from pathlib import Path

import pytest

import dualform

API_PAGE = Path(__file__).parents[1] / "docs" / "api.md"
NAMES = [name for name in dualform.__all__ if name != "__version__"]


def is_module_of_ours(thing: object) -> bool:
    """Submodules, and jaxtyping, which the hook in conftest.py puts into every module."""
    return isinstance(thing, types.ModuleType) and thing.__name__.split(".")[0] in {"dualform", "jaxtyping"}


def test_all_is_what_is_exposed() -> None:
    exposed = [
        name
        for name, thing in vars(dualform).items()
        if (not name.startswith("_") or name == "__version__") and not is_module_of_ours(thing)
    ]
    assert list(dualform.__all__) == sorted(exposed, key=str.casefold)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_a_docstring(name: str) -> None:
    text = getattr(dualform, name).__doc__ or ""
    # A dataclass without a docstring gets its signature as one.
    assert text.strip() and not text.startswith(f"{name}("), f"dualform.{name} needs a docstring"


@pytest.mark.parametrize("name", NAMES)
def test_public_methods_have_a_docstring(name: str) -> None:
    thing = getattr(dualform, name)
    bare = [
        f"{name}.{attribute}"
        for attribute, member in (vars(thing).items() if inspect.isclass(thing) else ())
        if not attribute.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
        and not inspect.getdoc(getattr(thing, attribute))
    ]
    assert not bare, f"docstrings are missing: {bare}"


def test_public_names_are_on_the_api_page() -> None:
    page = API_PAGE.read_text(encoding="utf-8")
    missing = [name for name in NAMES if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"docs/api.md does not mention {missing}"
