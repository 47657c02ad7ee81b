"""What a memory is asked about: a test example of its recipe, an image file, or tensors in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import dualform
from dualform.errors import BadCall
from dualform.experiments.asking.models import recipe_of, require_recipe
from dualform.experiments.recipes import Recipe
from dualform.view.imagefiles import read_image


@dataclass(frozen=True)
class Source:
    """What the user named: a model of their own or None, and one of a test example, an image, a file of tensors."""

    model: str | None = None
    test: int | None = None
    image: Path | None = None
    invert: bool = False
    inputs: Path | None = None
    task: str | None = None

    def check(self) -> None:
        """BadCall for options that contradict each other."""
        named = {"--test": self.test, "--image": self.image, "--inputs": self.inputs}
        given = [option for option, value in named.items() if value is not None]
        if len(given) > 1:
            raise BadCall(f"{' and '.join(given)} name different inputs: give one of them.")
        if self.invert and self.image is None:
            raise BadCall("--invert needs --image FILE: only an image is inverted.")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The model's inputs, how to call them, the images they are (None: no images), and labels and task, where known."""

    title: str
    tensors: Tensor | dict[str, Tensor]
    images: UInt8[Tensor, "images height width"] | None = None
    labels: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    task: int | None = None


def read_inputs(memory: dualform.Memory, source: Source) -> Inputs:
    """The inputs that a source names; the recipe's showcase where it names none."""
    if source.inputs is not None:
        return _from_file(memory, source, source.inputs)
    if source.model is not None and recipe_of(memory) is None:
        raise BadCall(
            "--model needs --inputs FILE.safetensors, the model's inputs: this memory has no recipe to give any."
        )
    chosen = require_recipe(memory)
    task = chosen.task(source.task)
    if source.image is not None:
        height, width = image_size(memory, chosen)
        image, notes = read_image(source.image, height, width, source.invert)
        notes += _taken_as(chosen, source, "image is")
        return Inputs(source.image.name, chosen.preprocess(image[None], task), image[None], notes=notes, task=task)
    return _test_example(chosen, task, chosen.showcase if source.test is None else source.test)


def _taken_as(chosen: Recipe, source: Source, what: str) -> tuple[str, ...]:
    if len(chosen.tasks) == 1 or source.task is not None:
        return ()
    other = " or ".join(f"--task {task.name}" for task in chosen.tasks[1:])
    return (f"the {what} normalised as {chosen.tasks[0].name} is; {other} takes it as another task's.",)


def output_names(memory: dualform.Memory, inputs: Inputs) -> tuple[str, ...]:
    """What the model's outputs stand for: where the inputs are of a task, its classes."""
    chosen = recipe_of(memory)
    if chosen is None:
        return ()
    return chosen.class_names if inputs.task is None else chosen.tasks[inputs.task].class_names


def image_size(memory: dualform.Memory, chosen: Recipe) -> tuple[int, int]:
    """Height and width of the images that a recipe's model takes."""
    shape = _stored_image_shape(memory) or tuple(chosen.load().train.images.shape[1:])
    return shape[0], shape[1]


def _stored_image_shape(memory: dualform.Memory) -> tuple[int, ...] | None:
    if "image" not in memory.columns:
        return None
    values = memory.column("image").values
    return tuple(values.shape[1:]) if values.ndim == 3 and values.dtype == torch.uint8 else None


def _test_example(chosen: Recipe, task: int, number: int) -> Inputs:
    test, name = chosen.load().test.of(task), chosen.tasks[task].name
    if not 0 <= number < len(test):
        raise BadCall(f"--test {number}: {name} has {len(test):,} test examples, numbered from 0 to {len(test) - 1:,}.")
    image = test.images[number : number + 1]
    inputs = chosen.preprocess(image, task)
    return Inputs(f"{name} test image {number}", inputs, image, (int(test.labels[number]),), task=task)


def _from_file(memory: dualform.Memory, source: Source, path: Path) -> Inputs:
    if not path.is_file():
        raise BadCall(f"--inputs {path}: {'this is no file' if path.exists() else 'there is no such file'}.")
    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise BadCall(
            f"--inputs {path} cannot be read ({error}). It must be a safetensors file: "
            "safetensors.torch.save_file({'x': inputs}, FILE) writes one."
        ) from error
    if not tensors:
        raise BadCall(f"--inputs {path} holds no tensor: give one, or several named like the arguments of forward.")
    if len(tensors) > 1:
        return Inputs(path.name, tensors)
    tensor = next(iter(tensors.values()))
    chosen, shape = recipe_of(memory), _stored_image_shape(memory)
    if chosen is None or shape is None:
        return Inputs(path.name, tensor)
    task = chosen.task(source.task)
    if tuple(tensor.shape) == shape:
        tensor = tensor[None]
    if tensor.dtype == torch.uint8 and tuple(tensor.shape[1:]) == shape:
        notes = _taken_as(chosen, source, "images are")
        return Inputs(path.name, chosen.preprocess(tensor, task), tensor, notes=notes, task=task)
    return Inputs(path.name, tensor, _as_images(tensor, chosen, task, shape), task=task)


def _as_images(
    tensor: Tensor, chosen: Recipe, task: int, shape: tuple[int, ...]
) -> UInt8[Tensor, "images height width"] | None:
    """The images that were preprocessed into these inputs; None where their shape is not that of images."""
    height, width = shape
    if tuple(tensor.shape[1:]) not in (shape, (1, *shape), (height * width,)) or not tensor.is_floating_point():
        return None
    pixels = tensor.double().reshape(-1, height, width) * chosen.tasks[task].std + chosen.tasks[task].mean
    return pixels.nan_to_num(0).round().clamp(0, 255).byte()
