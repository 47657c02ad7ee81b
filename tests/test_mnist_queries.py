"""Questions to the memory of the MNIST network: what the shortcuts answer is what a scan of every event answers."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dualform
from dualform.experiments.recipes import recipe
from dualform.experiments.training import batches, train
from dualform.queries.reducers import Top
from dualform.queries.spotlight import Attention
from test_mnist import pytestmark as needs_mnist

pytestmark = needs_mnist


def memory_of(path: Path, steps: int) -> dualform.Memory:
    """A run of the paper's network; DUALFORM_MNIST_RUN names one of 3,000 steps that is there already."""
    there = os.environ.get("DUALFORM_MNIST_RUN")
    if there and steps == 3000:
        return dualform.open(there)
    mnist = recipe("mnist")
    torch.manual_seed(0)
    data = mnist.load()
    train(mnist.model(), mnist, data, path, list(batches(len(data.train), steps, 0)))
    return dualform.open(path)


def model_and_images(memory: dualform.Memory) -> tuple[torch.nn.Module, Tensor]:
    mnist = recipe("mnist")
    model = mnist.model()
    model.load_state_dict({name: weight.float() for name, weight in memory.weights().items()})
    return model, mnist.preprocess(mnist.load().test.images)


def check_tops(attention: Attention, way: str, k: int = 10, at_once: int = 500) -> None:
    for start in range(0, len(attention), at_once):
        some = attention[start : start + at_once]
        found = some.top(k)
        assert way in found.explain()
        scan = Top(some._scorer, k)
        some._focus.reduce(scan)
        scores, numbers = scan.result()
        assert found.scores.equal(scores)
        assert found.events.equal(numbers[..., 0])
        assert found.examples.equal(numbers[..., 1])


def check_layers(memory: dualform.Memory, queries: int) -> None:
    """Real queries, and random ones of the same size, on every hidden layer and the first."""
    model, images = model_and_images(memory)
    spotlight = memory.attend(model, images[:queries], check=False)
    for at, layer in enumerate(spotlight):
        real = spotlight[layer]
        check_tops(real, "certified shadow")
        noise = torch.randn(real.queries.shape, generator=torch.Generator().manual_seed(at))
        # On the way from the real queries to noise: some of it prunes well, some hardly.
        mixed = torch.linspace(0, 1, queries)[:, None] * noise * real.queries.std() + real.queries.roll(1, 0)
        check_tops(memory.attend(None, {layer: mixed})[layer], "rows bounded")


@pytest.mark.long
def test_10000_real_and_10000_random_queries(tmp_path: Path) -> None:
    check_layers(memory_of(tmp_path / "run", 3000), 10_000)


def test_some_queries(tmp_path: Path) -> None:
    check_layers(memory_of(tmp_path / "run", 60), 40)


def check_outputs(memory: dualform.Memory, images: Tensor, model: torch.nn.Module) -> None:
    spotlight = memory.attend(model, images, check=False)
    hidden = images.flatten(1)
    for layer in ("fc0", "fc1", "fc2"):
        truth = getattr(model, layer)(hidden).detach()
        rebuilt = spotlight[layer].output()
        assert (rebuilt - truth).norm() <= 1e-4 * truth.norm()
        hidden = truth.relu()
    total = spotlight["fc2"].contributions().totals(by="label").values.sum(dim=1) + spotlight["fc2"].initial()
    assert (total - truth).abs().max() <= 1e-4 * truth.abs().max()
    two = truth.topk(2).values
    clear = two[:, 0] - two[:, 1] > 2e-4 * truth.abs().max()
    assert clear.double().mean() > 0.99
    assert total.argmax(dim=1)[clear].equal(truth.argmax(dim=1)[clear])


@pytest.mark.long
def test_all_contributions_add_up_to_the_logits_of_10000_images(tmp_path: Path) -> None:
    memory = memory_of(tmp_path / "run", 3000)
    model, images = model_and_images(memory)
    check_outputs(memory, images, model)


def test_all_contributions_add_up_to_the_logits(tmp_path: Path) -> None:
    memory = memory_of(tmp_path / "run", 60)
    model, images = model_and_images(memory)
    check_outputs(memory, images[:200], model)
