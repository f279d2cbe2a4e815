"""LoRAs that prompts name."""

import pytest

from diffusax.text.lora_tags import read_tags


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
        ("a <lora:x:0.5:te=0.7>", "a", {"x": (0.5, 0.7)}),
    ],
)
def test_weights(prompt, text, weights):
    found = {
        name: w if isinstance(w, float) else (w["unet"], w["text_encoder"])
        for name, w in read_tags(prompt)[1].items()
    }
    assert (read_tags(prompt)[0], found) == (text, weights)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("<lora:x:much>", "must have a number as weight"),
        ("<lora:x:nan>", "must have a number as weight"),
        ("<lora:x:1:2:3>", "at most two weights"),
        ("<lora:x:a=3>", "at most two weights"),
        ("<lora:x:1><lora:x:2>", "names the LoRA 'x' twice"),
    ],
)
def test_mistakes(prompt, message):
    with pytest.raises(ValueError, match=message):
        read_tags(prompt)
