"""Questions to the memory of the MNIST network: what the shortcuts answer is what a scan of every event answers."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import dualform
from dualform.experiments.recipes import recipe
from dualform.experiments.training import batches, train
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


def scanned(attention: Attention, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, events and examples of the k best, from the product of every event with every query in fp64.

    What is within the error of such a product of the k-th best is multiplied out once more, in long double.
    """
    memory, weight, queries = attention._focus.memory, attention._focus.weight, attention.queries.double()
    margin = 1e-12 * queries.norm(dim=1, keepdim=True)
    worst = torch.full((len(queries), 1), -torch.inf, dtype=torch.float64)
    kept: list[tuple[Tensor, ...]] = []
    for block in memory.blocks(weight, memory.steps):
        near = queries @ block.keys.double().T
        if len(kept) < 8:
            largest = float(block.keys.double().norm(dim=1).max())
            worst = torch.maximum(worst, near.topk(k, dim=1).values[:, -1:] - largest * margin)
        at_query, at_row = (near >= worst).nonzero(as_tuple=True)
        keys, queries_of = (
            part.numpy().astype(np.longdouble) for part in (block.keys[at_row], attention.queries[at_query])
        )
        exact = torch.from_numpy((keys * queries_of).sum(axis=1).astype(np.float32))
        kept.append((at_query, exact, block.events[at_row], block.examples[at_row]))
        if len(kept) % 8 == 0:
            kept = [best(kept, k)]
            last = kept[0][1].view(-1, k)[:, -1:].double()
            worst = torch.maximum(worst, last - 1e-6 * last.abs())
    _, scores, events, examples = best(kept, k)
    return scores.view(-1, k), events.view(-1, k), examples.view(-1, k)


def best(parts: list[tuple[Tensor, ...]], k: int) -> tuple[Tensor, ...]:
    """The k best of every query, in the documented order: score descending, then event ascending."""
    at_query, scores, events, examples = (torch.cat(part) for part in zip(*parts, strict=True))
    order = np.lexsort((events.numpy(), -scores.numpy(), at_query.numpy()))
    counts = torch.bincount(at_query)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.from_numpy(order)[rank < k]
    return at_query[chosen], scores[chosen], events[chosen], examples[chosen]


def check_tops(attention: Attention, way: str, k: int = 10, at_once: int = 1000) -> None:
    for start in range(0, len(attention), at_once):
        some = attention[start : start + at_once]
        found = some.top(k)
        assert way in found.explain()
        scores, events, examples = scanned(some, k)
        assert found.scores.equal(scores)
        assert found.events.equal(events)
        assert found.examples.equal(examples)


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
