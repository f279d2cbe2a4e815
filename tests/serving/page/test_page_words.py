"""Words: styles, wildcards, tokens, LoRAs in prompts, A1111's names; several pictures; phones."""

import base64

import pytest

pytest.importorskip("starlette")

from support.browser import drop, pixels, png, violations, visiting, waiting


def test_styles_and_wildcards_are_put_into_prompts_by_the_seed(visitor, server):
    page = visitor.page
    visitor.open("styles")
    visitor.open("size")
    visitor.open("wildcards")
    page.fill("#prompt", "oil painting of {prompt}, brown")
    page.fill("#negative_prompt", "photo")
    page.fill("#style-name", "oil")
    page.click("#style-save")
    page.fill("#wildcard-name", "animal")
    page.keyboard.press("Enter")
    page.fill("#wildcard-lines", "# not this\nfrog\ncat\ndog\nowl")
    page.fill("#prompt", "a ")
    page.click("text=Into the prompt >> nth=0")
    assert page.input_value("#prompt") == "a __animal__"
    assert violations(page) == []
    visitor.draw("a __animal__", num_images=4, seed=5)
    visitor.pictures(4)
    prompts = [asked["prompt"] for asked in server.asked]
    assert len(set(prompts)) > 1
    assert set(prompts) <= {f"oil painting of a {x}, brown" for x in ("frog", "cat", "dog", "owl")}
    assert {asked["negative_prompt"] for asked in server.asked} == {"photo"}
    visitor.draw("a __animal__", num_images=1, seed=6)
    visitor.pictures(5)
    assert server.asked[4]["prompt"] == prompts[1]
    page.locator(".tile .open").first.click()
    animal = prompts[1].split()[4].rstrip(",")
    told = page.locator(".facts").inner_text().split("\n")
    assert {"a __animal__", "oil", "__animal__", animal} <= set(told)
    page.get_by_role("button", name="Use these settings").click()
    assert page.input_value("#prompt") == prompts[1]
    assert page.inner_text("#styles-summary") == "none"
    visitor.act("Use what was written")
    assert page.input_value("#prompt") == "a __animal__"
    assert page.inner_text("#styles-summary") == "1 on"
    page.reload()
    visitor.connected()
    assert page.inner_text("#styles-summary") == "1 on"
    assert page.input_value("#wildcard-lines").startswith("# not this")


@pytest.mark.slow
def test_styles_of_the_server_are_there_and_own_ones_can_be_deleted(visitor, server):
    page = visitor.page
    server.styles = [{"name": "ink", "prompt": "in ink", "negative_prompt": ""}]
    page.reload()
    visitor.open("styles")
    page.get_by_role("button", name="ink").click()
    visitor.draw("a frog")
    visitor.pictures(1)
    assert server.asked[0]["prompt"] == "a frog, in ink"
    page.fill("#style-name", "mine")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete the style mine").click()
    assert page.locator("#styles button").all_inner_texts() == ["ink"]
    page.get_by_role("button", name="Undo").click()
    assert page.get_by_role("button", name="Delete the style mine").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "found", "chosen"),
    [
        ("a __b__ c", "a x c", [["b", "x"]]),
        ("__b__ __b__", "x x", [["b", "x"]] * 2),
        ("__none__ __b__", "__none__ x", [["b", "x"]]),
        ("__outer__", "one x", [["outer", "one __b__"], ["b", "x"]]),
        ("a__b__c", "a__b__c", []),
        ("__me__", "__me__", None),
    ],
)
def test_wildcards_are_resolved(visitor, text, found, chosen):
    lists = {"b": ["x"], "outer": ["one __b__"], "me": ["__me__"], "empty": []}
    script = "(() => { const c = []; return [m.resolve(v[0], v[1], m.random(1), c), c]; })()"
    resolved, taken = visitor.call("wildcards.js", script, text, lists)
    assert resolved == found
    assert chosen is None or taken == chosen


