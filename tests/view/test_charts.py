"""Charts over classes and over time: what is drawn are the numbers, in the colours of label and answer."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dualform.view.charts import (
    TASKS,
    Bar,
    Classes,
    ClassPanel,
    bars_figure,
    scores_figure,
    short,
    timeline_figure,
    totals_figure,
)
from dualform.view.figures import ANSWER, LABEL

DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
ONE = Classes((("MNIST", DIGITS),), labels=(6,), answers=(4,))
TWO = Classes((("MNIST", DIGITS), ("Fashion-MNIST", CLOTHES)), labels=(19,), answers=(9, 19))
LAYERS = ("layer-0", "layer-1", "layer-2")


def texts(figure: Figure) -> str:
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return "\n".join(found)


def legend(figure: Figure) -> dict[str, str]:
    """What colours mean, by the legends of a figure and its axes."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    (one,) = legends
    return {
        text.get_text(): to_hex(patch.get_facecolor())
        for text, patch in zip(one.get_texts(), one.get_patches(), strict=True)
    }


def inside(figure: Figure) -> None:
    """Nothing is cut off at the edge, and no two panels are on top of each other."""
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    edge = figure.bbox.padded(1)
    for box in (*boxes, *(text.get_window_extent() for text in figure.texts)):
        assert edge.contains(box.x0, box.y0) and edge.contains(box.x1, box.y1), (box, figure.bbox)
    assert not any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2))


def panels(count: int, longest: int) -> list[ClassPanel]:
    """Descending scores of every class, of some fewer."""
    values = [tuple(1000.0 / (1 + place) - at for at in range(longest - place % 3)) for place in range(count)]
    return [ClassPanel(layer, tuple(values)) for layer in LAYERS]


@pytest.mark.parametrize("classes", [ONE, TWO], ids=["one task", "two"])
def test_scores_descend_within_the_place_of_their_class(classes: Classes) -> None:
    count = len(classes.names)
    given = panels(count, 7)
    figure = scores_figure(classes, given)
    assert len(figure.axes) == 3
    for axes, panel in zip(figure.axes, given, strict=True):
        assert axes.get_title(loc="left") == panel.title
        assert axes.get_xlim() == (0, count)
        assert len(axes.collections) == count
        for place, (area, scores) in enumerate(zip(axes.collections, panel.values, strict=True)):
            (path,) = area.get_paths()
            tops = {round(x, 9): max(y for z, y in path.vertices if z == x) for x, _ in path.vertices}
            assert [tops[x] for x in sorted(tops)] == pytest.approx(list(scores))
            assert place < min(tops) and max(tops) < place + 1
            assert to_hex(area.get_facecolor()[0]) == classes.colour(place)
    # A class with fewer events ends earlier; it is not stretched.
    widths = [area.get_paths()[0].get_extents().width for area in figure.axes[0].collections]
    assert widths[2] < widths[1] < widths[0]
    inside(figure)


def test_a_class_without_events_is_a_gap() -> None:
    given = ClassPanel("layer-0", ((), (3.0, 1.0), *[()] * 8))
    figure = scores_figure(ONE, [given])
    inside(figure)
    inside(scores_figure(ONE, [ClassPanel("layer-0", ((),) * 10)]))


@pytest.mark.parametrize("classes", [ONE, TWO], ids=["one task", "two"])
def test_totals_are_one_bar_a_class(classes: Classes) -> None:
    totals = tuple((float(place**3 - 50),) for place in range(len(classes.names)))
    figure = totals_figure(classes, [ClassPanel(layer, totals) for layer in LAYERS], "Σ |score|")
    for axes in figure.axes:
        bars = [patch for patch in axes.patches if patch.get_width() < 1]
        assert [bar.get_height() for bar in bars] == [total for (total,) in totals]
        assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx(
            [place + 0.5 for place in range(len(totals))]
        )
        assert [to_hex(bar.get_facecolor()) for bar in bars] == [classes.colour(place) for place in range(len(totals))]
        assert axes.get_ylabel() == "Σ |score|"
    inside(figure)


def test_classes_are_named_below_and_tasks_above() -> None:
    figure = totals_figure(TWO, panels(20, 1))
    written = texts(figure)
    for name in (*CLOTHES, *DIGITS, "MNIST", "Fashion-MNIST", *LAYERS):
        assert name in written.splitlines(), name
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == [*DIGITS, *CLOTHES]
    single = texts(totals_figure(ONE, panels(10, 1)))
    assert "class" in single.splitlines()
    assert "MNIST" not in single


