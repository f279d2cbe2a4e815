"""Finding, choosing, comparing and saving pictures, and each picture while it is drawn."""

import zipfile

import pytest
from PIL import Image

pytest.importorskip("starlette")

from support.browser import violations, visiting, waiting

PICTURES = ".tile[data-kind=picture]"


def drawn(visitor, *prompts):
    """Draws a picture of each prompt with the seeds 1, 2, 3; the last one stands first."""
    visitor.open("size")
    for count, prompt in enumerate(prompts, 1):
        visitor.draw(prompt, seed=count)
        visitor.pictures(count)


def names(visitor):
    found = visitor.page.locator(f"{PICTURES} img").all()
    return [image.get_attribute("alt") for image in found]


def test_what_is_searched_for_is_found_and_chosen_pictures_are_saved(visitor, server):
    page = visitor.page
    drawn(visitor, "a red frog", "a cat", "a green frog")
    page.keyboard.press("Escape")
    page.fill("#find", "FROG red")
    page.locator(PICTURES).nth(1).wait_for(state="detached")
    assert names(visitor) == ["a red frog"]
    page.fill("#find", "no such")
    page.get_by_role("button", name="Show all").click()
    visitor.pictures(3)
    page.click("#select")
    page.locator(".tile .open").nth(0).click()
    page.locator(".tile .open").nth(2).click(modifiers=["Shift"])
    assert page.inner_text("#chosen-count") == "3 chosen"
    page.locator(".tile .open").nth(1).click()
    assert violations(page) == []
    with page.expect_download() as download:
        page.click("#chosen-download")
    with zipfile.ZipFile(download.value.path()) as packed:
        assert packed.testzip() is None
        assert packed.namelist() == ["3-a-green-frog.png", "1-a-red-frog.png"]
        with packed.open("1-a-red-frog.png") as file:
            assert Image.open(file).text["parameters"].startswith("a red frog")
    page.click("#chosen-delete")
    page.locator(PICTURES).nth(1).wait_for(state="detached")
    assert names(visitor) == ["a cat"]
    page.get_by_role("button", name="Undo").click()
    visitor.pictures(3)
    assert names(visitor) == ["a green frog", "a cat", "a red frog"]


