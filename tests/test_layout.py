"""The shape of the source: imports point one way, files stay small, no machine's paths."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualform

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dualform"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 400

# A component may import those of earlier rows. "dualform" is the package as a user sees it.
ORDER = (
    ("errors", "fast", "compiled", "blocks", "layers", "optimizers"),
    ("memory",),
    ("recording", "queries"),
    ("dual", "replay"),
    ("api",),
    ("engines", "view", "integrations"),
    ("dualform",),
    ("experiments",),
    ("cli",),
)
# Within a row, only these.
BESIDE = {
    "fast": {"compiled"},
    "compiled": {"fast"},
    "blocks": {"errors"},
    "layers": {"errors", "blocks"},
    "optimizers": {"errors", "blocks"},
}
FREE = {"dualform", "__main__"}

RANK = {component: rank for rank, row in enumerate(ORDER) for component in row}


def component_of(module: str) -> str:
    """dualform.memory.writer belongs to memory, dualform itself to dualform."""
    return [*module.split("."), "dualform"][1]


def module_of(source: Path) -> str:
    parts = source.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import of ours, also in functions, TYPE_CHECKING and import_module."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from dualform import x` names a submodule or something public.
            is_top = base == "dualform"
            names += [
                (node.lineno, f"{base}.{alias.name}" if is_top and is_submodule(alias.name) else base)
                for alias in node.names
            ]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                names.append((node.lineno, node.args[0].value))
    return ((line, name) for line, name in names if name.split(".")[0] == "dualform")


def is_submodule(name: str) -> bool:
    return name in RANK or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def may_import(importer: str, imported: str) -> bool:
    return (
        importer in FREE
        or importer == imported
        or RANK[imported] < RANK[importer]
        or imported in BESIDE.get(importer, set())
    )


def test_every_module_has_its_place() -> None:
    unknown = {component_of(module_of(source)) for source in SOURCES} - set(RANK) - FREE
    assert not unknown, f"{sorted(unknown)}: give them a place in ORDER (tests/test_layout.py)"


@pytest.mark.parametrize("source", SOURCES, ids=module_of)
def test_imports_point_one_way(source: Path) -> None:
    module = module_of(source)
    importer = component_of(module)
    tree = ast.parse(source.read_text(encoding="utf-8"))
    wrong = [
        f"{source.relative_to(ROOT)}:{line}: {importer} must not import {name}"
        for line, name in imported_modules(tree, module, source.name == "__init__.py")
        if component_of(name) not in RANK or not may_import(importer, component_of(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_all_kinds_of_import_are_seen() -> None:
    code = """
import dualform.cli
from dualform import errors, record
from ..memory.writer import Writer
from . import score
if TYPE_CHECKING:
    from dualform.dual import DualLayer
def late():
    import torch, dualform.view.figures
    importlib.import_module("dualform.engines.ray")
"""
    found = {name for _, name in imported_modules(ast.parse(code), "dualform.queries.scan", is_package=False)}
    assert found == {
        "dualform",
        "dualform.cli",
        "dualform.dual",
        "dualform.engines.ray",
        "dualform.errors",
        "dualform.memory.writer",
        "dualform.queries",
        "dualform.view.figures",
    }


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("errors", "blocks", False),
        ("blocks", "errors", True),
        ("layers", "optimizers", False),
        ("layers", "blocks", True),
        ("recording", "queries", False),
        ("queries", "recording", False),
        ("memory", "queries", False),
        ("api", "replay", True),
        ("memory", "dualform", False),
        ("cli", "experiments", True),
    ],
)
def test_the_order_itself(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


def test_no_source_file_is_too_long() -> None:
    lengths = {source: len(source.read_text(encoding="utf-8").splitlines()) for source in SOURCES}
    too_long = {str(source.relative_to(ROOT)): n for source, n in lengths.items() if n > LONGEST}
    assert not too_long, f"more than {LONGEST} lines: {too_long}"


def test_no_path_of_a_machine() -> None:
    listing = ""
    if shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    # Without a repository (an unpacked archive) the package still is looked through.
    files = [ROOT / name for name in listing.split("\0") if name] or SOURCES
    absolute = re.compile(rb"(?<![\w.~}])/(?:root|work|home)/")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        if file.is_file()
        for number, line in enumerate(file.read_bytes().splitlines(), start=1)
        if absolute.search(line)
    ]
    assert not found, found


def test_shapes_are_checked_while_testing() -> None:
    unchecked = [
        name
        for name, module in sys.modules.items()
        if (name == dualform.__name__ or name.startswith("dualform."))
        and not type(module.__spec__.loader).__module__.startswith("jaxtyping")
    ]
    assert not unchecked, f"imported without jaxtyping's hook (tests/conftest.py): {unchecked}"