@pytest.mark.slow
def test_the_tokens_of_the_prompt_stand_beside_it(visitor, server):
    page = visitor.page
    page.fill("#prompt", "a red frog")
    page.get_by_text("3 of 75 tokens").wait_for()
    page.fill("#prompt", "frog " * 80)
    page.get_by_text("80 of 150 tokens").wait_for()
    visitor.open("more")
    page.uncheck("#long_prompt")
    page.locator("#prompt-tokens.over", has_text="80 of 75").wait_for()
    page.fill("#prompt", "")
    page.locator("#prompt-tokens").wait_for(state="hidden")


@pytest.mark.slow
def test_loras_are_written_into_the_prompt_and_show_their_pictures(visitor, server):
    page = visitor.page
    visitor.open("loras")
    page.locator(".card img").wait_for()
    assert server.requests.count("/loras/pixel/preview") == 1
    page.fill("#prompt", "a frog")
    page.get_by_role("button", name="Sketch into the prompt").click()
    page.get_by_role("button", name="Pixel into the prompt").click()
    assert page.input_value("#prompt") == "a frog <lora:sketch:1> <lora:pixel:1>"
    assert violations(page) == []


@pytest.mark.slow
def test_samplers_have_the_names_of_a1111_and_the_usual_ones_come_first(visitor, server):
    names = visitor.page.locator("#sampler option").all_inner_texts()
    assert names[:4] == ["Euler a (its own)", "DPM++ 2M Karras", "DPM++ 2M", "Euler a"]
    visitor.page.select_option("#sampler", label="DPM++ 2M Karras")
    visitor.draw("a frog")
    visitor.pictures(1)
    assert server.asked[0]["sampler"] == "dpm++2m_karras"
    visitor.page.locator(".tile .open").click()
    assert "DPM++ 2M Karras" in visitor.page.locator(".facts").inner_text()


@pytest.mark.slow
def test_a_grid_goes_through_prompts_words_and_models(visitor, server):
    page = visitor.page
    visitor.open("grid")
    page.check("#grid")
    page.select_option("#grid-x", "words")
    page.fill("#grid-x-values", "frog, cat")
    page.select_option("#grid-y", "model")
    for name in ("emoji", "sd"):
        page.check(f"#grid-axes input[value={name}]")
    assert page.locator("#grid-axes input[value=emoji-edit]").count() == 0
    visitor.draw("a dog")
    page.get_by_text('The prompt has no "frog"').wait_for()
    visitor.draw("a frog")
    visitor.pictures(4)
    assert page.get_by_text('The prompt has no "frog"').count() == 0
    cells = [(asked["prompt"], asked["model"]) for asked in server.asked]
    assert sorted(cells) == [
        ("a cat", "emoji"),
        ("a cat", "sd"),
        ("a frog", "emoji"),
        ("a frog", "sd"),
    ]
    assert page.locator("th").all_inner_texts() == ["frog", "cat", "emoji", "SD 1.5"]
    page.select_option("#grid-y", "")
    page.select_option("#grid-x", "prompt")
    page.fill("#grid-x-values", "a pear\n\na plum, blue\n")
    page.click("#draw")
    visitor.pictures(6)
    assert [asked["prompt"] for asked in server.asked[4:]] == ["a pear", "a plum, blue"]


@pytest.mark.slow
def test_several_pictures_are_looked_at_in_their_order(visitor, server):
    page = visitor.page
    page.select_option("#model", "several")
    visitor.open("source")
    drop(visitor, png(colour="red"), name="red.png", on="#source input + span")
    for colour in ("lime", "blue"):
        drop(visitor, png(colour=colour), name=f"{colour}.png", on="#references .picker span")
        page.locator(".reference", has_text=colour).wait_for()
    assert page.locator("#references .picker").count() == 0
    assert "false" not in page.inner_text("#references")
    assert violations(page) == []
    page.get_by_role("button", name="Before the one above: blue.png").click()
    page.get_by_role("button", name="As the first: blue.png").click()
    page.locator(".reference", has_text="red.png").wait_for()
    assert page.locator("#strength").is_hidden()
    visitor.draw("all of them")
    visitor.pictures(1)
    [asked] = server.asked
    assert "strength" not in asked
    sent = [asked["image"], *asked["more_images"]]
    colours = [pixels(uri)[5, 5].tolist() for uri in sent]
    assert colours == [[0, 0, 255], [255, 0, 0], [0, 255, 0]]
    page.get_by_role("button", name="Take away: red.png").click()
    page.locator("#references .picker").wait_for()
    page.select_option("#model", "emoji")
    visitor.draw("one of them")
    visitor.pictures(2)
    assert "more_images" not in server.asked[1]
    assert server.asked[1]["strength"] == 0.7
    page.select_option("#model", "several")
    page.reload()
    visitor.connected()
    page.locator(".reference", has_text="lime.png").wait_for()


