"""The page before the real server, which draws with the models inside the package."""

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

pytest.importorskip("starlette")

from support.browser import visiting
from support.running_server import running

import diffusax
from diffusax.serving.requests.generation import Generation, write_infotext

pytestmark = pytest.mark.slow
DATA = Path(diffusax.__file__).parent / "data"


@contextlib.contextmanager
def killed(port):
    """Runs `diffusax serve` for a block, at whose end it is killed; gives its address."""
    command = [sys.executable, "-m", "diffusax", "serve", "--port", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DATA.parent.parent)},
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, place in {
        "emoji": "Stable-diffusion",
        "emoji_edit": "Stable-diffusion",
        "emoji_control": "ControlNet",
    }.items():
        shutil.copytree(DATA / name, folder / place / name)
    with running(None, folder) as found:
        yield found.url


@pytest.fixture
def visitor(browser, url):
    with visiting(browser, url) as found:
        found.page.set_default_timeout(60_000)
        found.page.fill("#num_inference_steps", "8")
        yield found


def saved(visitor, at=0):
    """Returns a picture and the bytes of its file, as the page saves it."""
    visitor.page.locator(".tile .open").nth(at).click()
    with visitor.page.expect_download() as download:
        visitor.page.get_by_role("button", name="Download").click()
    visitor.page.keyboard.press("Escape")
    return Image.open(download.value.path()), download.value.path()


def rim(image):
    """The mean colour of a picture's rim."""
    values = np.asarray(image.convert("RGB"), float)
    return np.concatenate([values[:3], values[-3:]]).mean((0, 1))


def test_a_picture_is_drawn_and_its_file_restores_the_settings(visitor):
    page = visitor.page
    visitor.draw("a red apple on a blue background", seed=3, guidance_scale=2.5)
    visitor.pictures(1)
    image, path = saved(visitor)
    red, _, blue = rim(image)
    assert blue > red + 50
    assert image.text["parameters"].startswith("a red apple on a blue background")
    for name in ("seed", "prompt"):
        page.fill(f"#{name}", "")
    page.fill("#num_inference_steps", "30")
    # The file chooser of the picture's place is not the way to restore; dropping it on the page is.
    transfer = page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            const file = new File([new Uint8Array(bytes)], "a.png", { type: "image/png" });
            transfer.items.add(file);
            return transfer;
        }""",
        list(Path(path).read_bytes()),
    )
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    page.get_by_text("The settings of a.png are back").wait_for()
    names = ("prompt", "seed", "num_inference_steps", "guidance_scale", "sampler")
    found = [page.input_value(f"#{name}") for name in names]
    assert found == ["a red apple on a blue background", "3", "8", "2.5", "ddim"]
    page.press("#prompt", "Control+Enter")
    visitor.pictures(2)
    again, _ = saved(visitor)
    assert np.abs(np.asarray(again, int) - np.asarray(image, int)).max() <= 2


@pytest.mark.parametrize("sampler", ["dpm++2m", "dpm++2m_karras", "euler", "euler_a", "kdpm2_a"])
def test_samplers_come_back_from_their_names_in_a1111(visitor, sampler):
    drawing = Generation(prompt="a frog", sampler=sampler, num_inference_steps=3, width=8, height=8)
    info = PngInfo()
    info.add_text("parameters", write_infotext(drawing, 1))
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG", pnginfo=info)
    visitor.open("more")
    file = {"name": "a.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    visitor.page.locator("#restore input").set_input_files(file)
    visitor.page.get_by_text("The settings of a.png are back.").wait_for()
    assert visitor.page.input_value("#sampler") == sampler


def test_a_part_is_drawn_anew_under_the_brush_alone(visitor):
    visitor.draw("a cat face on a blue background", seed=1)
    visitor.pictures(1)
    before, _ = saved(visitor)
    visitor.act("Draw a part anew")
    visitor.page.wait_for_selector("#brush[open]")
    visitor.paint((0.1, 0.9), (0.9, 0.9))
    visitor.page.get_by_role("button", name="Done").click()
    visitor.draw("a cat face on a red background", strength=1, mask_blur=0)
    visitor.pictures(2)
    after, _ = saved(visitor)
    change = np.abs(np.asarray(after, float) - np.asarray(before, float)).mean(-1)
    assert change[-5:].mean() > 3 * change[:40].mean() + 5


def test_a_picture_is_edited_and_drawn_larger(visitor):
    page = visitor.page
    visitor.draw("a cat face", seed=1)
    visitor.pictures(1)
    visitor.act("Begin with this picture")
    page.select_option("#model", "emoji_edit")
    visitor.draw("make the background blue", num_inference_steps=20, image_guidance_scale=1.4)
    visitor.pictures(2)
    red, _, blue = rim(saved(visitor)[0])
    assert blue > red + 50
    page.select_option("#model", "emoji")
    page.click("#no-picture")
    visitor.open("larger")
    page.check("#larger")
    visitor.draw("a frog", num_inference_steps=8)
    visitor.pictures(3)
    assert saved(visitor)[0].size == (128, 128)


def test_a_controlnet_steers(visitor):
    visitor.draw("a rocket", seed=1, num_inference_steps=20)
    visitor.pictures(1)
    visitor.act("Steer by this picture")
    visitor.page.get_by_role("button", name="Find its edges").click()
    visitor.draw("a rocket on a blue background", seed=5)
    visitor.pictures(2)
    red, _, blue = rim(saved(visitor)[0])
    assert blue > red + 50


def test_a_grid_of_samplers_and_steps_is_drawn(visitor):
    page = visitor.page
    visitor.open("grid")
    page.check("#grid")
    page.fill("#grid-x-values", "2, 4, 6")
    page.select_option("#grid-y", "sampler")
    for name in ("euler", "dpm++2m", "unipc"):
        page.check(f"#grid-axes input[value='{name}']")
    visitor.draw("a frog")
    visitor.pictures(9)


def test_a_long_drawing_shows_a_preview_and_is_cancelled(visitor):
    visitor.draw("a frog", num_inference_steps=200)
    visitor.page.wait_for_selector(".drawing > img[src^='data:image/']")
    visitor.page.get_by_role("button", name="Cancel a frog").click()
    visitor.page.wait_for_selector("#empty")


def test_a_server_with_a_key_asks_for_it(browser):
    with (
        running(keys=("a-long-secret",)) as found,
        visiting(browser, found.url, wait=False) as visitor,
    ):
        visitor.connected("key")
        visitor.page.fill("#key-value", "a-long-secret")
        visitor.page.keyboard.press("Enter")
        visitor.connected()
        visitor.page.set_default_timeout(60_000)
        visitor.draw("a frog", num_inference_steps=2)
        visitor.pictures(1)


def test_a_server_that_is_killed_draws_what_it_lost_when_it_is_back(browser):
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as tab:
        with killed(port) as url:
            visitor = tab.enter_context(visiting(browser, url))
            visitor.draw("a frog", num_inference_steps=200)
            visitor.page.get_by_text("of 200").wait_for(timeout=60_000)
        visitor.connected("away")
        with killed(port):
            visitor.page.set_default_timeout(60_000)
            visitor.connected()
            visitor.pictures(1)
