"""Charts over classes and over time, as wide as a column of a paper: a panel for every layer, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dualform.view.figures import ANSWER, FRAME, INK, LABEL, RULE

COLUMN = 3.35  # inches, as in the paper's two columns
PANEL, HEAD, FOOT = 0.98, 0.30, 0.34
TEXT = 7.8  # points
TASKS = ("#8f8f8f", "#c6c6c6")  # two greys that print apart
SHADES = (ANSWER, LABEL)


@dataclass(frozen=True)
class Classes:
    """The classes along an axis, by task, and which of them is the label and which the model's answer.

    `tasks` are titles with the names of their classes; labels and answers are places among all classes.
    """

    tasks: tuple[tuple[str, tuple[str, ...]], ...]
    labels: tuple[int, ...]
    answers: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all classes, one task after the other."""
        return tuple(name for _, names in self.tasks for name in names)

    @property
    def borders(self) -> list[int]:
        """Where each task's classes begin, and where the last one's end."""
        found = [0]
        for _, names in self.tasks:
            found.append(found[-1] + len(names))
        return found

    def colour(self, place: int) -> str:
        """The colour of a class: orange for the label, blue for the answer, else its task's grey."""
        if place in self.answers:
            return ANSWER
        if place in self.labels:
            return LABEL
        task = next(number for number, end in enumerate(self.borders[1:]) if place < end)
        return TASKS[task % 2] if len(self.tasks) > 1 else TASKS[1]

    @property
    def legend(self) -> list[Patch]:
        """What the colours mean."""
        if set(self.labels) & set(self.answers):
            return [Patch(color=ANSWER, label="label and answer")]
        return [Patch(color=LABEL, label="label"), Patch(color=ANSWER, label="answer")]


@dataclass(frozen=True)
class ClassPanel:
    """One layer: for every class its best scores in descending order, or one total."""

    title: str
    values: tuple[tuple[float, ...], ...]


def scores_figure(classes: Classes, panels: Sequence[ClassPanel], measure: str = "score") -> Figure:
    """The best scores of every class in descending order, the x-axis partitioned by class."""
    figure, axes = _stacked(classes, panels, measure)
    for panel, one in zip(panels, axes, strict=True):
        for place, scores in enumerate(panel.values):
            # A class has as much room as any other; those of fewer events end earlier.
            longest = max(len(values) for values in panel.values)
            x = [place + (number + 0.5) / max(longest, 1) * 0.92 + 0.04 for number in range(len(scores))]
            one.fill_between(x, 0, scores, color=classes.colour(place), linewidth=0)
    return figure


def totals_figure(classes: Classes, panels: Sequence[ClassPanel], measure: str = "total score") -> Figure:
    """One bar a class."""
    figure, axes = _stacked(classes, panels, measure)
    for panel, one in zip(panels, axes, strict=True):
        heights = [sum(values) for values in panel.values]
        places = [place + 0.5 for place in range(len(heights))]
        one.bar(places, heights, width=0.76, color=[classes.colour(place) for place in range(len(heights))])
        one.axhline(0, color=FRAME, linewidth=0.6)
    return figure


