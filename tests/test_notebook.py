"""The notebook runs from top to bottom in a kernel of its own, answers what its text says, and stores no outputs."""

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
SECONDS = 300

# Run after the last cell: what the notebook has found, as numbers.
FINDINGS = """
import json, sys

print(json.dumps(dict(
    prefix=sys.prefix,
    exact=certificate.exact,
    events=[row.events for row in certificate],
    steps=memory.steps,
    layers=list(spotlight),
    wrong=called != right,
    totals=[len(totals.groups), totals.values.min().item()],
    pushed=(by_class + initial).item(),
    logits=(logits[called] - logits[right]).item(),
    history=list(history.items()),
    accuracy=accuracy(model),
    called=[before, after],
    run_is_left=run.exists(),
)))
"""


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture
def own_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's settings or kernels, figures drawn into the notebook, and an empty working directory."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    return work


def execute(notebook: Any, work: Path) -> None:
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(work)}}).execute()


def text_of(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_finds_what_it_says(own_jupyter: Path) -> None:
    notebook = read()
    notebook.cells.append(nbformat.v4.new_code_cell(FINDINGS))
    execute(notebook, own_jupyter)

    found = json.loads(text_of(notebook.cells[-1]))
    assert found["prefix"] == sys.prefix, "the kernel is not the one of this environment"
    assert found["exact"] is True
    assert found["layers"] == ["fc1", "fc2", "fc3"]
    assert found["events"] == [15 * 1297] * 3
    assert found["wrong"] is True
    assert found["totals"][0] == 10 and found["totals"][1] >= 0
    assert found["pushed"] == pytest.approx(found["logits"], abs=1e-3)
    assert found["logits"] > 0
    (start, at_start), *_, (end, at_end) = found["history"]
    assert (start, end) == (0, found["steps"])
    assert at_start < 0.3 and at_end == pytest.approx(found["accuracy"], abs=0.003) and at_end > 0.85
    before, after = found["called"]
    assert after < before
    assert not found["run_is_left"]

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure was drawn"
    assert any("<table" in output.get("data", {}).get("text/html", "") for output in outputs), "no table was shown"
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not list(own_jupyter.iterdir()), "the notebook left files beside itself"


def test_a_cell_that_raises_is_an_error(own_jupyter: Path) -> None:
    notebook = read()
    notebook.cells = [nbformat.v4.new_code_cell("1 / 0")]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, own_jupyter)


def test_no_cell_stores_outputs() -> None:
    stored = [cell.id for cell in read().cells if cell.get("outputs") or cell.get("execution_count") is not None]
    assert not stored, f"clear the outputs of {stored}"


def test_every_code_cell_has_a_text_before_it() -> None:
    kinds = [cell.cell_type for cell in read().cells]
    assert kinds == ["markdown", "code"] * (len(kinds) // 2)


def test_only_public_names_are_used() -> None:
    code = "\n".join(cell.source for cell in read().cells if cell.cell_type == "code")
    assert "import dualform\n" in code
    assert "from dualform" not in code and "import dualform." not in code


def test_links_lead_somewhere() -> None:
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    links = [piece.split(")")[0] for piece in text.split("](")[1:]]
    assert links
    assert not [link for link in links if not (NOTEBOOK.parent / link).is_file()]
