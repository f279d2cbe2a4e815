"""Ten tasks of somebody who draws, and what each takes, as docs/serving/page.md has it."""

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from support.browser import drop, png, waiting

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[3] / "docs/serving/page.md"
OPEN = ".tile .open"


@dataclasses.dataclass
class Hand:
    """One who uses the page, and how often: clicks, keys, texts that are typed, and drags."""

    visitor: object
    clicks: int = 0
    keys: int = 0
    texts: int = 0
    drags: int = 0

    def click(self, selector, **options):
        self.visitor.page.locator(selector).first.click(**options)
        self.clicks += 1

    def press(self, key):
        self.visitor.page.keyboard.press(key)
        self.keys += 1

    def type(self, text):
        """Types over what is selected in the field that has the focus."""
        self.visitor.page.keyboard.insert_text(text)
        self.texts += 1

    def choose(self, selector, label):
        """Chooses from a list, which takes a click to open it and one on the entry."""
        self.visitor.page.select_option(selector, label=label)
        self.clicks += 2

    def number(self, selector, value):
        """Clicks into a number, which marks it, and types another."""
        self.click(selector)
        self.type(str(value))

    def named(self, name):
        self.visitor.page.get_by_role("button", name=name, exact=True).click()
        self.clicks += 1

    def __str__(self):
        names = ("clicks", "keys", "texts", "drags")
        counts = {name: getattr(self, name) for name in names}
        return ", ".join(f"{n} {name[:-1] if n == 1 else name}" for name, n in counts.items() if n)


def prompt_alone(hand, server):
    hand.type("a red apple")
    hand.press("Control+Enter")
    hand.visitor.pictures(1)


def four_wide(hand, server):
    hand.type("a red apple")
    hand.choose("#shape", "16:9")
    hand.number("#num_images", 4)
    hand.press("Control+Enter")
    hand.visitor.pictures(4)
    assert server.asked[3]["width"] > 1.5 * server.asked[3]["height"]


def stop_one(hand, server):
    hand.visitor.page.fill("#num_images", "4")
    server.pace = None
    hand.visitor.page.click("#draw")
    waiting(lambda: len(server.jobs) == 4)
    hand.click(".tile .cancel")
    waiting(lambda: [job["state"] for job in server.jobs.values()].count("cancelled") == 1)
    server.pace = 0.001
    hand.visitor.pictures(3)


def four_more(hand, server):
    hand.click(OPEN)
    hand.named("Four more")
    hand.visitor.pictures(5)


def variations(hand, server):
    hand.click(OPEN)
    hand.named("Four variations")
    hand.visitor.pictures(5)


def larger(hand, server):
    hand.click(OPEN)
    hand.named("Enlarge twice")
    hand.visitor.page.locator(".facts", has_text="128 × 128").wait_for()


def part_anew(hand, server):
    hand.click(OPEN)
    hand.named("Draw a part anew")
    hand.visitor.page.wait_for_selector("#brush[open]")
    hand.visitor.paint((0.3, 0.3), (0.6, 0.6))
    hand.drags += 1
    hand.named("Done")
    hand.visitor.page.wait_for_selector("#prompt:focus")
    hand.type("a pear")
    hand.press("Control+Enter")
    hand.visitor.pictures(2)
    assert server.asked[1]["mask_image"]
    assert server.asked[1]["prompt"] == "a pear"


def settings_back(hand, server):
    drop(hand.visitor, png("a frog\nSteps: 12, Sampler: Euler, Seed: 99"))
    hand.drags += 1
    hand.visitor.page.get_by_text("The settings of dropped.png are back").wait_for()


def find_and_save(hand, server):
    hand.click("#find")
    hand.type("apple")
    hand.visitor.page.wait_for_timeout(300)
    hand.click(OPEN)
    with hand.visitor.page.expect_download():
        hand.named("Download")


def with_lora(hand, server):
    hand.type("a red apple")
    hand.click("#group-loras > summary")
    hand.named("Pixel into the prompt")
    hand.press("Control+Enter")
    hand.visitor.pictures(1)
    assert server.asked[0]["prompt"] == "a red apple <lora:pixel:1>"


TASKS = {
    "a picture of a prompt, on a page that was just opened": (prompt_alone, False),
    "four wide pictures of it": (four_wide, False),
    "stop one of four that are drawn": (stop_one, False),
    "four more like an earlier picture": (four_more, True),
    "variations of the picture that was just drawn": (variations, True),
    "make it twice as large": (larger, True),
    "draw a part of it anew, as something else": (part_anew, True),
    "take over the settings of an image's file": (settings_back, False),
    "find an earlier picture by a word and save it": (find_and_save, True),
    "draw with a LoRA": (with_lora, False),
}


@pytest.mark.parametrize("task", TASKS)
def test_tasks_take_what_the_documentation_says(visitor, server, task):
    act, drawn = TASKS[task]
    server.upscales = True
    if drawn:
        visitor.draw("an apple")
        visitor.pictures(1)
    visitor.page.reload()
    visitor.connected()
    if not drawn:
        visitor.page.wait_for_selector("#prompt:focus")
    else:
        visitor.pictures(1)
    hand = Hand(visitor)
    act(hand, server)
    [told] = re.findall(rf"^\| {re.escape(task)} \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert str(hand) == told.strip()