@pytest.mark.slow
def test_several_pictures_that_are_dropped_together_are_all_taken(visitor, server):
    page = visitor.page
    page.select_option("#model", "several")
    visitor.open("source")
    script = """(files) => {
        const transfer = new DataTransfer();
        for (const [name, data] of files) {
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            transfer.items.add(new File([bytes], name, { type: "image/png" }));
        }
        return transfer;
    }"""
    files = [[f"{c}.png", base64.b64encode(png(colour=c)).decode()] for c in ("red", "blue")]
    transfer = page.evaluate_handle(script, files)
    for kind in ("dragenter", "dragover", "drop"):
        page.dispatch_event("#source input + span", kind, {"dataTransfer": transfer})
    page.locator(".reference", has_text="blue.png").wait_for()
    assert "red.png" in page.inner_text("#source")


@pytest.mark.slow
def test_a_size_far_from_the_models_own_is_warned_of_and_mended(visitor, server):
    page = visitor.page
    visitor.open("size")
    page.fill("#width", "256")
    page.fill("#height", "128")
    page.get_by_text("may look poor").wait_for()
    page.click("#size-own")
    assert (page.input_value("#width"), page.input_value("#height")) == ("88", "48")
    assert page.locator("#size-hint").inner_text() == ""


@pytest.mark.slow
def test_errors_stay_until_what_they_are_about_is_mended(visitor, server):
    page = visitor.page
    page.select_option("#model", "emoji-edit")
    visitor.draw("make it blue")
    error = page.get_by_text("changes pictures; choose one first")
    error.wait_for()
    page.wait_for_timeout(300)
    assert error.count() == 1
    drop(visitor, png(), on="#source input + span")
    error.wait_for(state="detached")


@pytest.mark.slow
def test_on_a_phone_the_prompt_stays_by_the_pictures_and_targets_are_large(browser, server):
    with visiting(browser, server.url, viewport={"width": 390, "height": 844}) as visitor:
        page = visitor.page
        assert small(page) == []
        for count in range(1, 7):
            page.fill("#prompt", f"a frog {count}")
            page.click("#draw")
            visitor.pictures(count)
        page.mouse.wheel(0, 600)
        waiting(lambda: page.evaluate("scrollY") > 200)
        assert page.locator("#prompt").bounding_box()["y"] >= 0
        assert page.locator(".tile .open").nth(3).is_visible()
        assert small(page) == []
        page.click("#select")
        assert small(page) == []
        assert violations(page) == []
        page.click("#chosen-done")
        for group in ("source", "model", "size", "styles", "wildcards", "loras", "embeddings"):
            visitor.open(group)
        for group in ("controls", "larger", "grid", "more"):
            visitor.open(group)
        page.check("#grid")
        page.select_option("#grid-x", "sampler")
        page.fill("#wildcard-name", "colour")
        page.get_by_role("button", name="Add the list").click()
        assert small(page) == []
        page.click("#fold")
        page.locator(".tile .open").first.click()
        page.wait_for_selector("#viewer[open]")
        assert small(page) == []
        page.keyboard.press("Escape")


def small(page):
    """Returns what people press on that is less than 44 pixels high or wide."""
    script = """() => {
        const root = document.querySelector("dialog[open]") ?? document.body;
        const inputs = "select, textarea, input:not(.unseen, .twin)";
        const targets = `button, summary, .check, .picker, ${inputs}`;
        return [...root.querySelectorAll(targets)]
            .filter((one) => one.checkVisibility() && !one.closest(".check > *"))
            .filter((one) => !(one.type === "checkbox" && one.closest(".check")))
            .map((one) => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
            .filter(([, { width, height }]) => width < 43.9 || height < 43.9)
            .map(([html, { width, height }]) => `${html} ${width} x ${height}`);
    }"""
    return page.evaluate(script)
