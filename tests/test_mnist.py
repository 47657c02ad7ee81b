"""The MNIST network with the paper's settings: long at full length, and a short version of the same."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(
    not (Path(os.environ.get("DUALFORM_DATA", "nowhere")) / "mnist").is_dir(),
    reason="needs the MNIST files in $DUALFORM_DATA/mnist (make test sets it where ../shared/data exists)",
)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "mnist.py"
    spec = importlib.util.spec_from_file_location("mnist_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as where it is run: it imports its neighbours
        spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_papers_network_is_exact_after_3000_steps(benchmark: ModuleType, tmp_path: Path) -> None:
    figures = benchmark.measure(tmp_path / "run", steps=3000, attend=10)
    assert figures.certificate.exact
    assert all(row.residual <= 3e-5 for row in figures.certificate)
    assert figures.folded <= 1e-4
    assert figures.attending <= 1e-4
    assert figures.accuracy >= 0.955
    assert figures.segments <= 5.1e9


def test_the_papers_network_is_exact_after_100_steps(benchmark: ModuleType, tmp_path: Path) -> None:
    figures = benchmark.measure(tmp_path / "run", steps=100, attend=10)
    assert figures.certificate.exact
    assert all(row.residual <= 3e-5 for row in figures.certificate)
    assert figures.folded <= 1e-4
    assert figures.attending <= 1e-4
    assert figures.accuracy >= 0.5
