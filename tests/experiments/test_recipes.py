"""Recipes: what a name in a memory's manifest stands for."""

import pytest
import torch

from dualform.errors import BadCall
from dualform.experiments.recipes import RECIPES, PaperNetwork, not_held_out, recipe, trained_on


def test_the_papers_network() -> None:
    model = recipe("mnist").model()
    assert {name: list(value.shape) for name, value in model.state_dict().items()} == {
        "fc0.weight": [800, 784],
        "fc0.bias": [800],
        "fc1.weight": [800, 800],
        "fc1.bias": [800],
        "fc2.weight": [10, 800],
        "fc2.bias": [10],
    }


def test_the_network_is_three_linear_maps_with_relu_between() -> None:
    model, images = PaperNetwork(pixels=6, hidden=5, classes=3), torch.randn(4, 2, 3)
    (w0, b0), (w1, b1), (w2, b2) = ((layer.weight, layer.bias) for layer in (model.fc0, model.fc1, model.fc2))
    hidden = (images.reshape(4, 6) @ w0.T + b0).clamp(min=0)
    hidden = (hidden @ w1.T + b1).clamp(min=0)
    torch.testing.assert_close(model(images), hidden @ w2.T + b2)


def test_the_papers_subset() -> None:
    assert len(not_held_out()) == 50_000
    assert len(trained_on()) == 40_053
    assert len(set(trained_on().tolist()) & set(not_held_out().tolist())) == 40_053


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_found_by_its_own_name(name: str) -> None:
    found = recipe(name)
    assert found.name == name
    side = 8 if name == "digits" else 28
    inputs = found.preprocess(torch.zeros(2, side, side, dtype=torch.uint8))
    assert found.model()(inputs).shape == (2, len(found.class_names))


def test_preprocessing_shifts_and_scales() -> None:
    found, pixels = recipe("mnist"), torch.tensor([[[0, 255]]], dtype=torch.uint8)
    expected = (pixels.double() - found.tasks[0].mean) / found.tasks[0].std
    torch.testing.assert_close(found.preprocess(pixels).double(), expected, rtol=1e-6, atol=0)


def test_an_unknown_recipe_lists_those_there_are() -> None:
    with pytest.raises(BadCall, match="no recipe 'os.system'; the recipes are digits, fashion-mnist, mnist, "):
        recipe("os.system")


def test_each_image_is_normalised_as_its_task_is() -> None:
    found = recipe("mnist-and-fashion")
    pixels = torch.tensor([[[0, 255]], [[7, 9]], [[0, 255]]], dtype=torch.uint8)
    inputs = found.preprocess(pixels, torch.tensor([0, 1, 1]))
    for at, task in enumerate((0, 1, 1)):
        assert torch.equal(inputs[at : at + 1], found.preprocess(pixels[at : at + 1], task))
    assert not torch.equal(inputs[0], inputs[2])


def test_two_tasks_share_the_outputs() -> None:
    found = recipe("mnist-and-fashion")
    assert found.class_names[3] == "3 / dress"
    assert (found.task(None), found.task("mnist"), found.task("fashion-mnist")) == (0, 0, 1)
    with pytest.raises(BadCall, match="has no task 'cifar'; it has mnist and fashion-mnist"):
        found.task("cifar")
