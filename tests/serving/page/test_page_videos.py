"""Videos on the page: begun with, drawn, shown meanwhile, played, kept and drawn again."""

import io

import pytest

pytest.importorskip("starlette")
pytest.importorskip("imageio_ffmpeg")

from PIL import Image
from support.browser import drop, pixels, png, violations, visiting, waiting
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
    drop(moving, data, "a.mp4")
    page.get_by_text("The settings of a.mp4 are back").wait_for()
    values = [page.input_value(f"#{name}") for name in ("prompt", "seed", "num_frames", "fps")]
    assert values == ["a cat walks", "7", "5", "10"]
    # On a model of images they have no place.
    page.select_option("#model", "emoji")
    drop(moving, data, "a.mp4")
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


def clip(size=(64, 32), count=9, text=""):
    """The bytes of an MP4."""
    frames = [Image.new("RGB", size, (20 * i, 90, 90)) for i in range(count)]
    return clips.encode_video(frames, 10, text).data


def test_a_video_begins_with_a_video(visitor, server):
    page = visitor.page
    page.select_option("#model", "wan-v2v")
    assert page.locator("#source-title").inner_text() == "Video"
    assert not page.locator("#source").is_visible()
    visitor.open("source")
    assert not page.locator("#field-strength").is_visible()
    drop(visitor, clip(), "walk.mp4", on="#clip .picker")
    player = page.locator("#clip video.source")
    player.wait_for()
    waiting(lambda: player.evaluate("(one) => one.readyState") >= 1)
    assert player.evaluate("(one) => [one.controls, one.videoWidth]") == [True, 64]
    assert page.locator("#clip .hint").inner_text() == "walk.mp4, 64 × 32, 0.9 s"
    assert "Video to video · 112 × 48 · the video's frames" in page.locator("#plan").inner_text()
    assert not page.locator("#group-video").is_visible()
    assert violations(page) == []
    visitor.draw("a dog walks", strength=0.6, num_inference_steps=3)
    visitor.pictures(1)
    asked = server.asked[-1]
    assert asked["video"].startswith("data:video/mp4;base64,")
    assert asked["strength"] == 0.6
    assert not {"image", "num_frames", "fps", "mask_video"} & set(asked)
    page.uncheck("#whole")
    visitor.draw("a dog walks", num_frames=5, fps=6, num_inference_steps=3)
    visitor.pictures(2)
    assert (server.asked[-1]["num_frames"], server.asked[-1]["fps"]) == (5, 6)
    # It is there after a reload, and gone when it is taken away.
    page.reload()
    visitor.connected()
    player.wait_for()
    assert not page.is_checked("#whole")
    page.get_by_role("button", name="No video").click()
    assert page.evaluate("document.activeElement.closest('#clip') !== null")
    visitor.draw("a dog walks", num_inference_steps=3)
    visitor.pictures(3)
    assert not {"video", "strength"} & set(server.asked[-1])
    page.get_by_role("button", name="Undo").click()
    player.wait_for()
    page.select_option("#model", "emoji")
    visitor.draw("a frog", num_inference_steps=3)
    visitor.pictures(4)
    assert "video" not in server.asked[-1]


def test_a_drawn_video_or_a_gif_is_begun_with(visitor, server):
    page = visitor.page
    page.select_option("#model", "wan-v2v")
    visitor.draw("a cat walks", num_frames=5, num_inference_steps=3)
    visitor.pictures(1)
    visitor.act("Begin with this video")
    page.locator("#clip video.source").wait_for()
    assert "96 × 64" in page.locator("#clip .hint").inner_text()
    page.get_by_role("button", name="No video").click()
    gif = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:])
    drop(visitor, gif.getvalue(), "two.gif", on="#clip .picker")
    page.locator("#clip img.source").wait_for()
    visitor.draw("it turns", num_inference_steps=3)
    visitor.pictures(2)
    assert server.asked[-1]["video"].startswith("data:image/gif")
    # What is dropped on the page brings its settings, or can be begun with.
    page.get_by_role("button", name="No video").click()
    drop(
        visitor, clip(text="a bird\nSteps: 4, Sampler: Euler a, Seed: 3"), "bird.mp4", on="#prompt"
    )
    page.get_by_text("The settings of bird.mp4 are back").wait_for()
    assert page.input_value("#prompt") == "a bird"
    page.get_by_role("button", name="Begin with it").click()
    page.locator("#clip video.source").wait_for()


