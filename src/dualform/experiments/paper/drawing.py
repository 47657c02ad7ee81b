"""The figures of the paper's image experiments, drawn from the results of the first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from dualform.experiments.datasets import Dataset
from dualform.experiments.paper.masks import Masked
from dualform.experiments.paper.pushes import Push, Pusher
from dualform.experiments.paper.results import Results
from dualform.experiments.paper.settings import BEST, Experiment, Showcase
from dualform.experiments.paper.spotlights import Layer, Match, Spotlit
from dualform.experiments.recipes import Recipe
from dualform.view.charts import Bar, Classes, ClassPanel, bars_figure, scores_figure, timeline_figure, totals_figure
from dualform.view.galleries import Picture, Shelf, inputs_figure, push_figure, shelves_figure


@dataclass(frozen=True, eq=False)
class Drawn:
    """A figure, the name of its files without an ending, and its caption."""

    name: str
    figure: Figure
    caption: str


def draw_inputs(results: Sequence[Results], data: dict[str, Dataset]) -> list[Drawn]:
    """Figures 3 and 12: the test images."""
    found: dict[str, list[Picture]] = {"3": [], "12": []}
    for one in results:
        for shown in _spotlit(one):
            number, letter = shown.figure[:-1], shown.figure[-1]
            name = class_lines(one.experiment.recipe, shown.task, shown.label)
            wrong = "" if shown.label == shown.answer else f"\ntaken for {_class(one, shown.task, shown.answer)}"
            caption = f"({letter}) {name}\ntest image {shown.index:,}{wrong}"
            found[number].append(Picture(_test_image(one, data, shown.task, shown.index), caption))
    texts = {
        "3": "Test images of the figures of the main text.",
        "12": "Test images of the appendix: the first of its class that the model gets right ((d): wrong).",
    }
    return [
        Drawn(f"figure-{int(number):02}-inputs", inputs_figure(pictures), f"Figure {number}. {texts[number]}")
        for number, pictures in found.items()
        if pictures
    ]


def draw_showcase(one: Results, showcase: Showcase, data: Dataset) -> list[Drawn]:
    """Scores, totals and best matches of one test image."""
    shown = next(shown for shown in _spotlit(one) if shown.figure == showcase.figure)
    classes = _classes(one.experiment, shown.task, shown.label, shown.answer)
    recipe, name = one.experiment.recipe, one.experiment.name
    about = f"{class_title(recipe, shown.task, shown.label)}, Figure {shown.figure}"
    case = f"{one.experiment.title.split(':')[0].lower()} case"
    best = f"for each class the {BEST} best events in descending order"
    return [
        Drawn(
            f"figure-{showcase.scores:02}-{name}-scores",
            scores_figure(classes, [ClassPanel(layer_title(layer.name), layer.scores) for layer in shown.layers]),
            f"Figure {showcase.scores}. Scores of training events for a test image of class {about}, {case}. "
            f"The x-axis is partitioned by class; {best}.",
        ),
        Drawn(
            f"figure-{showcase.totals:02}-{name}-totals",
            totals_figure(classes, _totals(shown.layers), "Σ |score|"),
            f"Figure {showcase.totals}. Total scores of every class for the same test image ({about}), {case}.",
        ),
        Drawn(
            f"figure-{showcase.matches:02}-{name}-matches",
            shelves_figure([_shelf(layer, recipe, data) for layer in shown.layers]),
            f"Figure {showcase.matches}. The best matching training examples in every layer, each another example, "
            f"for the same test image ({about}), {case}.",
        ),
    ]


def draw_time(one: Results) -> list[Drawn]:
    """The distribution over training time of the best events; the paper describes it without a figure."""
    shown = _spotlit(one)[0]
    panels = [(layer_title(layer.name), layer.steps) for layer in shown.layers[1:]]
    about = class_title(one.experiment.recipe, shown.task, shown.label)
    return [
        Drawn(
            f"time-{one.experiment.name}",
            timeline_figure(one.first.checks.steps, panels),
            f"When the {BEST} best events took place, for the test image of Figure {shown.figure} ({about}); dashed: "
            "spread evenly. In layer-0, whose keys are the images themselves, time does not matter.",
        )
    ]


def draw_weighted(one: Results) -> list[Drawn]:
    """Scores weighted by the norm of the error, which the paper describes without a figure."""
    shown = _spotlit(one)[0]
    if not shown.weighted:
        return []
    classes = _classes(one.experiment, shown.task, shown.label, shown.answer)
    about = f"the test image of Figure {shown.figure}"
    return [
        Drawn(
            f"weighted-{one.experiment.name}-scores",
            scores_figure(
                classes, [ClassPanel(layer_title(layer.name), layer.scores) for layer in shown.weighted], "|score| ‖e‖"
            ),
            f"As Figure 4 for {about}, with scores weighted by the norm of the error: |α_t| ‖e_t‖.",
        ),
        Drawn(
            f"weighted-{one.experiment.name}-totals",
            totals_figure(classes, _totals(shown.weighted), "Σ |score| ‖e‖"),
            f"As Figure 5 for {about}, with scores weighted by the norm of the error.",
        ),
    ]


def draw_masks(one: Results) -> list[Drawn]:
    """What every task's events are worth: accuracies of masked and time-travelled models."""
    first = one.first.masks
    assert first is not None
    tasks = one.experiment.recipe.tasks
    bars = []
    for place, row in enumerate(first.rows):
        spreads = [one.masked(place, task.name) for task in tasks]
        bars.append(
            Bar(
                mask_title(one.experiment.recipe, row),
                tuple(spread.mean for spread in spreads),
                tuple(spread.deviation for spread in spreads),
                apart=row.layer is None and place > 1,
            )
        )
    return [
        Drawn(
            f"masks-{one.experiment.name}",
            bars_figure([task.title for task in tasks], bars, "test accuracy, %"),
            "Test accuracy of the continually trained network, of the same network as it was before the second task, "
            "and without the events of one task, in all layers or in one alone.",
        )
    ]


