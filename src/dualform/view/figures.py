"""Figures as PNG, SVG or PDF files, drawn without matplotlib's global state, so that they can be made anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from dualform.errors import BadCall, MissingExtra
from dualform.view.panels import Exhibit, Panel

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ModuleNotFoundError as error:
    message = "Figures need matplotlib, which is not installed: pip install 'dualform[plot]'"
    raise MissingExtra(message) from error

# Okabe and Ito's blue and orange, which differ for colour-blind eyes too.
ANSWER, LABEL, OTHER = "#0072b2", "#e69f00", "#c4c4c4"
INK, FRAME, RULE = "#222222", "#bbbbbb", "#e6e6e6"

# Inches, from the left and from the top; at this density a figure with three matches a line is 1,200 pixels wide.
DOTS_PER_INCH = 150
TOP, ROW, BOTTOM = 0.95, 1.72, 0.2
IMAGES, CHART_WIDTH = 1.95, 2.0
SIZE, GAP = 1.05, 0.12
COLUMNS = 5
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Layout:
    """Where things go: `columns` matches side by side, in `lines` lines a layer."""

    columns: int
    lines: int

    @classmethod
    def of(cls, exhibit: Exhibit) -> Layout:
        """The layout for the longest panel; a layer of few matches leaves room."""
        most = max(len(panel.matches) for panel in exhibit.panels)
        # The title above the matches is as wide as three of them.
        return cls(max(3, min(COLUMNS, most)), max(1, -(-most // COLUMNS)))

    @property
    def charts(self) -> float:
        """The left edge of the charts: beside the matches there is room for the numbers of an axis."""
        return IMAGES + self.columns * (SIZE + GAP) + 0.4

    @property
    def width(self) -> float:
        """The width of the figure."""
        return self.charts + CHART_WIDTH + 0.14

    @property
    def row(self) -> float:
        """The height of a layer; one of several lines stands apart from the next."""
        return self.lines * ROW + (0.25 if self.lines > 1 else 0.0)

    @property
    def height(self) -> float:
        """The height of a layer's pictures, without the caption of the last line."""
        return (self.lines - 1) * ROW + SIZE


def spotlight_figure(exhibit: Exhibit) -> Figure:
    """Draw the test image, and beside it a row for every layer: its best matches and its class totals."""
    layout = Layout.of(exhibit)
    figure = Figure(figsize=(layout.width, TOP + layout.row * len(exhibit.panels) + BOTTOM), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    _write(figure, exhibit.verdict, layout.width / 2, 0.25, size=12.0)
    _draw_test_image(figure, exhibit, layout)
    _write(figure, exhibit.matches_title, (IMAGES + layout.charts - 0.4 - GAP) / 2, 0.72, size=9.0)
    _write(figure, exhibit.shares_title, layout.charts + CHART_WIDTH / 2, 0.72, size=9.0)
    highest = max(panel.shares.max().item() for panel in exhibit.panels) or 1.0
    for row, panel in enumerate(exhibit.panels):
        top = TOP + row * layout.row
        _draw_matches(figure, panel, top, layout)
        axes = _place(figure, layout.charts, top, CHART_WIDTH, layout.height)
        _draw_shares(axes, exhibit, panel, highest)
    _draw_legend(figure, exhibit, layout)
    return figure


def check_format(path: Path) -> None:
    """BadCall for a file name whose ending names no format of ours."""
    if path.suffix.lower() not in FORMATS:
        raise BadCall(
            f"a figure is saved as {', '.join(FORMATS)}, by the file's ending; {path.name!r} has none of them."
        )


def save(figure: Figure, path: Path) -> Path:
    """Write the figure, in the format that the file's ending names, and return its path."""
    check_format(path)
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)
    return path


def _draw_test_image(figure: Figure, exhibit: Exhibit, layout: Layout) -> None:
    size = 1.4
    middle = TOP + layout.row * (len(exhibit.panels) - 1) / 2 + layout.height / 2
    axes = _place(figure, 0.15, middle - size / 2, size, size)
    _draw_pixels(axes, exhibit.image)
    axes.set_title(exhibit.title, fontsize=9, color=INK)
    label = "" if exhibit.label is None else f"label {exhibit.label}\n"
    axes.set_xlabel(f"{label}answer {exhibit.answer} ({exhibit.certainty})", fontsize=9, color=INK, labelpad=5)


def _draw_matches(figure: Figure, panel: Panel, top: float, layout: Layout) -> None:
    _write(figure, panel.layer, IMAGES - 0.14, top + layout.height / 2, size=10.0, rotation=90, weight="bold")
    for number, match in enumerate(panel.matches):
        line, column = divmod(number, layout.columns)
        axes = _place(figure, IMAGES + column * (SIZE + GAP), top + line * ROW, SIZE, SIZE)
        _draw_pixels(axes, match.image)
        axes.set_xlabel(match.caption, fontsize=7.5, color=INK, labelpad=3)


def _draw_shares(axes: Axes, exhibit: Exhibit, panel: Panel, highest: float) -> None:
    colours = {exhibit.label: LABEL, exhibit.answer: ANSWER}
    filled = [colours.get(name, OTHER) for name in exhibit.class_names]
    axes.bar(exhibit.class_names, panel.shares.numpy(), color=filled, width=0.75)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if exhibit.signed:
        axes.axhline(0, color=FRAME, linewidth=0.8)
    else:
        # One scale for all layers, so that their bars can be compared.
        axes.set_ylim(0, highest * 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    if max(map(len, exhibit.class_names)) > 2:
        axes.tick_params(axis="x", labelsize=6.5, rotation=90)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)


def _draw_legend(figure: Figure, exhibit: Exhibit, layout: Layout) -> None:
    meanings = {"label": LABEL, "answer": ANSWER}
    if exhibit.label is None:
        meanings = {"answer": ANSWER}
    elif exhibit.label == exhibit.answer:
        meanings = {"label and answer": ANSWER}
    handles = [Patch(color=colour, label=name) for name, colour in meanings.items()]
    x, y = (layout.charts + CHART_WIDTH / 2) / layout.width, 0.12 / figure.get_figheight()
    style: dict[str, Any] = {"ncols": 2, "fontsize": 8, "frameon": False, "labelcolor": INK}
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(x, y), **style)


def _draw_pixels(axes: Axes, image: UInt8[Tensor, "height width"]) -> None:
    axes.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def _write(figure: Figure, text: str, left: float, top: float, *, size: float, **style: Any) -> None:
    x, y = left / figure.get_figwidth(), 1 - top / figure.get_figheight()
    figure.text(x, y, text, fontsize=size, color=INK, ha="center", va="center", **style)