def test_what_is_no_video_or_too_large_is_told(visitor, server):
    page = visitor.page
    server.most_body = 4000
    page.reload()
    visitor.connected()
    page.select_option("#model", "wan-v2v")
    visitor.open("source")
    drop(visitor, b"nothing", "broken.mp4", on="#clip .picker")
    page.get_by_text("broken.mp4 is no video that this browser plays").wait_for()
    drop(visitor, png(), "a.png", on="#clip .picker")
    page.get_by_text("That was no video; drop an MP4, WebM or GIF.").wait_for()
    drop(visitor, clip() + bytes(4000), "long.mp4", on="#clip .picker")
    page.get_by_text("long.mp4 is too large for the server").wait_for()
    assert page.locator("#clip .picker").is_visible()
    page.select_option("#model", "emoji")
    drop(visitor, clip(), "walk.mp4", on="#source .picker")
    page.get_by_text("That was no picture; drop a PNG, JPEG or WebP.").wait_for()


def test_a_video_steers_with_a_mask_beside_pictures(visitor, server):
    page = visitor.page
    page.select_option("#model", "vace")
    assert page.locator("#source-title").inner_text() == "Picture or video"
    visitor.open("source")
    drop(visitor, png(), on="#source .picker")
    page.wait_for_selector("canvas.source")
    # A video that is dropped where a picture goes is taken, too.
    page.get_by_role("button", name="No picture").click()
    drop(visitor, clip(), "walk.mp4", on="#source .picker")
    page.locator("#clip video.source").wait_for()
    drop(visitor, png(size=(64, 128)), on="#source .picker")
    page.wait_for_selector("canvas.source")
    drop(visitor, png(colour="white"), "mask.png", on="#clip-mask .picker")
    page.locator("#clip-mask img.source").wait_for()
    assert not page.locator("#field-strength").is_visible()
    assert violations(page) == []
    visitor.draw("a dog", num_inference_steps=3)
    visitor.pictures(1)
    asked = server.asked[-1]
    # It looks at the whole picture; the shape is the video's.
    assert pixels(asked["image"]).shape == (128, 64, 3)
    assert (asked["width"], asked["height"]) == (112, 48)
    assert asked["video"].startswith("data:video/mp4")
    assert (pixels(asked["mask_video"]) == 255).all()
    assert "strength" not in asked
    page.get_by_role("button", name="No mask").click()
    drop(visitor, clip(), "mask.mp4", on="#clip-mask .picker")
    page.locator("#clip-mask video.source").wait_for()
    visitor.draw("a dog", num_inference_steps=3)
    visitor.pictures(2)
    assert server.asked[-1]["mask_video"].startswith("data:video/mp4")


def test_a_video_ends_with_a_picture(visitor, server):
    page = visitor.page
    page.select_option("#model", "wan-i2v")
    visitor.open("source")
    drop(visitor, png(), on="#source .picker")
    page.wait_for_selector("canvas.source")
    assert not page.locator("#last").is_visible()
    page.select_option("#model", "wan-ends")
    visitor.draw("it moves")
    page.get_by_text("wan-ends ends with a picture, too; choose it first.").wait_for()
    page.fill("#negative_prompt", "still")
    assert page.get_by_text("wan-ends ends with a picture").is_visible()
    assert server.asked == []
    drop(visitor, png(colour="blue"), "end.png", on="#last .picker")
    page.locator("#last img.source").wait_for()
    assert not page.get_by_text("wan-ends ends with a picture").is_visible()
    assert violations(page) == []
    visitor.draw("it moves", num_inference_steps=3)
    visitor.pictures(1)
    assert (pixels(server.asked[-1]["last_image"]) == (0, 0, 255)).all()
    page.select_option("#model", "wan-i2v")
    visitor.draw("it moves", num_inference_steps=3)
    visitor.pictures(2)
    assert "last_image" not in server.asked[-1]


def test_the_late_steps_have_a_scale_of_their_own(visitor, server):
    page = visitor.page
    page.select_option("#model", "wan-v2v")
    visitor.draw("a cat", guidance_scale_2=3.5, num_inference_steps=3)
    visitor.pictures(1)
    assert server.asked[-1]["guidance_scale_2"] == 3.5
    page.locator(".tile .open").click()
    assert "late steps3.5" in page.locator(".facts").inner_text().replace("\n", "")
    page.keyboard.press("Escape")
    # From a video there is one scale, as for other models.
    visitor.open("source")
    drop(visitor, clip(), "walk.mp4", on="#clip .picker")
    page.locator("#clip video.source").wait_for()
    assert not page.locator("#field-guidance-2").is_visible()
    visitor.draw("a cat", num_inference_steps=3)
    visitor.pictures(2)
    page.select_option("#model", "wan")
    assert not page.locator("#field-guidance-2").is_visible()
    visitor.draw("a cat", num_inference_steps=3)
    visitor.pictures(3)
    assert not any("guidance_scale_2" in asked for asked in server.asked[1:])


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
