"""Images and bars as text: half blocks in shades of grey where the terminal has colours, else plain ASCII."""

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from dualform.errors import MissingExtra
from dualform.view.panels import Exhibit, Match, Panel

try:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise MissingExtra(
        "Pictures in the terminal need rich, which is not installed: pip install 'dualform[cli]'"
    ) from error

RAMP = " .:-=+*#%@"
EIGHTHS = " ▏▎▍▌▋▊▉█"
# Okabe and Ito's blue and orange, which differ for colour-blind eyes too.
ANSWER, LABEL = "#56b4e9", "#e69f00"


def terminal() -> Console:
    """Return a console that prints texts as they are: `[` in a path is no markup."""
    return Console(highlight=False, markup=False, emoji=False)


def can_show_blocks(console: Console) -> bool:
    """Say whether this console has both the colours and the characters that half blocks need."""
    # Sixteen colours have only four greys, fewer than the ramp of characters.
    return console.color_system in ("256", "truecolor") and not console.options.ascii_only


def picture(image: UInt8[Tensor, "height width"], *, columns: int = 28, blocks: bool = True) -> Text:
    """Return the image as text at most `columns` wide, one character for two pixels above each other.

    >>> import torch
    >>> print(picture(torch.tensor([[0, 255], [0, 255]], dtype=torch.uint8), columns=2, blocks=False).plain)
     @
    """
    pixels = _fit(image, columns)
    upper, lower = pixels[0::2], pixels[1::2]
    if not blocks:
        cells = (upper.int() + lower.int()) // 2 * len(RAMP) // 256
        return Text("\n".join("".join(RAMP[cell] for cell in row) for row in cells.tolist()), no_wrap=True)
    text = Text(no_wrap=True)
    for number, (above, below) in enumerate(zip(upper.tolist(), lower.tolist(), strict=True)):
        if number:
            text.append("\n")
        for top, bottom in zip(above, below, strict=True):
            text.append("▀", f"{_grey(top)} on {_grey(bottom)}")
    return text


def bars(
    shares: Float[Tensor, " classes"],
    names: tuple[str, ...],
    *,
    width: int,
    notes: dict[str, str] | None = None,
    blocks: bool = True,
) -> Text:
    """Return one bar a class with its share of the whole; `notes` puts a word behind some of them.

    >>> import torch
    >>> print(bars(torch.tensor([0.25, 0.75]), ("cat", "dog"), width=6, blocks=False).plain)
    cat ##      25 %
    dog ######  75 %
    """
    notes, longest, widest = notes or {}, max(shares.max().item(), 1e-30), max(map(len, names))
    text = Text(no_wrap=True)
    for number, (name, share) in enumerate(zip(names, shares.tolist(), strict=True)):
        note = notes.get(name, "")
        colour = {"answer": ANSWER, "label": LABEL}.get(note, "")
        text.append("\n" if number else "").append(name.rjust(widest) + " ")
        text.append(_bar(share / longest * width, blocks).ljust(width), colour)
        text.append(f" {100 * share:3.0f} %").append(f" {note}" if note else "", colour)
    return text


def show(exhibit: Exhibit, console: Console) -> None:
    """Print the test image, the model's answer, and every layer's best matches and class totals."""
    blocks = can_show_blocks(console)
    columns = 28 if console.width >= 120 else 18
    heading = Text.assemble((exhibit.title, "bold"), f"\n\n{exhibit.verdict}")
    top = Table.grid(padding=(0, 2))
    top.add_row(picture(exhibit.image, columns=columns, blocks=blocks), heading)
    console.print(Padding(top, (1, 0)))
    notes = {exhibit.label or "": "label", exhibit.answer: "answer"}
    # Behind a bar there is room for " 100 % answer".
    beside = max(map(len, exhibit.class_names)) + 14
    for panel in exhibit.panels:
        console.print(Text(f"Layer {panel.layer}", "bold"), Text(_says(exhibit, panel)))
        width = max(4, console.width - len(panel.matches) * (columns + 2) - beside)
        chart = bars(panel.shares, exhibit.class_names, width=min(width, 40), notes=notes, blocks=blocks)
        row = Table.grid(padding=(0, 2))
        row.add_row(*[_captioned(match, columns, blocks) for match in panel.matches], chart)
        console.print(Padding(row, (0, 0, 1, 0)))


def _says(exhibit: Exhibit, panel: Panel) -> str:
    most = exhibit.class_names[int(panel.shares.argmax())]
    return f"attends most to class {most}; its best matches among all training events:"


def _captioned(match: Match, columns: int, blocks: bool) -> Text:
    return picture(match.image, columns=columns, blocks=blocks).append(f"\n{match.caption}")


def _fit(image: UInt8[Tensor, "height width"], columns: int) -> UInt8[Tensor, "rows columns"]:
    """Repeat pixels of a small image, average those of a large one, and make the number of rows even."""
    height, width = image.shape
    if width > columns:
        rows = max(1, round(height * columns / width))
        image = F.interpolate(image[None, None].float(), (rows, columns), mode="area")[0, 0].round().byte()
    elif columns // width > 1:
        image = image.repeat_interleave(columns // width, 0).repeat_interleave(columns // width, 1)
    return F.pad(image, (0, 0, 0, image.shape[0] % 2))


def _bar(length: float, blocks: bool) -> str:
    if not blocks:
        return "#" * round(length)
    whole, rest = divmod(round(length * 8), 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def _grey(value: int) -> str:
    return f"rgb({value},{value},{value})"
