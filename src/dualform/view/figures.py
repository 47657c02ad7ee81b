"""Figures as PNG files, drawn without matplotlib's global state, so that they can be made anywhere."""

from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from dualform.errors import MissingExtra
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

# Inches, from the left and from the top; at this density the figure is 1,200 pixels wide.
DOTS_PER_INCH = 150
WIDTH, TOP, ROW, BOTTOM = 8.0, 0.95, 1.72, 0.2
IMAGES, CHARTS, CHART_WIDTH = 1.95, 5.86, 2.0
SIZE, GAP = 1.05, 0.12


def spotlight_figure(exhibit: Exhibit) -> Figure:
    """Draw the test image, and beside it a row for every layer: its best matches and its class totals."""
    figure = Figure(figsize=(WIDTH, TOP + ROW * len(exhibit.panels) + BOTTOM), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    _write(figure, exhibit.verdict, WIDTH / 2, 0.25, size=12.0)
    _draw_test_image(figure, exhibit)
    _write(figure, "best matches in training", IMAGES + 1.5 * SIZE + GAP, 0.72, size=9.0)
    _write(figure, "share of all attention, by class", CHARTS + CHART_WIDTH / 2, 0.72, size=9.0)
    highest = max(panel.shares.max().item() for panel in exhibit.panels)
    for row, panel in enumerate(exhibit.panels):
        top = TOP + row * ROW
        _draw_matches(figure, panel, top)
        _draw_shares(_place(figure, CHARTS, top, CHART_WIDTH, SIZE), exhibit, panel, highest)
    _draw_legend(figure, exhibit)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG and return its path."""
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
    return path


def _draw_test_image(figure: Figure, exhibit: Exhibit) -> None:
    size = 1.4
    middle = TOP + (ROW * (len(exhibit.panels) - 1) + SIZE) / 2
    axes = _place(figure, 0.15, middle - size / 2, size, size)
    _draw_pixels(axes, exhibit.image)
    axes.set_title(exhibit.title, fontsize=9, color=INK)
    answer = f"label {exhibit.label}\nanswer {exhibit.answer} ({exhibit.certainty})"
    axes.set_xlabel(answer, fontsize=9, color=INK, labelpad=5)


def _draw_matches(figure: Figure, panel: Panel, top: float) -> None:
    pitch = min(SIZE + GAP, (CHARTS - IMAGES) / max(3, len(panel.matches)))
    _write(figure, panel.layer, IMAGES - 0.14, top + SIZE / 2, size=10.0, rotation=90, weight="bold")
    for column, match in enumerate(panel.matches):
        axes = _place(figure, IMAGES + column * pitch, top, pitch - GAP, SIZE)
        _draw_pixels(axes, match.image)
        caption = f"label {match.label}\nscore {match.score:,.4g}\nstep {match.step:,}"
        axes.set_xlabel(caption, fontsize=7.5, color=INK, labelpad=3)


def _draw_shares(axes: Axes, exhibit: Exhibit, panel: Panel, highest: float) -> None:
    colours = {exhibit.label: LABEL, exhibit.answer: ANSWER}
    filled = [colours.get(name, OTHER) for name in exhibit.class_names]
    axes.bar(exhibit.class_names, panel.shares.numpy(), color=filled, width=0.75)
    # One scale for all layers, so that their bars can be compared.
    axes.set_ylim(0, highest * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)


def _draw_legend(figure: Figure, exhibit: Exhibit) -> None:
    meanings = {"label": LABEL, "answer": ANSWER}
    if exhibit.label == exhibit.answer:
        meanings = {"label and answer": ANSWER}
    handles = [Patch(color=colour, label=name) for name, colour in meanings.items()]
    x, y = (CHARTS + CHART_WIDTH / 2) / WIDTH, 0.12 / figure.get_figheight()
    style: dict[str, Any] = {"ncols": 2, "fontsize": 8, "frameon": False, "labelcolor": INK}
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(x, y), **style)


def _draw_pixels(axes: Axes, image: UInt8[Tensor, "height width"]) -> None:
    axes.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    whole = figure.get_figheight()
    return figure.add_axes((left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole))


def _write(figure: Figure, text: str, left: float, top: float, *, size: float, **style: Any) -> None:
    x, y = left / WIDTH, 1 - top / figure.get_figheight()
    figure.text(x, y, text, fontsize=size, color=INK, ha="center", va="center", **style)
