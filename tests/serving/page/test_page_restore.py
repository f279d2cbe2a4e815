"""Settings and pictures that are dropped on the page, pasted into it, or chosen."""

import io

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

pytest.importorskip("starlette")

from support.browser import drop, pixels, png, transferred

pytestmark = pytest.mark.slow


def test_a_dropped_png_brings_its_settings_back(visitor, server):
    page = visitor.page
    text = (
        "a frog, (green:1.2)\non a leaf\nNegative prompt: blurred\nSteps: 12, Sampler: DPM++ 2M, "
        'Schedule type: Karras, CFG scale: 3.5, Seed: 99, Size: 96x64, Model: sd, Note: "a, b: c"'
    )
    drop(visitor, png(text))
    page.get_by_text("The settings of dropped.png are back").wait_for()
    names = ("prompt", "negative_prompt", "num_inference_steps", "sampler", "guidance_scale")
    found = [page.input_value(f"#{name}") for name in (*names, "seed", "width", "height", "model")]
    prompt = "a frog, (green:1.2)\non a leaf"
    assert found == [prompt, "blurred", "12", "dpm++2m_karras", "3.5", "99", "96", "64", "sd"]
    drop(visitor, png("Steps: 3, Sampler: Strange, Seed: 4"), name="other.png")
    page.get_by_text("The settings of other.png are back").wait_for()
    found = [page.input_value(f"#{name}") for name in ("prompt", "num_inference_steps", "seed")]
    assert found == ["", "3", "4"]
    assert server.requests == ["/png-info"] * 2


def test_who_drops_a_png_while_the_server_is_away_is_told(visitor, server):
    server.stop()
    drop(visitor, png("a frog\nSteps: 3, Sampler: Euler, Seed: 4"))
    visitor.page.get_by_text("The server does not answer").first.wait_for()
    visitor.page.get_by_role("button", name="Begin with it").wait_for()
    server.start()


def test_settings_come_back_from_every_kind_of_text_in_a_chosen_png(visitor):
    page = visitor.page
    visitor.open("more")
    for seed, kind in enumerate(("itxt", "packed itxt", "packed"), start=20):
        info = PngInfo()
        text = f"füchse – 狐\nSteps: 12, Sampler: Euler a, Seed: {seed}"
        if "itxt" in kind:
            info.add_itxt("parameters", text, zip="packed" in kind)
        else:
            info.add_text("parameters", text.replace("狐", "").replace("–", "-"), zip=True)
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, "PNG", pnginfo=info)
        file = {"name": f"{kind}.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
        page.locator("#restore input").set_input_files(file)
        page.get_by_text(f"The settings of {kind}.png are back").wait_for()
        assert page.input_value("#prompt").startswith("füchse")
        assert page.input_value("#seed") == str(seed)
        assert page.input_value("#sampler") == "euler_a"


def test_a_png_without_settings_is_offered_as_the_picture_to_begin_with(visitor):
    page = visitor.page
    drop(visitor, png())
    page.get_by_role("button", name="Begin with it").click()
    page.wait_for_selector("canvas.source")
    drop(visitor, png(size=(3000, 1500)))
    page.get_by_role("button", name="Begin with it").click()
    page.get_by_text("dropped.png, 2048 × 1024").wait_for()
    page.click("#no-picture")
    drop(visitor, b"no picture", name="broken.png", on="#restore .picker")
    page.get_by_text("broken.png has no settings in it").wait_for()
    drop(visitor, b"no picture", name="broken.png", on="#controls .picker")
    page.get_by_text("broken.png is not a picture that this browser reads").wait_for()


def test_a_pasted_picture_is_the_one_to_begin_with(visitor, server):
    paste = """(clipboardData) => {
        const options = { clipboardData, bubbles: true, cancelable: true };
        document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", options));
    }"""
    visitor.page.evaluate(paste, transferred(visitor, png(colour="blue"), "pasted.png"))
    visitor.page.wait_for_selector("canvas.source")
    visitor.draw("a frog")
    visitor.pictures(1)
    assert pixels(server.asked[0]["image"])[3, 3].tolist() == [0, 0, 255]


def test_what_a_text_lacks_becomes_the_default_and_what_it_says_beyond_is_named(visitor, server):
    page = visitor.page
    for group in ("more", "model", "size"):
        visitor.open(group)
    page.fill("#seed", "7")
    page.fill("#clip_skip", "2")
    page.select_option("#sampler", "heun")
    page.uncheck("#prompt_weighting")
    text = (
        "a frog\nSteps: 12, Sampler: DDIM, Schedule type: Karras, CFG scale: 3, Size: 96x64, "
        "Variation seed: 5, Variation seed strength: 0.3, Refiner: xl, Hires upscale: 2, "
        'Model: other, ControlNet 0: "Module: canny, Model: edges"'
    )
    drop(visitor, png(text))
    told = page.get_by_text("The settings of dropped.png are back, but for").inner_text()
    for part in ("Model: other", "Schedule type: Karras", "Variation seed: 5", "Refiner: xl"):
        assert part in told
    for part in ("Hires upscale: 2", "ControlNet 0", "It does not tell seed"):
        assert part in told
    names = ("num_inference_steps", "sampler", "seed", "clip_skip")
    assert [page.input_value(f"#{name}") for name in names] == ["12", "ddim", "", ""]
    assert page.is_checked("#prompt_weighting")
    drop(visitor, png("a frog\nSteps: 3, Sampler: Restart, Seed: 4, Prompt weighting: False"))
    page.get_by_text("are back, but for: Sampler: Restart").wait_for()
    assert page.input_value("#sampler") == ""
    assert not page.is_checked("#prompt_weighting")
    visitor.draw("a (green:1.2) frog")
    visitor.pictures(1)
    assert server.asked[-1]["prompt_weighting"] is False


def test_settings_come_back_from_the_comment_of_a_jpeg(visitor):
    exif = Image.Exif()
    text = "りんご\nSteps: 12, Sampler: Euler a, Seed: 5, CFG scale: 2, Size: 64x64"
    exif[0x8769] = {0x9286: b"UNICODE\0" + text.encode("utf-16-be")}
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG", exif=exif)
    drop(visitor, buffer.getvalue(), name="a.jpg")
    visitor.page.get_by_text("The settings of a.jpg are back.").wait_for()
    assert visitor.page.input_value("#prompt") == "りんご"
