"""A browser for tests of the page, and the page in it as a person uses it."""

import base64
import contextlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

MISSING = (
    "needs playwright (pip install playwright axe-playwright-python) and Chromium "
    "(apt-get install chromium, or DIFFUSAX_CHROMIUM with the path of one)"
)
_TYPES = {"gif": "image/gif", "mp4": "video/mp4"}
"""The types of files by the endings of their names; others are PNGs."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("DIFFUSAX_CHROMIUM") or next(
    filter(None, map(shutil.which, _NAMES)), None
)
# Chromium looks for hosts of its own, which a closed network refuses many at a time.
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Runs a browser, or skips the tests with the reason where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=MISSING)
    if not CHROMIUM:
        pytest.skip(MISSING)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


class Visitor:
    """One tab with the page; `errors` are what its console complains of."""

    def __init__(self, context: Any, url: str, wait: bool = True):
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.goto(url)
        if wait:
            self.connected()

    def _heard(self, message: Any) -> None:
        # What the server refuses is tested by what the page makes of it.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def connected(self, state: str = "here") -> None:
        self.page.wait_for_selector(f"#connection[data-state={state}]")

    def draw(self, prompt: str, **fields: Any) -> None:
        self.page.fill("#prompt", prompt)
        for name, value in fields.items():
            self.page.fill(f"#{name}", str(value))
        self.page.press("#prompt", "Control+Enter")

    def open(self, group: str) -> None:
        """Opens a group of settings, which phones fold away."""
        fold = self.page.locator("#fold[aria-expanded=false]")
        if fold.is_visible():
            fold.click()
        if self.page.locator(f"#group-{group}").get_attribute("open") is None:
            self.page.click(f"#group-{group} > summary")

    def pictures(self, count: int) -> Any:
        """Waits for so many pictures, and returns their places."""
        found = self.page.locator(".tile[data-kind=picture]")
        if count:
            found.nth(count - 1).wait_for()
        assert found.count() == count
        return found

    def act(self, action: str, at: int = 0) -> None:
        """Opens a picture and clicks one of its buttons."""
        self.page.locator(".tile .open").nth(at).click()
        self.page.locator("#viewer").get_by_role("button", name=action).click()

    def paint(self, *points: tuple[float, float]) -> None:
        """Draws one stroke through points, which are shares of the picture's width and height."""
        box = self.page.locator(".sheet .picture").bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places:
            self.page.mouse.move(*place, steps=4)
        self.page.mouse.up()

    def call(self, module: str, expression: str, *values: Any) -> Any:
        """Evaluates an expression with a module `m` of the page and values `v`."""
        script = (
            f"async (v) => {{ const m = await import('/page/{module}'); return {expression}; }}"
        )
        return self.page.evaluate(script, list(values))


@contextlib.contextmanager
def visiting(browser: Any, url: str, wait: bool = True, **options: Any) -> Iterator[Visitor]:
    """Opens the page in a browser without a past; its console must have had nothing to say."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 850}, **options})
    visitor = Visitor(context, url, wait)
    visitor.context = context
    try:
        yield visitor
    finally:
        context.close()
    assert visitor.errors == []


def violations(page: Any) -> list[str]:
    """Returns what axe-core finds wrong for people who cannot see or point."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=MISSING)
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]}"
        for one in found
        for node in one["nodes"]
    ]


def pixels(uri: str) -> np.ndarray:
    """Returns the picture of a data URI, h w 3."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB"))


def png(
    parameters: str | None = None, size: tuple[int, int] = (64, 64), colour: str = "green"
) -> bytes:
    """Returns a file with one colour, and with a text of settings."""
    info = PngInfo()
    if parameters:
        info.add_text("parameters", parameters)
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def transferred(visitor: Visitor, data: bytes, name: str) -> Any:
    """Returns a file as a page gets it that is dropped or pasted."""
    script = """([data, name, type]) => {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], name, { type }));
        return transfer;
    }"""
    kind = _TYPES.get(name.rpartition(".")[2], "image/png")
    return visitor.page.evaluate_handle(script, [base64.b64encode(data).decode(), name, kind])


def drop(visitor: Visitor, data: bytes, name: str = "dropped.png", on: str = "body") -> None:
    """Drops a file on an element, as from the desktop."""
    transfer = transferred(visitor, data, name)
    for kind in ("dragenter", "dragover", "drop"):
        visitor.page.dispatch_event(on, kind, {"dataTransfer": transfer})


def waiting(condition: Callable[[], Any], seconds: float = 15) -> None:
    """Waits until a condition of the test holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
