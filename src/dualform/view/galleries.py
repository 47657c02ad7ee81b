"""Galleries of images: test images, the best matches of every layer, and who pushed an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from dualform.view.charts import COLUMN, TEXT, Classes, short
from dualform.view.figures import FRAME, INK, RULE

SIZE, GAP = 0.82, 0.16
LINE = 0.125  # of a caption


@dataclass(frozen=True, eq=False)
class Picture:
    """An image with a caption of a few short lines."""

    image: UInt8[Tensor, "height width"]
    caption: str

    @property
    def below(self) -> float:
        """The room for the caption."""
        return 0.1 + LINE * (1 + self.caption.count("\n"))


@dataclass(frozen=True, eq=False)
class Shelf:
    """A titled row of pictures."""

    title: str
    pictures: tuple[Picture, ...]


def inputs_figure(pictures: Sequence[Picture]) -> Figure:
    """Test images side by side, three in a row."""
    columns = min(3, len(pictures))
    rows = -(-len(pictures) // columns)
    height, pitch = SIZE + max(picture.below for picture in pictures), SIZE + 2 * GAP
    figure = _figure(columns * pitch, rows * height + 0.06)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        _hang(figure, picture, GAP + column * pitch, 0.06 + row * height)
    return figure


def shelves_figure(shelves: Sequence[Shelf]) -> Figure:
    """A row of pictures for every shelf, its title on the left."""
    left = 0.34
    widest = max(len(shelf.pictures) for shelf in shelves)
    height = SIZE + max(picture.below for shelf in shelves for picture in shelf.pictures)
    figure = _figure(left + widest * (SIZE + GAP), len(shelves) * height + 0.06)
    for row, shelf in enumerate(shelves):
        top = 0.06 + row * height
        _write(figure, shelf.title, 0.16, top + SIZE / 2, rotation=90.0)
        for column, picture in enumerate(shelf.pictures):
            _hang(figure, picture, left + column * (SIZE + GAP), top)
    return figure


def push_figure(
    picture: Picture, towards: Shelf, against: Shelf, classes: Classes, totals: Sequence[float], initial: float
) -> Figure:
    """A misclassified image, who pushed towards the answer and who against it, and what every class adds."""
    size, left = 0.7, 1.3
    columns = max(len(towards.pictures), len(against.pictures), 1)
    width = max(left + columns * (size + 0.2) + 0.1, 2 * COLUMN)
    names = (*classes.names, "initial")
    foot = 0.3 if max(map(len, classes.names)) <= 2 else 0.12 + 0.069 * max(map(len, names))
    shelf = size + 0.2 + max(found.below for one in (towards, against) for found in one.pictures)
    top_of_bars = 2 * shelf + 0.12
    figure = _figure(width, top_of_bars + 0.95 + foot)
    _hang(figure, picture, 0.15, shelf - 0.55, 0.9)
    for row, one in enumerate((towards, against)):
        top = row * shelf
        _write(figure, one.title, left, top + 0.1, ha="left")
        for column, found in enumerate(one.pictures):
            _hang(figure, found, left + column * (size + 0.2), top + 0.2, size)
    axes = figure.add_axes(
        (0.52 / width, foot / figure.get_figheight(), (width - 0.62) / width, 0.8 / figure.get_figheight())
    )
    colours = [classes.colour(place) for place in range(len(classes.names))]
    axes.bar(range(len(names)), [*totals, initial], color=[*colours, "#ffffff"], edgecolor=[*colours, INK], width=0.76)
    axes.axhline(0, color=FRAME, linewidth=0.8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xticks(range(len(names)), names)
    if max(map(len, classes.names)) > 2:
        axes.tick_params(axis="x", rotation=90)
    axes.set_title("what every class adds to (answer − label)", fontsize=TEXT, color=INK, loc="left", pad=2.5)
    axes.tick_params(labelsize=TEXT - 0.5, length=0, pad=2, colors=INK)
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=200)
    FigureCanvasAgg(figure)
    return figure


def _hang(figure: Figure, picture: Picture, left: float, top: float, size: float = SIZE) -> Axes:
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 1 - (top + size) / height, size / width, size / height))
    axes.imshow(picture.image.numpy(), cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(FRAME)
        spine.set_linewidth(0.6)
    axes.set_xlabel(picture.caption, fontsize=TEXT - 0.7, color=INK, labelpad=2, linespacing=1.15)
    return axes


def _write(figure: Figure, text: str, left: float, top: float, *, ha: str = "center", rotation: float = 0.0) -> None:
    x, y = left / figure.get_figwidth(), 1 - top / figure.get_figheight()
    figure.text(x, y, text, fontsize=TEXT, color=INK, ha=ha, va="center", rotation=rotation)
