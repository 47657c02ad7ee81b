"""The report: one page that needs nothing else, with every figure and table, and the figures as files."""

import base64
import io
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny
from dualform.experiments.paper.drawing import class_lines, class_title, layer_title, mask_title
from dualform.experiments.paper.masks import Masked
from dualform.experiments.paper.report import Report
from dualform.experiments.recipes import recipe

VOID = {"meta", "img", "br", "hr", "link", "input"}


@dataclass
class Parsed(HTMLParser):
    """Tags that are all closed in their order, and what the page loads, links to and says."""

    open: list[str] = field(default_factory=list)
    images: list[dict[str, str | None]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    text: list[str] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.references += [found[name] or "" for name in ("src", "href", "srcset", "data", "action") if name in found]
        self.ids |= {found["id"] or ""} if "id" in found else set()
        if tag == "img":
            self.images.append(found)
        if tag == "table":
            self.tables.append([])
            self.titles.append(found.get("aria-label") or "")
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "figcaption":
            self.captions.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> while {self.open[-3:]} are open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "figcaption":
            self.captions[-1] += data

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def page(paper: Any) -> Parsed:
    parsed = Parsed()
    parsed.feed((paper.out / "report.html").read_text(encoding="utf-8"))
    parsed.close()
    return parsed


def figures(paper: Any) -> dict[str, Path]:
    return {file.stem: file for file in (paper.out / "figures").glob("*.png")}


def numbers() -> set[int]:
    """The numbers of the paper's figures that the small experiments have."""
    cases = [case for one in tiny.EXPERIMENTS.values() for case in one.showcases]
    return {3, 12} | {number for case in cases for number in (case.scores, case.totals, case.matches)}


def test_the_page_is_whole(page: Parsed) -> None:
    assert page.open == []
    assert page.ids == {"inputs", "single", "joint", "continual"}


def test_the_page_loads_nothing(page: Parsed, paper: Any) -> None:
    assert page.references
    for reference in page.references:
        assert reference.startswith("data:image/png;base64,") or reference[:1] == "#", reference[:80]
    assert {reference[1:] for reference in page.references if reference[0] == "#"} == page.ids
    html = (paper.out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe", html)


def test_every_figure_of_the_experiments_is_there(page: Parsed, paper: Any) -> None:
    shown = [int(found[1]) for text in page.captions if (found := re.match(r"Figure (\d+)\. ", text))]
    assert sorted(shown) == sorted(numbers())
    files = {int(found[1]) for name in figures(paper) if (found := re.match(r"figure-(\d+)-", name))}
    assert files == numbers()
    others = {name for name in figures(paper) if not name.startswith("figure-")}
    pushes = {
        f"push-{name}-{one.recipe.tasks[push.task].name}-{push.index}"
        for name, one in tiny.EXPERIMENTS.items()
        for push in paper.part(name, "pushes").images
    }
    assert others == pushes | {
        "time-single",
        "time-joint",
        "time-continual",
        "weighted-single-scores",
        "weighted-single-totals",
        "masks-continual",
    }


def test_every_image_says_what_it_shows_and_is_the_file(page: Parsed, paper: Any) -> None:
    embedded = set()
    for image in page.images:
        assert len(image["alt"] or "") > 30
        assert image["alt"] in page.captions
        png = base64.b64decode((image["src"] or "").partition(",")[2], validate=True)
        embedded.add(png)
        with Image.open(io.BytesIO(png)) as opened:
            width, height = opened.size
        assert width / height == pytest.approx(int(image["width"] or 0) / int(image["height"] or 0), rel=0.02)
    assert embedded == {file.read_bytes() for file in figures(paper).values()}
    assert len(page.images) == len(figures(paper))


def test_only_figures_of_an_earlier_report_are_removed(paper: Any, tmp_path: Path) -> None:
    listed = json.loads((paper.out / "results.json").read_text(encoding="utf-8"))["figures"]
    assert listed == sorted(figures(paper))
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("old.png", "old.svg", "mine.png"):
        (folder / name).write_bytes(b"")
    assert Report(tmp_path, {}).clear({"old", "gone"}) == []
    assert [file.name for file in folder.iterdir()] == ["mine.png"]


def test_figures_are_files_of_two_kinds_and_wide_enough_for_print(paper: Any) -> None:
    assert figures(paper)
    for name, file in figures(paper).items():
        with Image.open(file) as opened:
            opened.load()
            width, height = opened.size
            darkest, brightest = opened.convert("L").getextrema()
        # Inputs are as wide as there are images: one of them is 250 pixels.
        assert width > (240 if name.endswith("-inputs") else 600), name
        assert height > 200
        assert darkest < 100 < 250 < brightest, f"{name} is empty"
        drawing = file.with_suffix(".svg").read_text(encoding="utf-8")
        assert drawing.startswith("<?xml")
        assert drawing.rstrip().endswith("</svg>")
    assert {file.name for file in (paper.out / "figures").iterdir()} == {
        f"{name}.{ending}" for name in figures(paper) for ending in ("png", "svg")
    }


def table(page: Parsed, title: str, after: int = 0) -> list[list[str]]:
    """The rows of the table whose title begins like this, its head first."""
    return [rows for rows, text in zip(page.tables, page.titles, strict=True) if text.startswith(title)][after]


def test_table_1_beside_the_papers(page: Parsed, paper: Any) -> None:
    head, *rows = table(page, "How often, in per cent")
    assert head == ["layer", "wrong: true label", "paper", "wrong: answer", "paper", "right: label", "paper"]
    runs = [paper.raw("single", "votes", seed)["layers"] for seed in (0, 1)]
    for number, row in enumerate(rows):
        cells = [[run[f"fc{number}"][field] for run in runs] for field in ("target", "output", "right")]
        spreads = [f"{(one + other) / 2:.1f} ± {abs(one - other) / 2:.1f}" for one, other in cells]
        assert [row[0], *row[1::2]] == [f"layer-{number}", *spreads]
    assert [row[2::2] for row in rows] == [
        ["17.2 ± 2.7", "49.5 ± 1.5", "75.1 ± 0.0"],
        ["18.0 ± 2.9", "52.9 ± 2.9", "78.8 ± 0.8"],
        ["20.6 ± 2.6", "60.1 ± 4.5", "84.7 ± 1.1"],
    ]
    rows = table(page, "Table 1 again with signed")[1:]
    assert rows[0][1:] == ["0.0 ± 0.0", "100.0 ± 0.0", "100.0 ± 0.0"]
    assert "for 720 of 720 test images" in page.words


def test_accuracies_masks_and_certificates_are_tables(page: Parsed, paper: Any) -> None:
    accuracies = [table(page, "Test accuracy in per cent, mean", at) for at in range(3)]
    assert [[row[0] for row in rows[1:]] for rows in accuracies] == [["Upright"], *[["Upright", "Turned"]] * 2]
    one, other = (paper.raw("joint", "checks", seed)["accuracy"]["turned"] for seed in (0, 1))
    assert accuracies[1][2] == ["Turned", f"{(one + other) / 2:.1f} ± {abs(one - other) / 2:.1f}", "87"]
    masks = table(page, "Test accuracy in per cent, over")
    assert [row[0] for row in masks] == [
        "model",
        "after step 180",
        "after step 90",
        *(
            text
            for task in ("Turned", "Upright")
            for text in (f"without {task}", *(f"… in layer-{number} alone" for number in range(3)))
        ),
    ]
    for at in range(3):
        rows = table(page, "Certificate", at)[1:]
        assert [row[0] for row in rows] == ["fc0.weight", "fc1.weight", "fc2.weight"]
        assert all(row[3] == "2 of 2" for row in rows)
        assert all(0 < float(row[1]) < 10 * float(row[2]) for row in rows)


def test_classes_with_names_are_called_by_them(page: Parsed, paper: Any) -> None:
    assert "Turned 9 (nine), Figure 3b" in page.words
    assert "Upright 6, Figure 3a" in page.words
    scores = next(paper.out.glob("figures/figure-06-*.svg")).read_text(encoding="utf-8")
    for name in (*tiny.NAMES, "Upright", "Turned", "layer-2"):
        assert f"<!-- {name} -->" in scores, name


def test_what_was_not_found_is_noted(page: Parsed, paper: Any) -> None:
    notes = [
        shown.note for name in tiny.EXPERIMENTS for shown in paper.part(name, "spotlights").showcases if shown.note
    ]
    assert notes
    for note in notes:
        assert f"Note: {note}." in page.words
    assert page.words.count("Note: ") == len(notes)


def test_the_page_says_how_it_came_about(page: Parsed) -> None:
    for text in ("Seeds 0, 1;", "momentum 0.9", "vanilla SGD", "It is not causal", "Digits that were turned"):
        assert text in page.words
    rows = table(page, "Seeds")[1:]
    assert [row[:3] for row in rows] == [
        ["Single task: digits", "90", "2"],
        ["Joint training: both", "90", "2"],
        ["Continual learning: both", "90 + 90", "2"],
    ]


@pytest.mark.parametrize(
    ("name", "task", "label", "title", "lines"),
    [
        ("mnist", 0, 3, "MNIST 3", "MNIST 3"),
        ("mnist-and-fashion", 1, 9, "Fashion-MNIST 9 (ankle boot)", "Fashion-MNIST 9\nankle boot"),
        ("mnist-and-fashion", 0, 9, "MNIST 9", "MNIST 9"),
        ("tiny-two", 1, 0, "Turned 0 (nought)", "Turned 0\nnought"),
    ],
)
def test_a_class_is_named_with_its_task_and_number(name: str, task: int, label: int, title: str, lines: str) -> None:
    assert class_title(recipe(name), task, label) == title
    assert class_lines(recipe(name), task, label) == lines


def test_masked_networks_are_named_in_a_few_words() -> None:
    assert mask_title(tiny.TWO, Masked(None, None, 3000, {})) == "after step 3,000"
    assert mask_title(tiny.TWO, Masked("turned", None, 6000, {})) == "without Turned"
    assert mask_title(tiny.TWO, Masked("turned", "fc1", 6000, {})) == "in layer-1 alone"
    assert layer_title("fc0") == "layer-0"