@pytest.mark.slow
def test_all_pictures_are_exported_though_names_are_the_same(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog")
    visitor.draw("a frog", seed=1)
    visitor.pictures(2)
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "diffusax.zip"
    with zipfile.ZipFile(download.value.path()) as packed:
        assert packed.testzip() is None
        assert packed.namelist() == ["1-a-frog.png", "1-a-frog-2.png"]


@pytest.mark.slow
def test_favourites_are_shown_alone_and_stay(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog", "a cat", "a dog")
    page.locator(PICTURES).nth(1).hover()
    page.get_by_role("button", name="Favourite: a cat").click()
    page.click("#favourites")
    page.locator(PICTURES).nth(1).wait_for(state="detached")
    assert names(visitor) == ["a cat"]
    page.reload()
    visitor.pictures(3)
    page.locator(".tile .open").nth(2).focus()
    page.keyboard.press("s")
    waiting(lambda: page.locator(".tile .star[aria-pressed=true]").count() == 2)
    page.locator(".tile .open").nth(2).click()
    page.keyboard.press("s")
    page.keyboard.press("Escape")
    waiting(lambda: page.locator(".tile .star[aria-pressed=true]").count() == 1)


@pytest.mark.slow
def test_keys_choose_pictures(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog", "a cat", "a dog")
    page.locator(".tile .open").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("x")
    page.keyboard.press("Shift+ArrowRight")
    assert page.inner_text("#chosen-count") == "2 chosen"
    pressed = page.locator(".tile .open[aria-pressed=true]")
    pressed.nth(1).wait_for()
    assert [one.get_attribute("title")[:5] for one in pressed.all()] == ["a cat", "a fro"]
    page.keyboard.press("Control+a")
    assert page.inner_text("#chosen-count") == "3 chosen"
    page.keyboard.press("Escape")
    assert page.locator("#chosen").is_hidden()
    page.locator(".tile .open").nth(1).click(modifiers=["Control"])
    page.keyboard.press("Delete")
    page.locator(PICTURES).nth(2).wait_for(state="detached")
    assert names(visitor) == ["a dog", "a frog"]


@pytest.mark.slow
def test_two_pictures_are_compared(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog", "a cat")
    page.locator(".tile .open").first.click(modifiers=["Control"])
    assert page.locator("#chosen-compare").is_disabled()
    page.locator(".tile .open").nth(1).click()
    page.click("#chosen-compare")
    assert violations(page) == []
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    clip = "document.querySelectorAll('.both img')[1].style.clipPath"
    assert page.evaluate(clip) == "inset(0px 100% 0px 0px)"
    cells = page.locator(".differences td").all_inner_texts()
    assert cells == ["a frog", "a cat", "1", "2"]
    page.get_by_role("button", name="Swap", exact=True).click()
    assert page.locator(".differences td").all_inner_texts() == ["a cat", "a frog", "2", "1"]
    page.keyboard.press("Escape")
    page.click("#chosen-done")
    visitor.act("Compare")
    page.wait_for_selector("#compare[open]")


def test_each_picture_has_its_progress_and_is_cancelled_by_itself(visitor, server):
    page = visitor.page
    server.pace = None
    visitor.open("size")
    visitor.draw("a frog", num_images=4, seed=1)
    waiting(lambda: len(server.jobs) == 4)
    assert [asked["seed"] for asked in server.asked] == [1, 2, 3, 4]
    page.locator(".tile .cancel").nth(1).click()
    waiting(lambda: [job["state"] for job in server.jobs.values()].count("cancelled") == 1)
    assert server.jobs["job2"]["state"] == "cancelled"
    page.locator(".tile[data-kind=job]").nth(3).wait_for(state="detached")
    server.pace = 0.005
    visitor.pictures(3)
    titles = [one.get_attribute("title") for one in page.locator(".tile .open").all()]
    assert titles == ["a frog\nseed 1", "a frog\nseed 3", "a frog\nseed 4"]


@pytest.mark.slow
def test_what_is_drawn_stands_large_before_what_waits(visitor, server):
    page = visitor.page
    server.compiling = True
    visitor.draw("a frog", num_inference_steps=50)
    page.locator(".tile", has_text="Compiling").wait_for()
    server.compiling, server.pace = False, 0.1
    visitor.draw("a cat", num_inference_steps=50)
    visitor.draw("a dog")
    waiting(lambda: page.locator(".tile[data-state=running]").count() == 2)
    bars = [bar.get_attribute("aria-label") for bar in page.locator(".tile progress").all()]
    assert bars == ["Progress of a cat", "Progress of a frog", "Progress of a dog"]
    boxes = [tile.bounding_box()["width"] for tile in page.locator(".tile").all()]
    assert boxes[0] > 1.9 * boxes[1]
    server.pace = 0.001
    visitor.pictures(3)


@pytest.mark.slow
def test_four_more_and_four_variations_are_drawn_from_a_picture(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog")
    visitor.act("Four more")
    visitor.pictures(5)
    more = server.asked[1:]
    assert {asked["prompt"] for asked in more} == {"a frog"}
    assert len({asked["seed"] for asked in more} | {1}) == 5
    assert all("image" not in asked for asked in more)
    visitor.act("Four variations", at=4)
    visitor.pictures(9)
    varied = server.asked[5:]
    assert [asked["strength"] for asked in varied] == [0.5] * 4
    assert all(asked["image"].startswith("data:image/png") for asked in varied)
    page.locator(".tile .open").first.click()
    assert page.get_by_role("button", name="Four more").count() == 0


@pytest.mark.slow
def test_pictures_are_enlarged_where_the_server_can(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog")
    page.locator(".tile .open").click()
    assert page.get_by_role("button", name="Enlarge twice").count() == 0
    server.upscales = True
    page.reload()
    visitor.pictures(1)
    page.locator(".tile .open").click()
    page.locator("#upscaler").wait_for()
    assert page.locator("#upscaler option").all_inner_texts() == ["sharp", "Lanczos", "Nearest"]
    server.wrong = "the upscaler is broken"
    page.get_by_role("button", name="Enlarge twice").click()
    page.get_by_text("the upscaler is broken").wait_for()
    page.get_by_role("button", name="Enlarge twice").click()
    page.locator(".facts", has_text="128 × 128").wait_for()
    assert page.get_by_text("the upscaler is broken").count() == 0
    assert violations(page) == []
    assert server.asked[-1]["upscaler_1"] == "sharp"
    page.keyboard.press("Escape")
    visitor.pictures(2)


@pytest.mark.slow
def test_pictures_of_an_earlier_version_are_read(visitor, server):
    page = visitor.page
    drawn(visitor, "a frog")
    older = """async () => {
        const m = await import('/page/store.js');
        const [{ written, favourite, ...picture }] = await m.newest('pictures', 1);
        await m.put('pictures', { ...picture, id: 'old/0', created: 5 });
        const drawing = { ...picture.settings, num_images: 2 };
        await m.put('jobs', { id: 'job', created: 1, state: 'failed', error: 'so', drawing });
    }"""
    page.evaluate(older)
    page.reload()
    visitor.pictures(2)
    page.locator(".why", has_text="so").wait_for()
    page.locator(".tile .open").nth(1).click()
    assert violations(page) == []


@pytest.mark.slow
def test_what_fails_is_said_once_and_goes_when_it_is_mended(visitor, server):
    page = visitor.page
    server.unfit = "prompt must be shorter"
    visitor.open("size")
    visitor.draw("a frog", num_images=3)
    page.locator(".why", has_text="2 more were not handed in").wait_for()
    waiting(lambda: page.locator(".tile").count() == 1)
    assert violations(page) == []
    page.get_by_role("button", name="Draw again").click()
    visitor.pictures(3)
    seeds = [asked["seed"] for asked in server.asked]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    server.unfit = "prompt must be shorter"
    visitor.draw("a long frog", num_images=1)
    page.get_by_role("button", name="Change it").click()
    assert page.input_value("#prompt") == "a long frog"
    visitor.draw("a cat")
    visitor.pictures(4)
    assert page.locator(".why").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_every_window_is_fit_for_all_people(browser, server, width):
    server.upscales = True
    size = {"width": width, "height": 844}
    with visiting(browser, server.url, viewport=size, color_scheme="dark") as visitor:
        page = visitor.page
        for count in (1, 2):
            page.fill("#prompt", f"a frog {count}")
            page.click("#draw")
            visitor.pictures(count)
        page.locator(".tile .open").first.click()
        page.locator("#upscaler").wait_for()
        assert violations(page) == []
        page.get_by_role("button", name="Compare", exact=True).click()
        page.wait_for_selector("#compare[open]")
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.click("#select")
        page.locator(".tile .open").first.click()
        page.click("#chosen-favourite")
        assert violations(page) == []
        page.click("#chosen-delete")
        page.get_by_role("button", name="Undo").wait_for()
        assert violations(page) == []
        page.fill("#find", "nothing is so")
        page.click("#show-all", trial=True)
        assert violations(page) == []
        page.evaluate("document.querySelector('#help').showModal()")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
