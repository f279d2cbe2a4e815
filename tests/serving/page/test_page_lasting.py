"""What the page keeps: through reloads, in two tabs, while the server is away, full or locked."""

import pytest

pytest.importorskip("starlette")

from support.browser import Visitor, drop, png, visiting, waiting

pytestmark = pytest.mark.slow


def test_pictures_settings_and_mask_survive_a_reload(visitor, server):
    kept = "(await m.get('drafts', 'pictures')).source.strokes.length === 1"
    page = visitor.page
    visitor.draw("a frog", seed=5, guidance_scale=3.3)
    visitor.pictures(1)
    visitor.act("Draw a part anew")
    page.wait_for_selector("#brush[open]")
    visitor.paint((0.3, 0.3), (0.6, 0.6))
    page.get_by_role("button", name="Done").click()
    waiting(lambda: visitor.call("store.js", kept))
    page.reload()
    visitor.connected()
    visitor.pictures(1)
    page.get_by_role("button", name="Edit the mask").wait_for()
    found = [page.input_value(f"#{name}") for name in ("prompt", "seed", "guidance_scale")]
    assert found == ["a frog", "5", "3.3"]
    page.press("#prompt", "Control+Enter")
    visitor.pictures(2)
    assert server.asked[1]["mask_image"]


def test_the_controlnet_that_was_chosen_survives_a_reload(visitor, server):
    kept = "(await m.get('drafts', 'pictures'))?.controls?.[0]?.model"
    page = visitor.page
    drop(visitor, png(), on="#controls .picker")
    waiting(lambda: visitor.call("store.js", kept) == "edges")
    page.select_option("#controls select", "depth")
    waiting(lambda: visitor.call("store.js", kept) == "depth")
    page.reload()
    visitor.connected()
    assert page.input_value("#controls select") == "depth"
    visitor.draw("a frog")
    visitor.pictures(1)
    assert server.asked[0]["controls"][0]["model"] == "depth"


def test_a_key_that_is_pressed_twice_deletes_one_picture(visitor, server):
    page = visitor.page
    for count, prompt in enumerate(("a frog", "a cat", "a dog"), 1):
        visitor.draw(prompt)
        visitor.pictures(count)
    page.locator(".tile .open").first.click()
    page.wait_for_selector("#viewer[open]")
    pressed = "new KeyboardEvent('keydown', { key: 'Delete', bubbles: true })"
    page.evaluate(
        f"for (let i = 0; i < 2; i++) document.querySelector('#viewer').dispatchEvent({pressed})"
    )
    visitor.page.locator(".tile[data-kind=picture]").nth(2).wait_for(state="detached")
    assert page.locator("#viewer[open] .prompt").inner_text() == "a cat"
    page.keyboard.press("ArrowRight")
    assert page.locator("#viewer[open] .prompt").inner_text() == "a frog"


def test_a_drawing_goes_on_through_a_reload(visitor, server):
    server.pace = None
    visitor.draw("a frog")
    visitor.page.locator(".tile[data-state=queued]").wait_for()
    visitor.page.reload()
    visitor.page.locator(".tile[data-kind=job]").wait_for()
    server.pace = 0.01
    visitor.pictures(1)
    assert len(server.asked) == 1


def test_two_tabs_show_the_same_and_keep_each_picture_once(visitor, server):
    other = Visitor(visitor.context, server.url)
    server.pace = None
    visitor.draw("a frog")
    other.page.get_by_role("button", name="Cancel a frog").wait_for()
    other.draw("a cat")
    visitor.page.get_by_role("button", name="Cancel a cat").wait_for()
    server.pace = 0.01
    for tab in (visitor, other):
        tab.pictures(2)
    assert len(server.asked) == 2
    visitor.page.locator(".tile .open").first.click()
    visitor.page.keyboard.press("Delete")
    other.page.locator(".tile[data-kind=picture]").nth(1).wait_for(state="detached")
    other.pictures(1)
    assert other.errors == []


def test_larger_drawings_follow_once_though_two_tabs_look(visitor, server):
    other = Visitor(visitor.context, server.url)
    visitor.open("larger")
    visitor.page.check("#larger")
    server.pace = None
    visitor.draw("a frog")
    other.page.get_by_text("Next").wait_for()
    server.pace = 0.01
    for tab in (visitor, other):
        tab.pictures(1)
    assert len(server.asked) == 2


def test_a_server_that_stops_and_comes_back_goes_on_with_its_jobs(visitor, server):
    server.pace = None
    visitor.draw("a frog")
    waiting(lambda: server.jobs)
    server.stop()
    visitor.connected("away")
    visitor.draw("a cat")
    visitor.page.get_by_text("Handing it in").wait_for()
    server.start()
    visitor.connected()
    server.pace = 0.01
    waiting(lambda: len(server.jobs) == 2)
    visitor.pictures(1)


def test_a_drawing_that_the_server_forgot_is_drawn_again(visitor, server):
    server.pace = None
    visitor.draw("a frog", seed=4)
    waiting(lambda: server.jobs)
    server.stop()
    visitor.connected("away")
    server.jobs.clear()
    server.pace = 0.01
    server.start()
    visitor.pictures(1)
    assert [asked["seed"] for asked in server.asked] == [4, 4]


def test_a_page_that_is_opened_before_its_server_waits_for_it(browser, server):
    with visiting(browser, server.url) as visitor:
        visitor.page.route("**/capabilities", lambda route: route.abort())
        visitor.page.route("**/health", lambda route: route.abort())
        visitor.page.reload()
        visitor.connected("away")
        visitor.page.unroute("**/capabilities")
        visitor.page.unroute("**/health")
        visitor.connected()
        visitor.draw("a frog")
        visitor.pictures(1)


