"""The demonstration: record a training run, check its memory, and ask it about one test image.

Read from the top it is also an example of the library: `train` (in training.py) records, `ask` asks.
"""

from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import dualform
from dualform.dual import Certificate
from dualform.errors import BadCall, DataMissing
from dualform.experiments.datasets import Dataset, Split
from dualform.experiments.matches import best_examples
from dualform.experiments.recipes import Recipe, recipe
from dualform.experiments.runs import check_room, command, free_path
from dualform.experiments.training import BATCH, accuracy, batches, train
from dualform.queries import Attention
from dualform.view.figures import save, spotlight_figure
from dualform.view.panels import Exhibit, Match, Panel
from dualform.view.pictures import show, terminal

MATCHES = 3


def demo(
    out: Path = Path("runs/demo"),
    *,
    name: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    image: int | None = None,
    console: Console | None = None,
) -> Path:
    """Train with a memory in `out`, show what one test image draws on, and return the memory's directory.

    `name` is a recipe's; without one it is MNIST, or digits where MNIST cannot be had.
    """
    console = console or terminal()
    chosen, data = load(name, console)
    steps = chosen.steps if steps is None else steps
    image = chosen.showcase if image is None else image
    check(steps, image, data)
    path = free_path(out, console)

    torch.manual_seed(seed)
    model = chosen.model()
    check_room(path, model, steps * BATCH, console)
    console.print(f"Training the paper's network on {len(data.train):,} images for {steps:,} steps.")
    try:
        train(model, chosen, data, path, list(batches(len(data.train), steps, seed)))
    except KeyboardInterrupt:
        console.print(f"Stopped. What was recorded so far is in {path}.", soft_wrap=True)
        raise
    console.print(f"Test accuracy: {100 * accuracy(model, chosen, data.test):.1f} %.")

    memory = dualform.open(path)
    with console.status("Rebuilding every weight from its events"):
        certificate = memory.certificate()
    tell_certificate(certificate, console)

    with console.status("Asking the memory"):
        exhibit = ask(memory, model, chosen, data, image)
    show(exhibit, console)
    figure = save(spotlight_figure(exhibit), path.with_name(path.name + ".png"))

    console.print(f"The memory is in {path} ({memory.bytes / 1e9:.1f} GB), the figure in {figure}.", soft_wrap=True)
    console.print(f"Next:  {command()} serve {path}   (a page to draw digits on and to look around)", soft_wrap=True)
    console.print(f"       {command()} query {path} --test 7\n       {command()} info {path}", soft_wrap=True)
    return path


def load(name: str | None, console: Console) -> tuple[Recipe, Dataset]:
    """Return a recipe and its data, and say where the data came from."""
    chosen = recipe(name or "mnist")
    console.print(f"Looking for the data of {chosen.name}.")
    try:
        data = chosen.load()
    except DataMissing as reason:
        if name is not None:
            raise
        console.print(f"{reason}\nThe demo goes on with scikit-learn's small digits instead.", soft_wrap=True)
        chosen = recipe("digits")
        data = chosen.load()
    console.print(f"Data: {data.source}", soft_wrap=True)
    return chosen, data


@torch.no_grad()
def ask(memory: dualform.Memory, model: nn.Module, chosen: Recipe, data: Dataset, image: int) -> Exhibit:
    """Ask the memory what one test image draws on in every layer."""
    inputs = chosen.inputs(data.test[image : image + 1])
    probabilities = model(inputs)[0].softmax(0)
    answer = int(probabilities.argmax())
    spotlight = memory.attend(model, inputs)
    return Exhibit(
        image=data.test.images[image],
        title=f"test image {image}",
        label=chosen.class_names[int(data.test.labels[image])],
        answer=chosen.class_names[answer],
        probability=probabilities[answer].item(),
        class_names=chosen.class_names,
        panels=tuple(panel(layer, spotlight[layer], chosen, data.train) for layer in spotlight),
    )


def panel(layer: str, attention: Attention, chosen: Recipe, train: Split) -> Panel:
    """Return a layer's best matches, each another example, and its attention by class."""
    matches = []
    for best in best_examples(attention, MATCHES):
        label = chosen.class_names[int(train.labels[best.example])]
        matches.append(Match(train.images[best.example], label, best.score, best.step, best.example))
    totals = attention.totals(by="label", absolute=True)
    shares = torch.zeros(len(chosen.class_names), dtype=torch.float64)
    shares[torch.as_tensor(totals.groups)] = totals.values[0].double()
    return Panel(layer, tuple(matches), shares / shares.sum())


def tell_certificate(certificate: Certificate, console: Console) -> None:
    """Print the certificate and what it means in one sentence."""
    if certificate.exact:
        console.print("Every weight equals its initial value plus its events, up to rounding:")
    else:
        console.print("The events do not account for every weight; the reason is in the last column:")
    console.print(f"\n{certificate}\n", soft_wrap=True)


def check(steps: int, image: int, data: Dataset) -> None:
    """Raise BadCall for a number of steps or a test image that there cannot be."""
    if steps < 1:
        raise BadCall(f"steps must be at least 1, not {steps}.")
    if not 0 <= image < len(data.test):
        raise BadCall(f"There is no test image {image}; they are numbered from 0 to {len(data.test) - 1:,}.")
