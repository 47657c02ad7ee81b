"""The page of a report: whatever is put on it is shown as it is, and nothing of it comes from elsewhere."""

import base64
import io
import re
from html import unescape
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from dualform.view.page import DOTS, Page, save_both


def drawn() -> Figure:
    figure = Figure(figsize=(3.35, 2.0))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.bar(["T-shirt", "bag"], [1.0, 2.0])
    axes.fill_between([0, 1], [0, 1])
    return figure


def test_what_looks_like_html_is_text() -> None:
    nasty = '<script>alert("1 & 2")</script>'
    page = Page(nasty)
    page.section(nasty, 'a"b')
    page.heading(nasty)
    page.text(nasty, "second")
    page.contents()
    page.table([nasty], [[nasty]], nasty)
    page.figures((b"png", (1.0, 1.0), nasty))
    html = page.html()
    assert "<script" not in html
    assert unescape(html).count(nasty) >= 9
    assert "a&quot;b" in html


def test_contents_link_to_every_section_wherever_they_stand() -> None:
    page = Page("Title")
    page.contents()
    page.section("First", "one")
    page.section("Second", "two")
    html = page.html()
    links = re.findall(r'<a href="#(\w+)">(\w+)</a>', html)
    assert links == [("one", "First"), ("two", "Second")]
    assert re.findall(r'<h2 id="(\w+)">', html) == ["one", "two"]
    assert html.index("href") < html.index("<h2")


def test_tables_have_a_head_and_say_what_they_are() -> None:
    page = Page("Title")
    page.table(["layer", "here"], [["fc0", "1.0 ± 0.5"], ["fc1", "–"]], "What it is.")
    html = page.html()
    assert re.findall(r'<th scope="col">(.*?)</th>', html) == ["layer", "here"]
    assert re.findall(r"<td>(.*?)</td>", html) == ["fc0", "1.0 ± 0.5", "fc1", "–"]
    assert "What it is." in html


def test_figures_are_inside_the_page(tmp_path: Path) -> None:
    page, figure = Page("Title"), drawn()
    png = save_both(figure, tmp_path / "figure-04")
    page.figures((png, (3.35, 2.0), "What it shows."), (png, (3.35, 2.0), "Again."))
    html = page.html()
    sources = re.findall(r'src="data:image/png;base64,(.*?)"', html)
    assert [base64.b64decode(source) for source in sources] == [png, png]
    assert re.findall(r'alt="(.*?)"', html) == re.findall(r"<figcaption>(.*?)</figcaption>", html)
    with Image.open(io.BytesIO(png)) as opened:
        assert opened.size == pytest.approx((3.35 * DOTS, 2.0 * DOTS), abs=1)


def test_a_figure_is_saved_as_png_and_svg_whatever_its_name(tmp_path: Path) -> None:
    save_both(drawn(), tmp_path / "push-single-mnist-18")
    assert {file.name for file in tmp_path.iterdir()} == {"push-single-mnist-18.png", "push-single-mnist-18.svg"}


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    one, other = (save_both(drawn(), tmp_path / name) for name in ("one", "other"))
    assert one == other
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