def timeline_figure(steps: int, panels: Sequence[tuple[str, tuple[int, ...]]]) -> Figure:
    """How many of the best events fall into stretches of training; dashed, if they were spread evenly."""
    figure = _figure(COLUMN, PANEL * len(panels) + 0.4)
    axes = _rows(figure, len(panels), 0.36, right=0.2)
    for (title, counts), one in zip(panels, axes, strict=True):
        width = steps / max(len(counts), 1)
        one.bar([(number + 0.5) * width for number in range(len(counts))], counts, width=0.9 * width, color=ANSWER)
        one.axhline(sum(counts) / max(len(counts), 1), color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
        one.set_xlim(0, steps)
        _dress(one, title, "events")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes[-1].tick_params(axis="x", labelbottom=True)
    axes[-1].set_xlabel("training step", fontsize=TEXT, color=INK, labelpad=2)
    return figure


@dataclass(frozen=True)
class Bar:
    """A line of a bar chart: for each of some measures a mean and a deviation; `apart` sets it off from the last."""

    title: str
    values: tuple[float, ...]
    deviations: tuple[float, ...]
    apart: bool = False


def bars_figure(measures: Sequence[str], bars: Sequence[Bar], unit: str) -> Figure:
    """Lines of bars, a bar for each measure, with what they deviate and the number behind each."""
    line = 0.125 * len(measures) + 0.07
    gap = 0.1
    height = 0.32 + sum(line + gap * bar.apart for bar in bars) + 0.36
    figure = _figure(COLUMN, height)
    left = 1.32
    axes = figure.add_axes((left / COLUMN, 0.36 / height, (COLUMN - left - 0.12) / COLUMN, 1 - 0.68 / height))
    y, places = 0.0, []
    for bar in bars:
        y += gap if bar.apart else 0.0
        places.append(y + 0.125 * len(measures) / 2)
        for number, (value, deviation) in enumerate(zip(bar.values, bar.deviations, strict=True)):
            middle = y + 0.125 * (number + 0.5)
            axes.barh(middle, value, height=0.112, color=SHADES[number % 2])
            if deviation > 0:
                axes.errorbar(value, middle, xerr=deviation, color=INK, linewidth=0.7, capsize=1.5)
            axes.text(value + deviation + 1.2, middle, f"{value:.0f}", fontsize=6, va="center", color=INK)
        y += line
    axes.set_ylim(y, 0)
    axes.set_xlim(0, 112)
    axes.set_xticks([0, 20, 40, 60, 80, 100])
    axes.set_yticks(places, [bar.title for bar in bars])
    axes.set_xlabel(unit, fontsize=TEXT, color=INK, labelpad=2)
    axes.tick_params(labelsize=TEXT - 0.5, length=0, colors=INK)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(FRAME)
    handles = [Patch(color=SHADES[number % 2], label=name) for number, name in enumerate(measures)]
    _legend(figure, handles)
    return figure


def _stacked(classes: Classes, panels: Sequence[ClassPanel], measure: str) -> tuple[Figure, list[Axes]]:
    """Panels with the classes along the x-axis, named below the last one."""
    longest = max(map(len, classes.names))
    foot = FOOT if longest <= 2 else 0.1 + 0.066 * longest
    head = HEAD if len(classes.tasks) > 1 else 0.12
    figure = _figure(COLUMN, head - 0.04 + PANEL * len(panels) + foot)
    axes = _rows(figure, len(panels), foot)
    for panel, one in zip(panels, axes, strict=True):
        one.set_xlim(0, len(classes.names))
        _dress(one, panel.title, measure)
        for border in classes.borders[1:-1]:
            one.axvline(border, color=INK, linewidth=0.7, linestyle=(0, (3, 2)))
    last = axes[-1]
    last.set_xticks([place + 0.5 for place in range(len(classes.names))], classes.names)
    last.tick_params(axis="x", labelbottom=True, rotation=0 if longest <= 2 else 90, labelsize=TEXT - 0.5)
    if len(classes.tasks) > 1:
        for (title, _), begin, end in zip(classes.tasks, classes.borders, classes.borders[1:], strict=False):
            x = (begin + end) / 2 / len(classes.names)
            axes[0].text(x, 1.2, title, transform=axes[0].transAxes, fontsize=TEXT, ha="center", color=INK)
    else:
        last.set_xlabel("class", fontsize=TEXT, color=INK, labelpad=1)
    _legend(figure, classes.legend, on=axes[0])
    return figure, axes


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=200)
    FigureCanvasAgg(figure)
    return figure


def _rows(figure: Figure, rows: int, foot: float, right: float = 0.06) -> list[Axes]:
    """Axes one above the other, above a foot of so many inches."""
    width, height = figure.get_size_inches()
    left, gap = 0.52, 0.22
    found = []
    for row in range(rows):
        bottom = foot + (rows - 1 - row) * PANEL
        box = (left / width, bottom / height, (width - left - right) / width, (PANEL - gap) / height)
        found.append(figure.add_axes(box))
        found[-1].tick_params(axis="x", labelbottom=False)
    return found


def _dress(axes: Axes, title: str, measure: str) -> None:
    axes.set_title(title, fontsize=TEXT, color=INK, loc="left", pad=2.5)
    axes.set_ylabel(measure, fontsize=TEXT, color=INK, labelpad=2)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.tick_params(labelsize=TEXT - 0.5, length=0, pad=2, colors=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)


def _legend(figure: Figure, handles: list[Patch], on: Axes | None = None) -> None:
    where = figure if on is None else on
    anchor = (0.99, 0.995) if on is None else (1.0, 1.02)
    where.legend(
        handles=handles,
        loc="upper right" if on is None else "lower right",
        bbox_to_anchor=anchor,
        ncols=2,
        fontsize=TEXT - 0.5,
        frameon=False,
        labelcolor=INK,
        handlelength=0.9,
        handleheight=0.8,
        handletextpad=0.4,
        columnspacing=1.0,
        borderpad=0,
        borderaxespad=0,
    )


def short(value: float) -> str:
    """A number of three digits for an axis, with thousands and more as a letter.

    >>> short(0.0), short(2.5), short(1500.0), short(-40000.0), short(999.9), short(3.2e7)
    ('0', '2.5', '1.5k', '−40k', '1k', '32M')
    """
    value = float(f"{value:.3g}")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")