def draw_push(one: Results, push: Push, data: Dataset) -> Drawn:
    """Who pushed the wrong logit of one test image up and the right one down."""
    recipe = one.experiment.recipe
    label, answer = _class(one, push.task, push.label), _class(one, push.task, push.answer)
    title = recipe.tasks[push.task].title
    image = Picture(
        data.test.of(push.task).images[push.index],
        f"{title}\ntest image {push.index:,}\nlabel {label}\nanswer {answer}",
    )

    def shelf(title: str, pushers: Sequence[Pusher]) -> Shelf:
        return Shelf(title, tuple(Picture(data.train.images[one.example], _pushed(recipe, one)) for one in pushers))

    figure = push_figure(
        image,
        shelf(f"pushed towards {answer}", push.towards),
        shelf(f"pushed towards {label}", push.against),
        _classes(one.experiment, push.task, push.label, push.answer, everywhere=True),
        push.totals,
        push.initial,
    )
    return Drawn(
        f"push-{one.experiment.name}-{recipe.tasks[push.task].name}-{push.index}",
        figure,
        f"{title} test image {push.index:,}, a {label} taken for {answer}. Above: the training examples whose events "
        f"add most to logit {answer} minus logit {label}, and least. Below: what every class adds; with the initial "
        f"part it is {push.difference:.3f}, the model's own difference, up to {push.apart:.0e}.",
    )


def class_title(recipe: Recipe, task: int, label: int) -> str:
    """A class with its task, and where the class has a name of its own also its number.

    >>> from dualform.experiments.recipes import recipe
    >>> class_title(recipe("mnist-and-fashion"), 1, 9)
    'Fashion-MNIST 9 (ankle boot)'
    """
    found = recipe.tasks[task]
    name = found.class_names[label]
    return f"{found.title} {label}" + ("" if name == str(label) else f" ({name})")


def class_lines(recipe: Recipe, task: int, label: int) -> str:
    """The same in lines, for captions below small images: of tasks with class names two."""
    found = recipe.tasks[task]
    name = found.class_names[label]
    return f"{found.title} {label}" + ("" if name == str(label) else f"\n{name}")


def layer_title(layer: str) -> str:
    """The paper's name of a layer.

    >>> layer_title("fc2")
    'layer-2'
    """
    return layer.replace("fc", "layer-")


def mask_title(recipe: Recipe, row: Masked) -> str:
    """What a masked model is, in a few words."""
    if row.without is None:
        return f"after step {row.until:,}"
    without = recipe.tasks[recipe.task(row.without)].title
    return f"without {without}" if row.layer is None else f"in {layer_title(row.layer)} alone"


def _spotlit(one: Results) -> tuple[Spotlit, ...]:
    assert one.first.spotlights is not None
    return one.first.spotlights.showcases


def _class(one: Results, task: int, label: int) -> str:
    return one.experiment.recipe.tasks[task].class_names[label]


def _classes(experiment: Experiment, task: int, label: int, answer: int, everywhere: bool = False) -> Classes:
    """The classes of all tasks. A wrong answer is marked in each, since they share the outputs.

    With `everywhere` so is the label: of logits, not of what the image is.
    """
    tasks = experiment.recipe.tasks
    begins = [sum(len(one.class_names) for one in tasks[:number]) for number in range(len(tasks))]
    own = begins[task]
    return Classes(
        tuple((one.title, one.class_names) for one in tasks),
        tuple(begin + label for begin in begins) if everywhere else (own + label,),
        tuple(begin + answer for begin in begins) if label != answer else (own + answer,),
    )


def _pushed(recipe: Recipe, one: Pusher) -> str:
    events = "1 event" if one.events == 1 else f"{one.events:,} events"
    return f"{class_lines(recipe, one.task, one.label)}\n{f'{one.added:+.2f}'.replace('-', '−')}\n{events}"


def _totals(layers: Sequence[Layer]) -> list[ClassPanel]:
    return [ClassPanel(layer_title(layer.name), tuple((total,) for total in layer.totals)) for layer in layers]


def _shelf(layer: Layer, recipe: Recipe, data: Dataset) -> Shelf:
    def picture(match: Match) -> Picture:
        name = class_lines(recipe, match.task, match.label)
        return Picture(data.train.images[match.example], f"{name}\nscore {match.score:,.1f}")

    return Shelf(layer_title(layer.name), tuple(picture(match) for match in layer.matches))


def _test_image(one: Results, data: dict[str, Dataset], task: int, index: int) -> Tensor:
    return data[one.experiment.recipe_name].test.of(task).images[index]
