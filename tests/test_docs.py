"""Every python block of the README and the docs runs, in order, in one namespace a file."""

import doctest
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_RUN_AT_MOST = 3

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
PYTHON = {"python", "python3", "py", "pycon"}
NO_RUN_COMMENT = "<!-- no-run -->"


@dataclass(frozen=True)
class CodeBlock:
    """A python block and the number of its first line, counted from 1."""

    source: str
    line: int
    run: bool


def code_blocks(text: str) -> list[CodeBlock]:
    blocks, lines, number = [], text.splitlines(), 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if not opening:
            continue
        start, indent = number, len(opening["indent"])
        while number < len(lines) and lines[number].strip() != "```":
            number += 1
        if number == len(lines):
            raise ValueError(f"line {start}: this code block is never closed")
        language, *words = opening["info"].split() or [""]
        if language in PYTHON:
            source = "\n".join(line[indent:] for line in lines[start:number]) + "\n"
            marked = start >= 2 and lines[start - 2].strip() == NO_RUN_COMMENT
            blocks.append(CodeBlock(source, start + 1, run="no-run" not in words and not marked))
        number += 1
    return blocks


def run_block(block: CodeBlock, page: Path, namespace: dict[str, object]) -> None:
    """Run plain code up to the first `>>>`, and from there on a doctest."""
    lines = block.source.splitlines(keepends=True)
    prompt = next((n for n, line in enumerate(lines) if line.startswith(">>>")), len(lines))
    # Empty lines in front make tracebacks show the line of the page.
    plain = "\n" * (block.line - 1) + "".join(lines[:prompt])
    exec(compile(plain, str(page), "exec"), namespace)
    if prompt < len(lines):
        test = doctest.DocTestParser().get_doctest(
            "".join(lines[prompt:]), {}, page.name, str(page), block.line - 1 + prompt
        )
        test.globs = namespace
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        if runner.run(test, out=report.append, clear_globs=False).failed:
            pytest.fail("".join(report), pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dualform_docs_" + re.sub(r"\W", "_", page.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.run:
            run_block(block, page, vars(module))


def test_few_blocks_are_left_out() -> None:
    left_out = [
        f"{page.relative_to(ROOT)}:{block.line}"
        for page in PAGES
        for block in code_blocks(page.read_text(encoding="utf-8"))
        if not block.run
    ]
    assert len(left_out) <= NO_RUN_AT_MOST, left_out


def test_blocks_are_found() -> None:
    text = (
        "```python\na = 1\n```\n"
        "- item\n\n  ```python\n  if a:\n      b = 2\n  ```\n"
        "```text\n```\n"
        "```console\n$ true\n```\n"
        "```python no-run\nlater\n```\n"
        f"{NO_RUN_COMMENT}\n```python\nlater\n```\n"
    )
    assert code_blocks(text) == [
        CodeBlock("a = 1\n", 2, run=True),
        CodeBlock("if a:\n    b = 2\n", 7, run=True),
        CodeBlock("later\n", 16, run=False),
        CodeBlock("later\n", 20, run=False),
    ]


def test_an_open_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: .* never closed"):
        code_blocks("text\n```python\na = 1\n")


def test_a_failing_block_names_its_line() -> None:
    page = Path("page.md")
    with pytest.raises(ZeroDivisionError) as failure:
        run_block(CodeBlock("a = 0\n1 / a\n", 41, run=True), page, {})
    assert (Path(failure.traceback[-1].path).name, failure.traceback[-1].lineno + 1) == ("page.md", 42)
    with pytest.raises(pytest.fail.Exception, match="line 42"):
        run_block(CodeBlock("a = 0\n>>> a + 1\n2\n", 41, run=True), page, {})
