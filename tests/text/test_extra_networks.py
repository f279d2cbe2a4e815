"""LoRAs that prompts name."""

import pytest

from diffusax.text.extra_networks import read_tags, unread_tags


@pytest.mark.parametrize(
    ("prompt", "text", "weights"),
    [
        ("a cat", "a cat", {}),
        ("a  cat <b>", "a  cat <b>", {}),
        ("a cat <lora:style>", "a cat", {"style": 1.0}),
        ("<lora:my style_v1.0:-0.5> a <lora:b:2> cat", "a cat", {"my style_v1.0": -0.5, "b": 2.0}),
        ("a <lora:x:0.2:0.7>", "a", {"x": (0.7, 0.2)}),
        ("a <lora:x:te=0.2:unet=0.7>", "a", {"x": (0.7, 0.2)}),
        ("a <lora:x:0.5:unet=0.7>", "a", {"x": (0.7, 0.5)}),
        ("a <lora:x:0.5:te=0.7>", "a", {"x": 0.7}),
        ("a <lora:x:0.5:0.6:te=0.7>", "a", {"x": (0.6, 0.7)}),
        ("a <lora:x:te=0.2>", "a", {"x": 0.2}),
        ("a <lyco:x:0.8>", "a", {"x": 0.8}),
        ("a <lora:x: 0.8> cat", "a cat", {"x": 0.8}),
        ("a <lora:x:1:lbw=OUTALL>", "a", {"x": 1.0}),
        ("<lora:x:1><lyco:x:2>", "", {"x": 3.0}),
        ("<lora:x:1><lora:x:0.5:0.25>", "", {"x": (1.25, 1.5)}),
        ("a <hypernet:x:1> <anything:b> cat", "a cat", {}),
        ("a <lora:> 1 < 2 > 3: <b>", "a <lora:> 1 < 2 > 3: <b>", {}),
    ],
)
def test_tags_give_weights_and_leave_the_prompt(prompt, text, weights):
    found = {
        name: w if isinstance(w, float) else (w["unet"], w["text_encoder"])
        for name, w in read_tags(prompt)[1].items()
    }
    assert (read_tags(prompt)[0], found) == (text, weights)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("<lora:x:much>", "must have a number from"),
        ("<lora:x:nan>", "must have a number from"),
        ("<lora:x:>", "must have a number from -100 to 100 as weight .got ''"),
        ("<lora:x:1e30>", "must have a number from -100 to 100"),
        ("<lora:x:1:-inf>", "must have a number from -100 to 100"),
        ("<lora:x:te=much>", "must have a number"),
        ("<lora:x:1:2:3>", "at most two weights"),
        ("<lora:x:1:dyn=8>", "no dynamic ranks"),
        ("<lora::1>", "must have the name of a LoRA"),
        ("<lora:te=1>", "must have the name of a LoRA"),
    ],
)
def test_mistakes_in_tags_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        read_tags(prompt)


def test_what_is_not_applied_is_named():
    prompt = "a <hypernet:x:1> <lora:y:1:lbw=OUTALL> <lora:z:te=1:unet=2> <lyco:b>"
    assert unread_tags(prompt) == ["<hypernet:x:1>", "lbw of <lora:y:1:lbw=OUTALL>"]
