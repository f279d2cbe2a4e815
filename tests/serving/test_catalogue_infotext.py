"""Settings in PNG files, and names of samplers, as stable-diffusion-webui has them."""

import io
import time

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from diffusax.images.pictures import png_parameters
from diffusax.samplers import SAMPLER_NAMES
from diffusax.serving.drawing import Control, Drawing
from diffusax.serving.errors import NotFound, Refused
from diffusax.serving.infotext import read_infotext, read_settings, write_infotext
from diffusax.serving.samplers import WEBUI_SAMPLERS, from_webui, to_webui

PICTURE = Image.new("RGB", (64, 64))
DRAWN = {
    "model": "emoji",
    "width": 512,
    "height": 768,
    "num_inference_steps": 20,
    "guidance_scale": 7.0,
    "sampler": "euler_a",
}


def test_the_text_is_webui_s():
    drawing = Drawing(prompt="a cat", negative_prompt="a dog", **DRAWN)
    text = write_infotext(drawing, 5)
    line = "Steps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7, Seed: 5, "
    assert text.startswith(f"a cat\nNegative prompt: a dog\n{line}Size: 512x768, Model: emoji, ")
    control = Control(model="edges", image=PICTURE, scale=0.5)
    more = Drawing(
        prompt="x", image=PICTURE, mask_image=PICTURE, strength=0.75, padding_mask_crop=32,
        clip_skip=1, adapters={"style": 0.8}, controls=(control,), **DRAWN,
    )  # fmt: skip
    text = write_infotext(more, 1)
    assert text.startswith("x <lora:style:0.8>\nSteps: 20")
    assert "Denoising strength: 0.75, Clip skip: 2, Mask blur: 0, Inpaint area: Only masked" in text
    assert 'ControlNet 0: "Model: edges, Weight: 0.5, Guidance Start: 0, Guidance End: 1"' in text


def test_a_text_of_webui_is_read():
    text = """a (red:1.2) apple,
on a table <lora:style:0.8>
Negative prompt: blurry,
ugly
Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 965400086, \
Size: 512x768, Model hash: 6ce0161689, Model: "v1-5, pruned", Denoising strength: 0.7, \
Clip skip: 2, Hires upscale: 2, Lora hashes: "style: 0f1b2c3d, b: 1", Version: v1.10.1"""
    assert read_infotext(text) == {
        "prompt": "a (red:1.2) apple,\non a table <lora:style:0.8>",
        "negative_prompt": "blurry,\nugly",
        "num_inference_steps": 20,
        "sampler": "dpm++2m_karras",
        "guidance_scale": 7.5,
        "seed": 965400086,
        "width": 512,
        "height": 768,
        "model": "v1-5, pruned",
        "strength": 0.7,
        "clip_skip": 1,
    }
    assert read_infotext("a cat: small, black") == {
        "prompt": "a cat: small, black",
        "negative_prompt": "",
    }
    odd = read_infotext("x\nSteps: many, Sampler: Restart, CFG scale: 7, Seed: -1, Size: 1x2x3")
    assert odd == {"prompt": "x", "negative_prompt": "", "guidance_scale": 7.0}


def test_a_text_that_is_no_settings_is_read_at_once():
    begun = time.process_time()
    assert read_infotext("a" * 100_000)["prompt"] == "a" * 100_000
    assert read_infotext(" " * 50_000 + "\n" + "a " * 24_000)["negative_prompt"] == ""
    assert time.process_time() - begun < 2
    with pytest.raises(Refused, match=r"at most 100000 characters of settings \(got 100001\)"):
        read_infotext("a" * 100_001)


TEXT = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), max_size=40)
NUMBER = st.floats(0, 100).map(lambda x: float(f"{x:.6g}"))


@settings(max_examples=examples(25, 500), deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "prompt": TEXT.map(str.strip).filter(lambda x: not x.startswith("Negative prompt:")),
            "negative_prompt": TEXT.map(str.strip),
            "model": TEXT.map(str.strip).filter(bool),
            "width": st.integers(8, 4096),
            "height": st.integers(8, 4096),
            "num_inference_steps": st.integers(1, 1000),
            "guidance_scale": NUMBER,
            "sampler": st.sampled_from(SAMPLER_NAMES),
            "seed": st.integers(0, 2**32 - 1),
            "prompt_weighting": st.just(False),
            "clip_skip": st.integers(0, 9),
        }
    ),
    st.fixed_dictionaries(
        {"strength": NUMBER.map(lambda x: x / 100), "padding_mask_crop": st.just(4)}
    ),
    st.booleans(),
)
def test_what_is_written_is_read(fields, over, painted):
    given = {**fields, **over} if painted else fields
    pictures = {"image": PICTURE, "mask_image": PICTURE} if painted else {}
    text = write_infotext(Drawing(**given, **pictures), fields["seed"])
    expected = {**given, "mask_blur": 0.0} if painted else given
    assert read_infotext(text) == pytest.approx(expected)


def test_settings_are_in_the_file():
    text = write_infotext(Drawing(prompt="ein Äpfelchen 🍎", **DRAWN), 5)
    file = io.BytesIO()
    PICTURE.save(file, "PNG", pnginfo=png_parameters(text))
    assert read_settings(Image.open(file)) == {
        **DRAWN,
        "prompt": "ein Äpfelchen 🍎",
        "negative_prompt": "",
        "seed": 5,
    }
    with pytest.raises(Refused, match="this one has none"):
        read_settings(PICTURE)


def test_names_of_samplers_go_both_ways():
    assert {sampler.own for sampler in WEBUI_SAMPLERS} == {
        name.removesuffix("_karras") for name in SAMPLER_NAMES
    }
    for name in SAMPLER_NAMES:
        assert from_webui(*to_webui(name)) == name
    assert from_webui("Euler a") == from_webui("k_euler_a", "automatic") == "euler_a"
    assert from_webui("DPM++ 2M") == from_webui("dpm++ 2m karras") == "dpm++2m_karras"
    assert from_webui("DPM++ 2M", "Simple") == from_webui("dpm++2m") == "dpm++2m"
    assert from_webui("PNDMScheduler") == to_webui("PNDMScheduler")[0] == "PNDMScheduler"
    with pytest.raises(NotFound, match=r"sampler must be one of .* \(got 'Restart'\)") as caught:
        from_webui("Restart")
    assert caught.value.status == 404
    with pytest.raises(Refused, match="must be Automatic or Uniform for Euler a"):
        from_webui("Euler a", "Karras")
