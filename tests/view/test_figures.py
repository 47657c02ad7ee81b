"""Figures: legible, 1,200 pixels wide, nothing on top of anything else."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from matplotlib import image as images
from matplotlib.figure import Figure

from dualform.errors import BadCall
from dualform.view.figures import ANSWER, LABEL, save, spotlight_figure
from dualform.view.panels import Exhibit


def texts(figure: Figure) -> str:
    parts = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        parts += [axes.get_title(), axes.get_xlabel()]
    return "\n".join(parts)


def test_it_says_what_the_exhibit_says(exhibit: Exhibit) -> None:
    written = texts(spotlight_figure(exhibit))
    assert exhibit.verdict in written
    assert "test image 3" in written
    assert written.count("label dog\nscore 1,23") == 2
    assert "fc0" in written
    assert "fc1" in written


def test_bars_are_the_shares_with_label_and_answer_marked(exhibit: Exhibit) -> None:
    charts = [axes for axes in spotlight_figure(exhibit).axes if axes.patches]
    assert len(charts) == 2
    for chart in charts:
        assert [bar.get_height() for bar in chart.patches] == [0.25, 0.75]
        assert [bar.get_facecolor() for bar in chart.patches] == [_rgba(LABEL), _rgba(ANSWER)]


def test_saved_as_png_1200_pixels_wide(exhibit: Exhibit, tmp_path: Path) -> None:
    path = save(spotlight_figure(exhibit), tmp_path / "figure.png")
    assert images.imread(path).shape[1] == 1200


def test_nothing_overlaps(exhibit: Exhibit) -> None:
    panels = tuple(replace(panel, shares=torch.tensor([1e-3, 0.999])) for panel in exhibit.panels)
    figure = spotlight_figure(replace(exhibit, panels=panels * 2))
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2))


def test_many_matches_stand_in_lines_of_five(exhibit: Exhibit, tmp_path: Path) -> None:
    panels = tuple(replace(panel, matches=(panel.matches * 4)[:10]) for panel in exhibit.panels)
    figure = spotlight_figure(replace(exhibit, panels=panels, title="a title\nof two lines"))
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert len(boxes) == 1 + 2 * (10 + 1)
    assert not any(one.padded(-1).overlaps(other.padded(-1)) for one, other in combinations(boxes, 2))
    assert all(figure.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1) for box in boxes)


def test_an_image_without_a_label(exhibit: Exhibit) -> None:
    figure = spotlight_figure(replace(exhibit, label=None))
    assert "The model answers dog with probability 0.62.\n" in texts(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["answer"]


def test_sums_of_either_sign_have_their_own_scale(exhibit: Exhibit) -> None:
    panels = tuple(replace(panel, shares=torch.tensor([-0.5, 2.0])) for panel in exhibit.panels)
    charts = [axes for axes in spotlight_figure(replace(exhibit, panels=panels, signed=True)).axes if axes.patches]
    assert all(chart.get_ylim()[0] < -0.5 and chart.get_ylim()[1] > 2 for chart in charts)


def test_the_ending_of_the_file_is_the_format(exhibit: Exhibit, tmp_path: Path) -> None:
    figure = spotlight_figure(exhibit)
    for ending, start in {"svg": b"<?xml", "pdf": b"%PDF", "PNG": b"\x89PNG"}.items():
        assert save(figure, tmp_path / f"figure.{ending}").read_bytes().startswith(start)
    with pytest.raises(BadCall, match="'figure.gif' has none of them"):
        save(figure, tmp_path / "figure.gif")


def _rgba(colour: str) -> tuple[float, ...]:
    return (*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