def test_a_drawing_is_cancelled_when_the_server_is_back(visitor, server):
    server.pace = None
    visitor.draw("a frog")
    waiting(lambda: server.jobs)
    server.stop()
    visitor.connected("away")
    visitor.page.get_by_role("button", name="Cancel a frog").click()
    server.start()
    visitor.page.wait_for_selector("#empty")
    assert [job["state"] for job in server.jobs.values()] == ["cancelled"]


def test_a_full_server_is_asked_again(visitor, server):
    server.full = 2
    visitor.draw("a frog")
    visitor.page.get_by_text("The server is full; trying again").wait_for()
    visitor.pictures(1)
    assert server.full == 0


def test_a_failed_drawing_says_why_and_can_be_drawn_again(visitor, server):
    server.wrong = "the images are not finite; use another seed"
    visitor.draw("a frog", seed=6)
    visitor.page.locator(".why", has_text="the images are not finite").wait_for()
    visitor.page.get_by_role("button", name="Draw again").click()
    visitor.pictures(1)
    assert [asked["seed"] for asked in server.asked] == [6, 6]


def test_a_key_is_asked_for_and_kept_for_the_tab(browser, server):
    server.key = "secret"
    with visiting(browser, server.url, wait=False) as visitor:
        page = visitor.page
        page.fill("#key-value", "wrong")
        page.keyboard.press("Enter")
        visitor.connected()
        visitor.draw("a frog")
        visitor.connected("key")
        page.fill("#key-value", "secret")
        page.keyboard.press("Enter")
        visitor.pictures(1)
        page.reload()
        visitor.connected()
        visitor.draw("a cat")
        visitor.pictures(2)
        assert page.evaluate("({ ...sessionStorage })") == {"diffusax-key": "secret"}
        assert "secret" not in page.evaluate("JSON.stringify({ ...localStorage })")


def test_settings_of_a_picture_are_used_again(visitor, server):
    page = visitor.page
    visitor.draw("a frog", seed=8, num_inference_steps=4, negative_prompt="blurred")
    visitor.pictures(1)
    visitor.draw("a cat", seed=9, num_inference_steps=6, negative_prompt="")
    visitor.pictures(2)
    visitor.act("Use these settings", at=1)
    page.press("#prompt", "Control+Enter")
    visitor.pictures(3)
    first, _, third = server.asked
    assert third == first


def test_a_picture_is_drawn_anew_with_a_strength_and_can_be_downloaded(visitor, server):
    page = visitor.page
    visitor.draw("a frog", seed=8)
    visitor.pictures(1)
    visitor.act("Begin with this picture")
    visitor.draw("a toad", strength=0.4)
    visitor.pictures(2)
    assert server.asked[1]["strength"] == 0.4
    assert "mask_image" not in server.asked[1]
    page.click("#no-picture")
    visitor.draw("a newt")
    visitor.pictures(3)
    assert "image" not in server.asked[2]
    assert "strength" not in server.asked[2]
    page.locator(".tile .open").nth(2).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "8-a-frog.png"


def test_another_model_brings_its_defaults_but_keeps_what_was_chosen(visitor):
    page = visitor.page
    page.fill("#guidance_scale", "4.5")
    page.select_option("#model", "sd")
    names = ("width", "height", "num_inference_steps", "guidance_scale")
    assert [page.input_value(f"#{name}") for name in names] == ["512", "512", "8", "4.5"]
    page.select_option("#shape", "3:2")
    assert [page.input_value(f"#{name}") for name in names[:2]] == ["624", "416"]
    page.click("#swap")
    assert [page.input_value(f"#{name}") for name in names[:2]] == ["416", "624"]
    page.fill("#num_inference_steps", "500")
    page.click("#draw")
    assert page.evaluate("document.activeElement.id") == "num_inference_steps"


@pytest.mark.parametrize(
    ("text", "whole", "found"),
    [
        ("10, 20,30", True, [10, 20, 30]),
        ("1-4", True, [1, 2, 3, 4]),
        ("1-7 (+2)", False, [1, 3, 5, 7]),
        ("0-1 [5]", False, [0, 0.25, 0.5, 0.75, 1]),
        ("0.1-0.3 (+0.1)", False, [0.1, 0.2, 0.3]),
        ("-1, 0.5", False, [-1, 0.5]),
        ("5, 5", True, [5]),
    ],
)
def test_values_of_a_grid_are_read(visitor, text, whole, found):
    assert visitor.call("axes.js", "m.numbers(...v)", text, whole) == found


@pytest.mark.parametrize("text", ["", "a, b", "1-", "1-1000"])
def test_values_that_are_none_are_refused_in_one_sentence(visitor, text):
    refused = "(() => { try { m.numbers(v[0]); } catch (error) { return error.message; } })()"
    assert visitor.call("axes.js", refused, text).endswith(".")


@pytest.mark.parametrize(
    ("text", "chosen", "by", "found"),
    [
        ("a red cat", (3, 3), 0.1, "a (red:1.1) cat"),
        ("a (red:1.1) cat", (4, 4), 0.1, "a (red:1.2) cat"),
        ("a (red:1.1) cat", (3, 6), -0.1, "a red cat"),
        ("a red cat", (2, 9), -0.1, "a (red cat:0.9)"),
    ],
)
def test_words_are_weighed(visitor, text, chosen, by, found):
    assert (
        visitor.call("weighing.js", "m.weigh(v[0], v[1], v[2], v[3])[0]", text, *chosen, by)
        == found
    )