def test_label_and_answer_have_their_colours() -> None:
    assert [ONE.colour(place) for place in (4, 6, 0)] == [ANSWER, LABEL, TASKS[1]]
    wrong = Classes(TWO.tasks, labels=(13,), answers=(2, 12))
    colours = [wrong.colour(place) for place in range(20)]
    assert [place for place, colour in enumerate(colours) if colour == ANSWER] == [2, 12]
    assert [place for place, colour in enumerate(colours) if colour == LABEL] == [13]
    assert {colours[place] for place in (0, 9)} == {TASKS[0]}
    assert {colours[place] for place in (10, 19)} == {TASKS[1]}
    # An answer that is the label is the answer.
    assert TWO.colour(19) == ANSWER
    assert wrong.borders == [0, 10, 20]


def test_the_legend_says_whether_the_answer_is_the_label() -> None:
    assert legend(totals_figure(ONE, panels(10, 1))) == {"label": LABEL, "answer": ANSWER}
    right = Classes(ONE.tasks, labels=(6,), answers=(6,))
    assert legend(scores_figure(right, panels(10, 3))) == {"label and answer": ANSWER}


@pytest.mark.parametrize(("steps", "counts"), [(3000, tuple(range(30))), (3, (128, 128, 128)), (90, (0,) * 30)])
def test_the_timeline_counts_events_by_stretches_of_training(steps: int, counts: tuple[int, ...]) -> None:
    figure = timeline_figure(steps, [("layer-1", counts), ("layer-2", counts[::-1])])
    for axes, expected in zip(figure.axes, (counts, counts[::-1]), strict=True):
        assert [bar.get_height() for bar in axes.patches] == list(expected)
        middles = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
        assert middles == pytest.approx([(at + 0.5) * steps / len(counts) for at in range(len(counts))])
        assert axes.get_xlim() == (0, steps)
        (line,) = axes.lines
        assert list(line.get_ydata()) == pytest.approx([sum(counts) / len(counts)] * 2)
    assert figure.axes[-1].get_xlabel() == "training step"


def test_the_timeline_of_the_papers_steps_is_inside_the_figure() -> None:
    inside(timeline_figure(3000, [("layer-1", (5,) * 30), ("layer-2", (5,) * 30)]))


def test_bars_have_a_length_a_deviation_and_a_number() -> None:
    bars = [
        Bar("after step 6,000", (45.2, 84.6), (3.0, 0.0)),
        Bar("without Fashion-MNIST", (96.4, 8.0), (0.4, 2.0), apart=True),
        Bar("in layer-0 alone", (100.0, 0.0), (0.0, 0.0)),
    ]
    figure = bars_figure(["MNIST", "Fashion-MNIST"], bars, "test accuracy, %")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [45.2, 84.6, 96.4, 8.0, 100.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["45", "85", "96", "8", "100", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [bar.title for bar in bars]
    assert legend(figure) == {"MNIST": ANSWER, "Fashion-MNIST": LABEL}
    assert len(axes.containers) == 6 + 3  # bars and the deviations that are not zero
    tops = [bar.get_y() for bar in axes.patches]
    assert tops == sorted(tops)
    assert tops[2] - tops[0] > tops[4] - tops[2]
    inside(figure)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00025, "0.00025"),
        (2.5, "2.5"),
        (-7.0, "−7"),
        (999.0, "999"),
        (1000.0, "1k"),
        (1500.0, "1.5k"),
        (-40_000.0, "−40k"),
        (999_000.0, "999k"),
        (1_000_000.0, "1M"),
        (3.2e7, "32M"),
        (2.5e9, "2.5G"),
        (7.5e11, "750G"),
    ],
)
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    "value",
    [12345.678, 0.001, 99.96, 999.9, 999_900.0, 9.999e8, -999.96],
)
def test_numbers_of_an_axis_need_no_exponent(value: float) -> None:
    found = short(value).replace("−", "-")
    size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(found[-1], 1.0)
    assert float(found.rstrip("kMG")) * size == pytest.approx(value, rel=6e-3)
    assert "e" not in found
    assert len(found) <= 6
