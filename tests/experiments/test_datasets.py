"""The data sets themselves, as published."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dualform.errors import MissingExtra
from dualform.experiments import datasets
from dualform.experiments.recipes import not_held_out, recipe, trained_on

needs_mnist = pytest.mark.skipif(
    not (Path(os.environ.get("DUALFORM_DATA") or ".") / "fashion-mnist").is_dir(),
    reason="DUALFORM_DATA names no directory with MNIST and Fashion-MNIST in it",
)


@needs_mnist
def test_mnist_is_as_published() -> None:
    data = datasets.mnist()
    assert data.train.images.shape == (60_000, 28, 28)
    assert data.test.images.shape == (10_000, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test.labels[5938].item() == 6
    assert "$DUALFORM_DATA" in data.source


@needs_mnist
def test_fashion_mnist_is_as_published() -> None:
    data = datasets.fashion_mnist()
    assert data.train.images.shape == (60_000, 28, 28)
    assert data.test.labels[981].item() == 9
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert data.source.startswith("Fashion-MNIST from $DUALFORM_DATA")


@needs_mnist
@pytest.mark.parametrize("load, at", [(datasets.mnist, 0), (datasets.fashion_mnist, 1)])
def test_the_recipe_normalises_by_what_is_measured(load: Callable[[], datasets.Dataset], at: int) -> None:
    pixels = load().train.images[not_held_out()].long()
    mean = pixels.sum().item() / pixels.numel()
    variance = pixels.square().sum().item() / pixels.numel() - mean**2
    task = recipe("mnist-and-fashion").tasks[at]
    assert task.mean == pytest.approx(mean, rel=1e-12)
    assert task.std == pytest.approx(variance**0.5, rel=1e-12)


@needs_mnist
def test_the_recipe_trains_on_the_papers_subset() -> None:
    data, whole = recipe("mnist").load(), datasets.mnist()
    assert len(data.train) == 40_053
    assert len(data.test) == 10_000
    ids = trained_on()
    assert ids[:5].tolist() == [29887, 8423, 49602, 5607, 31244]
    assert torch.equal(data.train.images[40_052], whole.train.images[ids[40_052]])
    assert torch.equal(data.train.labels, whole.train.labels[ids])


@needs_mnist
def test_two_tasks_stand_one_after_the_other() -> None:
    data, fashion = recipe("mnist-and-fashion").load(), recipe("fashion-mnist").load()
    assert (len(data.train), len(data.test)) == (80_106, 20_000)
    assert data.train.tasks.bincount().tolist() == [40_053, 40_053]
    assert torch.equal(data.train.images[40_053:], fashion.train.images)
    assert torch.equal(data.test.of(1).labels, fashion.test.labels)
    assert "MNIST from" in data.source and "Fashion-MNIST from" in data.source


def test_digits_are_bundled_and_always_split_alike() -> None:
    data = datasets.digits()
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.images.shape == (1437, 8, 8)
    assert data.train.images.max().item() == 255
    assert torch.equal(datasets.digits().test.images, data.test.images)
    assert "scikit-learn" in data.source
    pixels = data.train.images.double()
    assert recipe("digits").tasks[0].mean == pytest.approx(pixels.mean().item(), rel=1e-12)
    assert recipe("digits").tasks[0].std == pytest.approx(pixels.std(correction=0).item(), rel=1e-12)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'dualform\[demo\]'"):
        datasets.digits()
