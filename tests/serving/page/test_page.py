"""The page in a real browser, before a server that draws at the pace of the test."""

import pytest
from PIL import Image

pytest.importorskip("starlette")

from support.browser import drop, pixels, png, violations, visiting, waiting


def test_a_drawing_is_kept_with_its_seed_and_axe_finds_nothing(visitor, server):
    visitor.draw("a red apple", seed=7, num_inference_steps=3)
    visitor.pictures(1)
    [asked] = server.asked
    assert (asked["prompt"], asked["seed"], asked["model"]) == ("a red apple", 7, "emoji")
    assert violations(visitor.page) == []
    visitor.page.locator(".tile .open").click()
    assert "Seed7" in visitor.page.locator(".facts").inner_text().replace("\n", "")
    assert violations(visitor.page) == []


def test_the_page_says_what_takes_long_and_which_sizes_are_poor(visitor, server):
    server.compiling = True
    visitor.draw("a red apple", num_inference_steps=3)
    visitor.page.get_by_text("Compiling").first.wait_for()
    server.compiling = False
    visitor.pictures(1)
    visitor.open("size")
    hint = visitor.page.locator("#size-hint")
    sizes = {(64, 64): False, (128, 120): False, (128, 128): True, (32, 32): True}
    for (width, height), poor in sizes.items():
        visitor.page.fill("#width", str(width))
        visitor.page.fill("#height", str(height))
        assert bool(hint.inner_text()) == poor
    assert violations(visitor.page) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_part_of_the_page_is_fit_for_all_people(browser, server, scheme, width):
    size = {"width": width, "height": 844}
    with visiting(browser, server.url, viewport=size, color_scheme=scheme) as visitor:
        page = visitor.page
        assert violations(page) == []
        visitor.open("source")
        drop(visitor, png(), on="#source .picker")
        page.wait_for_selector("canvas.source")
        for group in (
            "size",
            "model",
            "styles",
            "wildcards",
            "loras",
            "embeddings",
            "controls",
            "larger",
            "grid",
            "more",
        ):
            visitor.open(group)
        drop(visitor, png(), on="#controls .picker")
        page.select_option("#lora-add", "pixel")
        page.check("#grid")
        page.select_option("#grid-x", "sampler")
        page.check("#grid-axes input[value=euler]")
        assert violations(page) == []
        page.click("#paint")
        visitor.paint((0.4, 0.4), (0.6, 0.6))
        assert violations(page) == []
        page.keyboard.press("Escape")
        server.pace = None
        page.click("#draw")
        page.locator("td[data-kind=job]").first.wait_for()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_keyboard_alone_draws_and_looks(visitor, server):
    page = visitor.page
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("/")
    page.keyboard.type("a cat")
    page.keyboard.press("Control+ArrowUp")
    page.keyboard.press("Control+Enter")
    visitor.pictures(1)
    assert server.asked[0]["prompt"] == "a (cat:1.1)"
    page.locator(".tile .open").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#viewer[open]")
    page.keyboard.press("Delete")
    page.wait_for_selector("#viewer[open]", state="hidden")
    page.wait_for_selector("#empty")
    page.get_by_role("button", name="Undo").click()
    visitor.pictures(1)


@pytest.mark.slow
def test_preview_progress_and_place_in_the_queue_are_shown(visitor, server):
    server.pace = 0.2
    for _ in range(3):
        visitor.draw("a frog", num_inference_steps=20)
    visitor.page.wait_for_selector(".drawing > img[src^='data:image/']")
    visitor.page.get_by_text("of 20").first.wait_for()
    visitor.page.locator(".words", has_text="left").first.wait_for()
    assert "2 drawing · 1 waiting" in visitor.page.locator("#queue").inner_text()
    server.pace = 0.005
    visitor.pictures(3)
    assert visitor.page.title() == "diffusax"


@pytest.mark.slow
def test_a_cancelled_drawing_goes(visitor, server):
    server.pace = None
    visitor.draw("a frog")
    visitor.draw("a cat")
    waiting(lambda: len(server.jobs) == 2)
    visitor.page.get_by_role("button", name="Cancel a frog").click()
    visitor.page.locator(".tile[data-kind=job]").nth(1).wait_for(state="detached")
    waiting(lambda: [job["state"] for job in server.jobs.values()] == ["cancelled", "queued"])
    server.pace = 0.01
    visitor.pictures(1)


