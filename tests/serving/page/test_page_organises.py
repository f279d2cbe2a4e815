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
    seeds = [asked["seed"] for asked in server.asked]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    server.unfit = "prompt must be shorter"
    visitor.draw("a long frog", num_images=1)
    page.get_by_role("button", name="Change it").click()
    assert page.input_value("#prompt") == "a long frog"
    visitor.draw("a cat")
    visitor.pictures(4)
    assert page.locator(".why").count() == 0
