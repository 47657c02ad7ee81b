"""The explorer's page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import uvicorn
from playwright.sync_api import expect, sync_playwright

from dualform.view.explorer.levers import read_input
from dualform.view.explorer.server import Explorer, listen
from dualform.view.explorer.subject import Subject

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT = 60_000  # milliseconds, for a machine that is busy with other tests

if CHROMIUM is None and os.environ.get("CI"):
    raise RuntimeError("CI tests the page in a browser: apt-get install chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def address(subject: Subject) -> Iterator[str]:
    """A server on a free port of this machine, for as long as the tests of this file."""
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Explorer(subject).app(), log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that may not complain, and may ask nobody but the server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT)
    found = context.new_page()
    problems: list[str] = []
    found.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: problems.append(request.url) if not ours(request.url, address) else None)
    found.on("response", lambda response: problems.append(response.url) if response.status >= 400 else None)
    yield found
    context.close()
    assert problems == []


def ours(url: str, address: str) -> bool:
    return url.startswith((f"{address}/", "data:", "blob:"))


def answer(page: Any) -> str:
    return str(page.locator("#answer").inner_text())


def settled(page: Any) -> None:
    """Wait until everything that was asked is answered and drawn."""
    page.wait_for_selector("#answer")
    page.wait_for_selector('.images[aria-busy="false"]')


def matches(page: Any, layer: str) -> list[str]:
    return [str(one.get_attribute("alt")) for one in page.locator(f'[data-layer="{layer}"] .match img').all()]


def test_a_digit_drawn_with_the_mouse(page: Any, address: str, subject: Subject) -> None:
    page.goto(f"{address}/images")
    settled(page)
    page.get_by_text("Draw", exact=True).click()
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 140, box["y"] + 40)
    page.mouse.down()
    for y in range(40, 240, 20):
        page.mouse.move(box["x"] + 140, box["y"] + y)
    page.mouse.up()
    page.wait_for_url("**pixels=**")
    settled(page)
    expect(page.locator(".title")).to_have_text("your image", timeout=WAIT)
    images = subject.images
    assert images is not None
    drawn = read_input({"pixels": parse_qs(urlsplit(page.url).query)["pixels"][0]}, images)
    # A stroke from top to bottom: ink in the middle, none at the sides.
    assert int(drawn.pixels[:, 3:5].max()) > 50 and int(drawn.pixels[:, [0, 7]].max()) == 0
    expected = images.model(images.preprocess(drawn.pixels[None], 0))[0]
    assert answer(page) == images.tasks[0].class_names[int(expected.argmax())]
    link = page.url
    page.goto(f"{address}/images?test=3")
    settled(page)
    page.goto(link)
    settled(page)
    assert answer(page) == images.tasks[0].class_names[int(expected.argmax())]


def stroke(page: Any, x: int) -> None:
    """A line from top to bottom of the pad."""
    box = page.locator("canvas").bounding_box()
    before = page.url
    page.mouse.move(box["x"] + x, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + x, box["y"] + 240, steps=5)
    page.mouse.up()
    page.wait_for_function("before => location.href !== before", arg=before)
    settled(page)


def ink(page: Any) -> int:
    """How many pixels of the pad have ink."""
    return int(
        page.evaluate(
            """() => { const pad = document.querySelector("canvas");
            const data = pad.getContext("2d").getImageData(0, 0, pad.width, pad.height).data;
            return data.filter((value, at) => at % 4 === 0 && value < 250).length; }"""
        )
    )


def test_the_pad_and_the_answer_are_of_one_drawing(page: Any, address: str) -> None:
    page.goto(f"{address}/images")
    settled(page)
    page.get_by_text("Draw", exact=True).click()
    settled(page)
    assert ink(page) == 0 and page.locator(".title").inner_text() == "your image"
    stroke(page, 80)
    one = ink(page)
    stroke(page, 200)
    assert ink(page) > 1.5 * one > 0
    page.go_back()  # to the first stroke, as its link shows it
    settled(page)
    back = ink(page)
    page.reload()
    settled(page)
    assert back == ink(page) > 0
    page.locator("canvas").focus()
    page.keyboard.press("Escape")
    settled(page)
    assert ink(page) == 0
    stroke(page, 80)
    page.locator("#clear").click()
    settled(page)
    page.locator("#until").fill("90")
    page.wait_for_url("**until=90**")
    settled(page)
    assert ink(page) == 0 and page.locator(".title").inner_text() == "your image"


def changing(subject: Subject, until: int) -> tuple[int, str, str]:
    """A test image whose answer was another one after step `until`; both answers."""
    images = subject.images
    assert images is not None
    of_task = images.test.tasks == 0
    inputs = images.preprocess(images.test.images[of_task], 0)
    with torch.no_grad():
        now, before = (
            model(inputs).argmax(1) for model in (images.model, subject.memory.dual(images.model, until=until))
        )
    index = int((now != before).nonzero()[0, 0])
    names = images.tasks[0].class_names
    return index, names[int(before[index])], names[int(now[index])]


def test_the_time_slider_changes_the_prediction(page: Any, address: str, subject: Subject) -> None:
    index, before, now = changing(subject, 90)
    page.goto(f"{address}/images?test={index}")
    settled(page)
    assert answer(page) == now
    page.locator("#until").fill("90")
    page.wait_for_url("**until=90**")
    expect(page.locator("#answer")).to_have_text(before, timeout=WAIT)
    assert "90 of 180" in page.locator(".levers").inner_text()
    page.go_back()
    expect(page.locator("#answer")).to_have_text(now, timeout=WAIT)


def test_masking_a_task_changes_the_top_examples(page: Any, address: str, subject: Subject) -> None:
    page.goto(f"{address}/images?test=3&task=turned")
    settled(page)
    before = matches(page, "fc2")
    assert any("Turned" in one for one in before)
    page.locator('[data-task="turned"]').uncheck()
    page.wait_for_url("**without=turned**")
    settled(page)
    expect(page.locator("[data-layer=fc2] .match img[alt*=Turned]")).to_have_count(0, timeout=WAIT)
    assert matches(page, "fc2") != before
    # A class alone.
    page.locator('[data-task="turned"]').check()
    page.locator('[data-group="turned:4"]').uncheck(force=True)
    page.wait_for_url("**without=turned%3A4**")


def test_a_deep_link_opens_what_it_says(page: Any, address: str) -> None:
    page.goto(f"{address}/images?test=5&task=turned&until=120&without=upright:3&measure=contributions&unit=2&against=7")
    settled(page)
    assert page.locator(".title").inner_text() == "Turned test image 5"
    assert page.locator("#until").input_value() == "120"
    assert not page.locator('[data-group="upright:3"]').is_checked()
    assert (page.locator("#unit").input_value(), page.locator("#against").input_value()) == ("2", "7")
    assert "rather than seven" in page.locator('[data-layer="fc2"] .how').inner_text()
    expect(page.locator('[data-layer="fc2"] .charts .main-svg').first).to_be_visible(timeout=WAIT)
    numbers = page.request.get(address + str(page.locator(".links a").get_attribute("href")))
    assert numbers.json()["step"] == 120


def test_the_keyboard_alone(page: Any, address: str) -> None:
    page.goto(f"{address}/images?test=0")
    settled(page)
    page.locator(".thumbnails").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**test=1**")
    page.locator("#until").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**until=179**")
    page.locator('[data-group="upright:2"]').focus()
    page.keyboard.press("Space")
    page.wait_for_url("**without=upright%3A2**")
    page.locator('input[value="draw"]').focus()
    page.keyboard.press("Space")
    page.locator("canvas").focus()
    for key in ("Shift+ArrowDown", "Shift+ArrowDown", "Shift+ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_url("**pixels=**")
    settled(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_an_image_is_uploaded(page: Any, address: str, tmp_path: Any) -> None:
    from PIL import Image, ImageDraw

    paper = Image.new("L", (80, 80), 255)
    ImageDraw.Draw(paper).line((40, 8, 40, 72), fill=0, width=12)
    paper.save(tmp_path / "one.png")
    page.goto(f"{address}/images")
    settled(page)
    page.get_by_text("Upload", exact=True).click()
    page.locator("#invert").check()
    page.locator("#file").set_input_files(str(tmp_path / "one.png"))
    page.wait_for_url("**pixels=**")
    settled(page)
    expect(page.locator(".title")).to_have_text("your image", timeout=WAIT)


def test_the_overview(page: Any, address: str) -> None:
    page.goto(f"{address}/overview")
    page.wait_for_selector(".verdict")
    text = page.locator("main").inner_text()
    assert "fc2.weight is rebuilt from 23,040 events to" in text and "Exact up to rounding." in text
    assert page.locator(".chart .scatterlayer .trace").count() == 2


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for view in ("images", "overview"):
        page.goto(f"{address}/{view}")
        page.wait_for_selector(".card")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_and_light(page: Any, address: str) -> None:
    page.goto(f"{address}/images")
    settled(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(ground)
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(ground) != first
    page.reload()
    settled(page)
    assert page.evaluate(ground) != first
