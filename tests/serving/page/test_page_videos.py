"""Videos on the page: drawn, shown while they are drawn, played, kept, saved and drawn again."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("imageio_ffmpeg")

from support.browser import drop, png, violations, visiting, waiting
from support.running_server import running
from support.tiny_transformers import wan_pipeline

from diffusax.images import clips

PLAYS = """() => {
    const video = document.querySelector("#viewer video");
    const { currentTime, videoWidth, videoHeight, readyState, paused, duration } = video;
    return { currentTime, videoWidth, videoHeight, readyState, paused, duration };
}"""
PIXELS = """() => {
    const canvas = document.querySelector(".drawing canvas:not([hidden])");
    return canvas && canvas.toDataURL();
}"""


def shown(visitor):
    """What the browser says of the video that is open, once it plays."""
    page = visitor.page
    waiting(lambda: page.evaluate(PLAYS)["readyState"] >= 2)
    first = page.evaluate(PLAYS)["currentTime"]
    waiting(lambda: page.evaluate(PLAYS)["currentTime"] != first)
    return page.evaluate(PLAYS)


@pytest.fixture
def moving(visitor):
    visitor.page.select_option("#model", "wan")
    return visitor


def test_a_video_is_drawn_and_plays(moving, server):
    page = moving.page
    assert page.input_value("#num_frames") == "9"
    assert page.input_value("#fps") == "8"
    assert page.locator("#video-summary").inner_text() == "1.1 s"
    assert "Text to video · 96 × 64 · 9 frames · 4 steps" in page.locator("#plan").inner_text()
    assert not page.locator("#group-source").is_visible()
    moving.draw("a cat walks", seed=7, num_frames=17)
    moving.pictures(1)
    [asked] = server.asked
    assert {"num_frames": 17, "fps": 8, "model": "wan"}.items() <= asked.items()
    assert page.locator(".tile .length").inner_text() == "▶ 2.1 s"
    assert page.locator(".tile img").get_attribute("alt") == "Video: a cat walks"
    assert violations(page) == []
    page.locator(".tile .open").click()
    found = shown(moving)
    assert (found["videoWidth"], found["videoHeight"], found["paused"]) == (96, 64, False)
    assert found["duration"] == pytest.approx(17 / 8, abs=0.01)
    video = page.locator("#viewer video")
    for name in ("loop", "muted", "controls"):
        assert video.evaluate(f"(one) => one.{name}")
    assert "Frames17" in page.locator(".facts").inner_text().replace("\n", "")
    assert violations(page) == []
    # What is for pictures is not offered.
    names = page.locator(".deeds button:visible").all_inner_texts()
    assert "Four more" in names
    assert not {"Draw a part anew", "Begin with this picture", "Copy"} & set(names)
    page.keyboard.press("Escape")
    page.select_option("#model", "emoji")
    moving.draw("a frog", num_inference_steps=2)
    moving.pictures(2)
    assert not {"num_frames", "fps"} & set(server.asked[-1])


def test_a_video_is_saved_and_brings_its_settings_back(moving, server):
    page = moving.page
    moving.draw("a cat walks", seed=7, num_frames=5, fps=10)
    moving.pictures(1)
    page.locator(".tile .open").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "7-a-cat-walks.mp4"
    data = download.value.path().read_bytes()
    with clips.opened(data, 99, 10**6) as reader:
        assert (reader.size, reader.fps(), len(list(reader.frames))) == ((96, 64), 10, 5)
    page.keyboard.press("Escape")
    page.fill("#num_frames", "9")
    page.fill("#prompt", "")
    transfer = page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "a.mp4", { type: "video/mp4" }));
            return transfer;
        }""",
        list(data),
    )
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    page.get_by_text("The settings of a.mp4 are back").wait_for()
    values = [page.input_value(f"#{name}") for name in ("prompt", "seed", "num_frames", "fps")]
    assert values == ["a cat walks", "7", "5", "10"]
    # On a model of images they have no place.
    page.select_option("#model", "emoji")
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    page.get_by_text("Frames: 5").wait_for()
    assert not page.locator("#group-video").is_visible()


def test_history_keeps_videos_and_draws_them_again(moving, server):
    page = moving.page
    moving.draw("a cat walks", seed=7, num_frames=13)
    moving.pictures(1)
    page.reload()
    moving.connected()
    moving.pictures(1)
    page.select_option("#model", "emoji")
    moving.act("Use these settings")
    values = [page.input_value(f"#{name}") for name in ("model", "num_frames", "seed")]
    assert values == ["wan", "13", "7"]
    moving.act("Four more")
    moving.pictures(5)
    again = server.asked[-4:]
    assert all(one["num_frames"] == 13 and one["seed"] != 7 for one in again)
    page.locator(".tile .open").first.click()
    shown(moving)


def test_a_preview_moves_while_a_video_is_drawn(moving, server):
    page = moving.page
    server.pace = 0.05
    moving.draw("a cat walks", num_inference_steps=60)
    page.wait_for_selector(".drawing canvas:not([hidden])")
    seen = set()
    waiting(lambda: seen.add(page.evaluate(PIXELS)) or len(seen) == 3)
    assert violations(page) == []
    page.get_by_role("button", name="Cancel a cat").click()
    page.wait_for_selector("#empty")


def test_a_preview_stands_still_for_who_wants_no_motion(browser, server):
    server.pace = 0.05
    with visiting(browser, server.url, reduced_motion="reduce") as visitor:
        visitor.page.select_option("#model", "wan")
        visitor.draw("a cat walks", num_inference_steps=60)
        visitor.page.wait_for_selector(".drawing > img[src^='data:image/']")
        assert visitor.page.evaluate(PIXELS) is None
        visitor.page.get_by_role("button", name="Cancel a cat").click()


def test_a_video_begins_with_a_picture(visitor, server):
    page = visitor.page
    page.select_option("#model", "wan-i2v")
    assert page.locator("#source-summary").inner_text() == "needed"
    visitor.draw("it moves")
    page.get_by_text("wan-i2v begins with a picture; choose one first.").wait_for()
    drop(visitor, png(size=(64, 128)), on="#source .picker")
    page.wait_for_selector("canvas.source")
    # The model's pixels in the picture's shape.
    assert [page.input_value(f"#{name}") for name in ("width", "height")] == ["48", "112"]
    assert not page.locator("#field-strength").is_visible()
    visitor.draw("it moves", num_inference_steps=3)
    visitor.pictures(1)
    assert server.asked[-1]["image"].startswith("data:image/png")
    assert "strength" not in server.asked[-1]
    visitor.page.locator(".tile .open").click()
    # Its picture is not kept, so that it cannot be drawn again.
    assert "Four more" not in page.locator(".deeds button:visible").all_inner_texts()
    assert "Image to video" in page.locator("#plan").inner_text()


def test_a_model_with_random_weights_makes_a_clip_that_plays(browser, tmp_path):
    wan_pipeline(tmp_path / "toy")
    with running(None, tmp_path) as server, visiting(browser, server.url) as visitor:
        page = visitor.page
        page.set_default_timeout(60_000)
        page.select_option("#model", "toy")
        fields = {"width": 64, "height": 48, "num_frames": 9, "guidance_scale": 1}
        visitor.draw("a cat walks", **fields, num_inference_steps=2)
        visitor.pictures(1)
        page.locator(".tile .open").click()
        found = shown(visitor)
        assert (found["videoWidth"], found["videoHeight"]) == (64, 48)
        assert found["duration"] == pytest.approx(9 / 16, abs=0.01)
