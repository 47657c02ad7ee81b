"""The demonstration, run whole on the small digits, and what it says when something is amiss."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dualform
from dualform.errors import BadCall, DataMissing
from dualform.experiments import demo as module
from dualform.experiments.demo import demo
from dualform.experiments.recipes import recipe
from dualform.experiments.training import batches


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100, color_system=None, markup=False)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_whole_demo_on_digits(tmp_path: Path) -> None:
    console = quiet()
    path = demo(tmp_path / "run", name="digits", steps=60, image=5, console=console)
    text = said(console)
    memory = dualform.open(path)
    assert memory.steps == 60
    assert all(row.exact for row in memory.certificate())
    assert "Digits from scikit-learn's own bundle" in text
    assert "Test accuracy: " in text
    assert "up to rounding" in text
    assert "test image 5" in text
    assert all(f"Layer {layer} " in text for layer in ("fc0", "fc1", "fc2"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert f"dualform info {path}\n" in text
    assert f"dualform info {path}\n" in text


def test_what_is_shown_is_what_a_plain_computation_gives(tmp_path: Path) -> None:
    chosen = recipe("digits")
    data, model = chosen.load(), chosen.model()
    module.train(model, chosen, data, tmp_path / "run", list(batches(len(data.train), 30, 0)))
    exhibit = module.ask(dualform.open(tmp_path / "run"), model, chosen, data, image=7)

    ids = torch.cat(list(batches(len(data.train), 30, 0)))
    keys = chosen.preprocess(data.train.images[ids]).double().flatten(1)
    query = chosen.preprocess(data.test.images[7:8]).double().flatten(1)
    scores = (keys @ query.T).flatten()
    best = scores.argsort(descending=True, stable=True).tolist()
    examples = list(dict.fromkeys(ids[event].item() for event in best))[:3]
    panel = exhibit.panels[0]
    assert [match.example for match in panel.matches] == examples
    assert [match.score for match in panel.matches] == pytest.approx(
        [scores[ids == example].max().item() for example in examples], rel=1e-6
    )
    shares = torch.zeros(10).double().index_add(0, data.train.labels[ids], scores.abs())
    torch.testing.assert_close(panel.shares.double(), shares / shares.sum(), rtol=1e-6, atol=0)


def test_batches_go_through_every_epoch_without_replacement() -> None:
    ids = list(batches(300, 5, seed=1))
    assert [len(batch) for batch in ids] == [128] * 5
    for epoch in (ids[0:2], ids[2:4]):
        assert len(torch.cat(epoch).unique()) == 256
    assert not torch.equal(ids[0], ids[2])
    assert torch.equal(torch.cat(ids), torch.cat(list(batches(300, 5, seed=1))))


def test_without_mnist_the_demo_goes_on_with_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    console = quiet()
    chosen, _ = module.load(None, console)
    assert chosen.name == "digits"
    assert "MNIST was found nowhere" in said(console)
    assert "goes on with scikit-learn's small digits" in said(console)


def test_mnist_asked_for_by_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    with pytest.raises(DataMissing, match="MNIST was found nowhere"):
        module.load("mnist", quiet())


@pytest.mark.parametrize(("wrong", "message"), [({"steps": 0}, "at least 1, not 0"), ({"image": 360}, "from 0 to 359")])
def test_wrong_numbers_are_refused_before_training(wrong: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadCall, match=message):
        demo(tmp_path / "run", name="digits", console=quiet(), **wrong)
    assert not (tmp_path / "run").exists()
