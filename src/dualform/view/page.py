"""One self-contained HTML page: text, tables, and figures embedded as PNG."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

DOTS = 220  # a figure's pixels per inch on the page and in its PNG file
INCH = 104  # CSS pixels of a figure's inch: three columns fit side by side

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5d5d5d; --rule: #dcdcdc; --ground: #fff; --card: #f7f7f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e6; --soft: #a8a8a4; --rule: #3c3c3a; --ground: #161615; --card: #20201f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.4rem; margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 46rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
a { color: inherit; }
.row { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
figure { margin: .75rem 0; padding: .75rem; background: #fff; border: 1px solid var(--rule); border-radius: 6px;
  max-width: 100%; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { color: #3a3a3a; font-size: .85rem; line-height: 1.4; margin-top: .5rem; }
.table { overflow-x: auto; margin: 0 0 1.25rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
.about { color: var(--soft); font-size: .92rem; margin: 1rem 0 .25rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 1.5px solid var(--ink); font-weight: 600; }
code { background: var(--card); padding: .1em .3em; border-radius: 3px; }
"""


class Page:
    """A page that grows from its top to its end."""

    def __init__(self, title: str) -> None:
        self._title, self._parts, self._sections = title, [f"<h1>{escape(title)}</h1>"], list[tuple[str, str]]()

    def section(self, title: str, name: str) -> None:
        """A heading that the contents link to."""
        self._sections.append((name, title))
        self._parts.append(f'<h2 id="{escape(name)}">{escape(title)}</h2>')

    def heading(self, title: str) -> None:
        """A smaller heading."""
        self._parts.append(f"<h3>{escape(title)}</h3>")

    def text(self, *paragraphs: str) -> None:
        """Paragraphs of plain text."""
        self._parts += [f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs]

    def contents(self) -> None:
        """Put the list of sections here."""
        self._parts.append("<!--contents-->")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
        """A table with a caption above it."""
        top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        about = escape(caption)
        self._parts.append(
            f'<p class="about">{about}</p><div class="table"><table aria-label="{about}">'
            f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def figures(self, *figures: tuple[bytes, tuple[float, float], str]) -> None:
        """Figures side by side where there is room: each its PNG, its size in inches, and its caption."""
        self._parts.append('<div class="row">' + "".join(_embedded(*figure) for figure in figures) + "</div>")

    def html(self) -> str:
        """The whole page."""
        links = "".join(f'<li><a href="#{escape(name)}">{escape(title)}</a></li>' for name, title in self._sections)
        body = "\n".join(self._parts).replace("<!--contents-->", f"<nav><ul>{links}</ul></nav>")
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(self._title)}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
        )


def save_both(figure: Figure, path: Path) -> bytes:
    """Write a figure as PNG and as SVG, and return the PNG; `path` has no ending."""
    # Without a date and with names that depend on nothing else, the same figure is the same file.
    with rc_context({"svg.hashsalt": "dualform"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=DOTS)
    return path.with_suffix(".png").read_bytes()


def _embedded(png: bytes, size: tuple[float, float], caption: str) -> str:
    data, text = base64.b64encode(png).decode("ascii"), escape(caption)
    width, height = (round(INCH * inches) for inches in size)
    return (
        f'<figure style="width: calc({width}px + 1.5rem + 2px)"><img width="{width}" height="{height}" '
        f'alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
    )
