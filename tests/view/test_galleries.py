"""Galleries: every picture with its caption, in its row, and nothing on top of anything else."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from dualform.view.charts import Classes
from dualform.view.figures import ANSWER, LABEL
from dualform.view.galleries import Picture, Shelf, inputs_figure, push_figure, shelves_figure

CAPTION = "Fashion-MNIST 9\nankle boot\nscore 12,340"


def image(number: int) -> Tensor:
    return torch.full((4, 4), number, dtype=torch.uint8)


def pictures(count: int, caption: str = CAPTION) -> tuple[Picture, ...]:
    return tuple(Picture(image(10 * number), f"{caption}\n{number}") for number in range(count))


def shown(figure: Figure) -> list[tuple[Tensor, str]]:
    """Images and captions in the order of drawing."""
    found = [axes for axes in figure.axes if axes.images]
    return [(torch.from_numpy(np.asarray(axes.images[0].get_array())), axes.get_xlabel()) for axes in found]


def inside(figure: Figure) -> None:
    figure.canvas.draw()
    edge = figure.bbox.padded(1)
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for box in boxes + [text.get_window_extent() for text in figure.texts]:
        assert edge.contains(box.x0, box.y0) and edge.contains(box.x1, box.y1), (box, figure.bbox)
    assert not any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_inputs_stand_three_in_a_row(count: int) -> None:
    given = pictures(count)
    figure = inputs_figure(given)
    for (drawn, caption), picture in zip(shown(figure), given, strict=True):
        assert torch.equal(drawn, picture.image)
        assert caption == picture.caption
    figure.canvas.draw()
    rows = {round(axes.get_position().y0, 6) for axes in figure.axes}
    assert len(rows) == -(-count // 3)
    inside(figure)


def test_shelves_are_titled_rows() -> None:
    shelves = [Shelf(f"layer-{number}", pictures(3)) for number in range(3)]
    figure = shelves_figure(shelves)
    assert len(shown(figure)) == 9
    assert [text.get_text() for text in figure.texts] == ["layer-0", "layer-1", "layer-2"]
    columns = {round(axes.get_position().x0, 6) for axes in figure.axes}
    assert len(columns) == 3
    inside(figure)


def test_a_shelf_with_fewer_pictures_leaves_room() -> None:
    figure = shelves_figure([Shelf("layer-0", pictures(3)), Shelf("layer-1", pictures(1))])
    assert len(shown(figure)) == 4
    inside(figure)


NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
ONE = Classes((("MNIST", tuple("0123456789")),), labels=(3,), answers=(5,))
TWO = Classes((("MNIST", tuple("0123456789")), ("Fashion-MNIST", NAMES)), labels=(3, 13), answers=(5, 15))


@pytest.mark.parametrize("classes", [ONE, TWO], ids=["one task", "two"])
def test_who_pushed_an_answer(classes: Classes) -> None:
    count = len(classes.names)
    totals = tuple((-1.0) ** place * place for place in range(count))
    towards, against = Shelf("pushed towards 5", pictures(6)), Shelf("pushed towards 3", pictures(6))
    own = Picture(image(255), "MNIST\ntest image 18\nlabel 3\nanswer 5")
    figure = push_figure(own, towards, against, classes, totals, 0.75)
    assert len(shown(figure)) == 13
    assert shown(figure)[0][1] == own.caption
    (chart,) = [axes for axes in figure.axes if not axes.images]
    bars = chart.patches
    assert [bar.get_height() for bar in bars] == [*totals, 0.75]
    assert [label.get_text() for label in chart.get_xticklabels()] == [*classes.names, "initial"]
    colours = [to_hex(bar.get_facecolor()) for bar in bars]
    assert {place for place, colour in enumerate(colours) if colour == ANSWER} == set(classes.answers)
    assert {place for place, colour in enumerate(colours) if colour == LABEL} == set(classes.labels)
    assert [text.get_text() for text in figure.texts] == ["pushed towards 5", "pushed towards 3"]
    inside(figure)