@pytest.mark.slow
def test_several_pictures_have_a_seed_each(visitor, server):
    visitor.open("size")
    visitor.draw("a frog", num_images=3, seed=10)
    visitor.pictures(3)
    seeds = []
    for at in range(3):
        visitor.act("Use its seed", at)
        seeds.append(visitor.page.input_value("#seed"))
    assert seeds == ["10", "11", "12"]
    visitor.page.click("#seed-random")
    visitor.draw("a frog", num_images=1)
    visitor.pictures(4)
    visitor.page.click("#seed-last")
    assert visitor.page.input_value("#seed") == str(server.asked[3]["seed"])


@pytest.mark.slow
def test_a_picture_that_is_deleted_before_its_drawing_ends_stays_so(visitor, server):
    server.pace = 0.1
    # Earlier versions of the page asked for several pictures at once.
    drawing = {"prompt": "a frog", "num_images": 2, "num_inference_steps": 12, "seed": 1}
    drawing |= {"width": 64, "height": 64, "model": "emoji"}
    record = {"id": "old", "created": 1, "state": "unsent", "drawing": drawing}
    visitor.call("store.js", "await m.put('jobs', v[0])", record)
    waiting(lambda: any(job["pictures"][0] for job in server.jobs.values()))
    server.pace = None
    visitor.page.locator(".tile .open").click()
    visitor.page.keyboard.press("Delete")
    visitor.page.wait_for_selector(".tile .open", state="detached")
    assert visitor.page.locator(".tile").count() == 1
    server.pace = 0.01
    visitor.pictures(1)
    waiting(lambda: visitor.page.title() == "diffusax")
    visitor.pictures(1)


@pytest.mark.slow
def test_inpainting_sends_what_the_brush_painted(visitor, server):
    page = visitor.page
    visitor.draw("a frog")
    visitor.pictures(1)
    visitor.act("Draw a part anew")
    page.wait_for_selector("#brush[open]")
    before = page.locator("#brush-size").input_value()
    page.keyboard.press("]")
    assert int(page.locator("#brush-size").input_value()) > int(before)
    page.keyboard.press("[")
    visitor.paint((0.25, 0.25), (0.75, 0.25))
    visitor.paint((0.25, 0.75), (0.75, 0.75))
    page.keyboard.press("Control+z")
    page.keyboard.press("+")
    visitor.paint((0.5, 0.5))
    page.keyboard.press("e")
    visitor.paint((0.75, 0.25))
    page.get_by_role("button", name="Done").click()
    visitor.draw("an apple")
    visitor.pictures(2)
    visitor.draw("a pear", strength=0.5)
    visitor.pictures(3)
    first, second = server.asked[1:]
    mask = pixels(first["mask_image"])[..., 0] > 127
    assert mask.shape == (64, 64)
    assert mask[16, 16]
    assert mask[32, 32]
    assert not mask[48, 32]
    assert not mask[16, 48]
    assert second["mask_image"] == first["mask_image"]
    assert second["strength"] == 0.5
    assert pixels(first["image"]).shape == (64, 64, 3)


@pytest.mark.slow
def test_the_brush_works_by_keys_and_the_picture_moves(visitor, server):
    page = visitor.page
    drop(visitor, png(size=(96, 48)), on="#source input + span")
    page.click("#paint")
    place = page.locator(".sheet").get_attribute("style")
    page.mouse.move(600, 400)
    page.keyboard.down(" ")
    page.mouse.down()
    page.mouse.move(650, 430)
    page.mouse.up()
    page.keyboard.up(" ")
    assert page.locator(".sheet").get_attribute("style") != place
    page.keyboard.press("0")
    assert page.locator(".sheet").get_attribute("style") == place
    page.mouse.move(5, 5)
    page.get_by_role("application").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Invert").click()
    page.get_by_role("button", name="Done").click()
    visitor.draw("a frog")
    visitor.pictures(1)
    [asked] = server.asked
    assert asked["width"] > asked["height"]
    mask = pixels(asked["mask_image"])[..., 0] > 127
    assert 0.5 < mask.mean() < 1


