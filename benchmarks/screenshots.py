"""The pictures of the explorer in README and docs, taken in Chromium.

    python benchmarks/screenshots.py --run DIR --two DIR2 --out docs/images

DIR is a memory of MNIST (`dualform demo --out DIR`), DIR2 one of MNIST and then Fashion-MNIST (`dualform reproduce
continual --runs 1 --keep-memories`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

WAIT = 240_000  # milliseconds: what is derived is made at the first question


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server on a memory."""
    command = [sys.executable, "-u", "-m", "dualform", "serve", str(run), "--no-browser", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = None
        while found is None:
            found = re.search(r"http://127\.0\.0\.1\S*/", server.stdout.readline())
        yield found[0].rstrip("/")
    finally:
        server.terminate()
        server.wait(30)


def settled(page: Any) -> None:
    """Wait until everything is answered and drawn."""
    page.wait_for_selector("#answer")
    page.wait_for_selector('.images[aria-busy="false"]')
    page.wait_for_timeout(500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--two", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def page(width: int, height: int, scheme: Any = "light") -> Any:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            context.set_default_timeout(WAIT)
            return context.new_page()

        with served(options.run) as address:
            shown = page(1440, 1080)
            shown.goto(f"{address}/images?test=5938")
            settled(shown)
            shown.screenshot(path=options.out / "explorer.png")
            shown.get_by_text("Draw", exact=True).click()
            box = shown.locator("canvas").bounding_box()
            for stroke in (((60, 50), (205, 50), (130, 150)), ((130, 150), (110, 235))):
                for number, (x, y) in enumerate(stroke):
                    shown.mouse.move(box["x"] + x, box["y"] + y, steps=8)
                    if number == 0:
                        shown.mouse.down()
                shown.mouse.up()
            shown.wait_for_url("**pixels=**")
            settled(shown)
            shown.screenshot(path=options.out / "explorer-drawn.png")
            dark = page(1440, 1080, "dark")
            dark.goto(f"{address}/images?test=18&measure=contributions")
            settled(dark)
            dark.locator("article").last.scroll_into_view_if_needed()
            dark.screenshot(path=options.out / "explorer-dark.png")
            phone = page(390, 1400)
            phone.goto(f"{address}/images?test=5938")
            settled(phone)
            phone.screenshot(path=options.out / "explorer-phone.png")
        with served(options.two) as address:
            shown = page(1440, 1080)
            shown.goto(f"{address}/images?test=6&without=fashion-mnist")
            settled(shown)
            shown.locator(".ask").evaluate("column => column.scrollTo(0, column.scrollHeight)")
            shown.screenshot(path=options.out / "explorer-levers.png")
            shown.goto(f"{address}/overview")
            shown.wait_for_selector(".verdict")
            shown.wait_for_timeout(1500)
            shown.screenshot(path=options.out / "explorer-overview.png")
        browser.close()


if __name__ == "__main__":
    main()
