"""Pictures as text, character by character."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from dualform.view.panels import Exhibit
from dualform.view.pictures import bars, can_show_blocks, picture, show


def pixels(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def ascii_picture(image: Tensor, columns: int) -> str:
    return picture(image, columns=columns, blocks=False).plain


def test_the_ramp_goes_from_dark_to_bright() -> None:
    greys = [0, 26, 52, 77, 103, 128, 154, 180, 205, 255]
    assert ascii_picture(pixels(greys, greys), 10) == " .:-=+*#%@"


def test_a_character_is_two_pixels_above_each_other() -> None:
    assert ascii_picture(pixels([0, 255], [255, 255], [0, 0], [0, 255]), 2) == "=@\n ="


def test_an_odd_row_is_completed_with_black() -> None:
    assert ascii_picture(pixels([255, 255]), 2) == "=="


def test_a_small_image_grows_by_whole_pixels() -> None:
    assert ascii_picture(pixels([255, 0], [0, 255]), 5) == "@@  \n  @@"


def test_a_large_image_is_averaged() -> None:
    image = torch.zeros(8, 8, dtype=torch.uint8)
    image[:, 4:] = 255
    assert ascii_picture(image, 4) == "  @@\n  @@"


def test_half_blocks_carry_one_grey_above_and_one_below() -> None:
    text = picture(pixels([0, 255], [17, 128]), columns=2)
    assert text.plain == "▀▀"
    styles = [span.style for span in text.spans]
    assert styles == ["rgb(0,0,0) on rgb(17,17,17)", "rgb(255,255,255) on rgb(128,128,128)"]


def test_bars_are_as_long_as_their_share() -> None:
    shares = torch.tensor([0.5, 0.25, 0.0, 0.25])
    text = bars(shares, ("a", "b", "c", "dd"), width=4, notes={"b": "answer"}, blocks=False)
    assert text.plain.splitlines() == [
        " a ####  50 %",
        " b ##    25 % answer",
        " c        0 %",
        "dd ##    25 %",
    ]
    text = bars(torch.tensor([1.0, 0.3]), ("a", "b"), width=2)
    assert text.plain.splitlines() == ["a ██ 100 %", "b ▋   30 %"]


def test_bars_without_any_attention() -> None:
    assert bars(torch.zeros(1), ("a",), width=2, blocks=False).plain == "a      0 %"


@pytest.mark.parametrize(
    ("colours", "encoding", "expected"),
    [
        ("truecolor", "utf-8", True),
        ("256", "utf-8", True),
        ("standard", "utf-8", False),
        (None, "utf-8", False),
        ("truecolor", "ascii", False),
    ],
)
def test_blocks_need_colours_and_unicode(colours: str | None, encoding: str, expected: bool) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=True, color_system=colours)
    assert can_show_blocks(console) is expected


def test_show_on_a_plain_terminal(exhibit: Exhibit) -> None:
    file = io.StringIO()
    show(exhibit, Console(file=file, width=100, color_system=None))
    text = file.getvalue()
    assert "The model answers dog with probability 0.62, which is wrong: it is cat." in text
    assert text.count("attends most to class dog") == 2
    assert text.count("score 1,234") == 2
    assert text.count("label dog") == 6
    assert text.isascii()


def test_show_fits_80_columns(exhibit: Exhibit) -> None:
    names = tuple("0123456789")
    panels = tuple(replace(panel, shares=torch.full([10], 0.1)) for panel in exhibit.panels)
    file = io.StringIO()
    exhibit = replace(exhibit, panels=panels, class_names=names, label="3", answer="5")
    show(exhibit, Console(file=file, width=80, color_system=None))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("10 % answer" in line for line in lines) == 2
    assert sum("10 % label" in line for line in lines) == 2


def test_show_with_colours(exhibit: Exhibit) -> None:
    file = io.StringIO()
    show(exhibit, Console(file=file, width=120, force_terminal=True, color_system="truecolor"))
    assert "\x1b[38;2;0;0;0;48;2;0;0;0m▀" in file.getvalue()