@pytest.mark.slow
def test_an_edit_has_its_picture_and_two_scales(visitor, server):
    page = visitor.page
    drop(visitor, png(), on="#controls .picker")
    page.get_by_text("1 on").wait_for()
    page.select_option("#model", "emoji-edit")
    visitor.draw("make it blue")
    page.get_by_text("changes pictures; choose one first").wait_for()
    assert server.asked == []
    drop(visitor, png(colour="red"), on="#source input + span")
    visitor.draw("make it blue", guidance_scale=3.5, image_guidance_scale=1.2)
    visitor.pictures(1)
    [asked] = server.asked
    assert asked["guidance_scale"] == 3.5
    assert asked["image_guidance_scale"] == 1.2
    assert "strength" not in asked
    assert "controls" not in asked
    assert pixels(asked["image"])[5, 5].tolist() == [255, 0, 0]


@pytest.mark.slow
def test_loras_and_controlnets_are_sent(visitor, server):
    page = visitor.page
    visitor.open("loras")
    page.select_option("#lora-add", "pixel")
    page.fill("#lora-pixel", "0.6")
    visitor.open("controls")
    drop(visitor, png(size=(128, 64)), on="#controls .picker span")
    page.get_by_label("Until").fill("0.8")
    visitor.open("embeddings")
    page.get_by_role("button", name="sunny").click()
    page.press("#prompt", "Control+Enter")
    visitor.pictures(1)
    [asked] = server.asked
    assert asked["adapters"] == {"pixel": 0.6}
    [control] = asked["controls"]
    assert (control["model"], control["scale"], control["end"]) == ("edges", 1, 0.8)
    assert pixels(control["image"]).shape == (64, 64, 3)
    assert asked["prompt"] == "sunny"


@pytest.mark.slow
def test_a_drawing_is_drawn_once_more_larger(visitor, server):
    visitor.open("larger")
    visitor.page.check("#larger")
    visitor.draw("a frog", seed=3, larger_scale=1.5)
    visitor.pictures(1)
    first, second = server.asked
    assert "image" not in first
    assert (second["width"], second["height"]) == (96, 96)
    assert second["strength"] == 0.5
    assert second["seed"] == 3
    assert pixels(second["image"]).shape == (96, 96, 3)


@pytest.mark.slow
def test_a_grid_is_one_set_of_jobs_with_one_seed(visitor, server):
    page = visitor.page
    visitor.open("grid")
    page.check("#grid")
    page.fill("#grid-x-values", "4-8 (+2)")
    page.select_option("#grid-y", "sampler")
    for name in ("euler", "heun"):
        page.check(f"#grid-axes input[value={name}]")
    visitor.draw("a frog")
    visitor.pictures(6)
    cells = {(asked["num_inference_steps"], asked["sampler"]) for asked in server.asked}
    assert cells == {(steps, name) for steps in (4, 6, 8) for name in ("euler", "heun")}
    assert len({asked["seed"] for asked in server.asked}) == 1
    assert page.locator("th").all_inner_texts() == [
        "Steps 4",
        "Steps 6",
        "Steps 8",
        "Euler",
        "Heun",
    ]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as one picture").click()
    assert Image.open(download.value.path()).width > 3 * 64
    page.reload()
    visitor.pictures(6)
    page.get_by_role("button", name="Delete the grid").click()
    page.wait_for_selector("#empty")


@pytest.mark.slow
def test_a_grid_goes_through_the_weights_of_a_lora(visitor, server):
    page = visitor.page
    visitor.open("grid")
    page.check("#grid")
    page.select_option("#grid-x", "lora")
    page.select_option("#grid-x-lora", "sketch")
    page.fill("#grid-x-values", "0-1 [3]")
    page.select_option("#grid-y", "seed")
    page.fill("#grid-y-values", "1, 2")
    visitor.draw("a frog")
    visitor.pictures(6)
    cells = {(asked["adapters"]["sketch"], asked["seed"]) for asked in server.asked}
    assert cells == {(weight, seed) for weight in (0, 0.5, 1) for seed in (1, 2)}
    page.select_option("#grid-x", "strength")
    page.fill("#grid-x-values", "0.5")
    page.click("#draw")
    page.get_by_text("Strength counts only where a drawing begins with a picture").wait_for()


@pytest.mark.slow
def test_the_theme_that_was_chosen_stays(browser, server):
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    with visiting(browser, server.url, color_scheme="light") as visitor:
        light = visitor.page.evaluate(colour)
        visitor.page.click("#theme")
        assert visitor.page.inner_text("#theme") == "Theme: dark"
        dark = visitor.page.evaluate(colour)
        assert dark != light
        visitor.page.reload()
        assert visitor.page.evaluate(colour) == dark
        visitor.page.click("#theme")
        assert visitor.page.evaluate(colour) == light
