"""Settings in PNG files, and names of samplers, as stable-diffusion-webui has them."""

import io
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.effort import examples

from diffusax.images.conversion import png_parameters
from diffusax.infotext.files import open_image
from diffusax.infotext.samplers import WEBUI_SAMPLERS, to_webui
from diffusax.samplers import SAMPLER_NAMES, SCHEDULERS, SPACED_NAMES
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import (
    FIELDS,
    Control,
    Generation,
    read_image,
    read_text,
    write_infotext,
)
from diffusax.serving.web.a1111.reading import from_webui

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
    generation = Generation(prompt="a cat", negative_prompt="a dog", **DRAWN)
    text = write_infotext(generation, 5)
    line = "Steps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7, Seed: 5, "
    assert text.startswith(f"a cat\nNegative prompt: a dog\n{line}Size: 512x768, Model: emoji, ")
    control = Control(model="edges", image=PICTURE, scale=0.5)
    more = Generation(
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
    assert read_text(text).settings == {
        "prompt": "a (red:1.2) apple,\non a table <lora:style:0.8>",
        "negative_prompt": "blurry,\nugly",
        "num_inference_steps": 20,
        "sampler": "dpm++2m_karras",
        "guidance_scale": 7.5,
        "seed": 965400086,
        "width": 512,
        "height": 768,
        "model": "v1-5, pruned",
        "clip_skip": 1,
    }
    # With hires fix, the strength is that of the second pass.
    assert read_text(text).left_out == ["Denoising strength: 0.7", "Hires upscale: 2"]
    assert read_text("a cat: small, black").settings == {
        "prompt": "a cat: small, black",
        "negative_prompt": "",
    }
    odd = read_text("x\nSteps: many, Sampler: Restart, CFG scale: 7, Seed: -1, Size: 1x2x3, Eta: 1")
    assert odd.settings == {"prompt": "x", "negative_prompt": "", "guidance_scale": 7.0}
    named = ["Steps: many", "Sampler: Restart", "Size: 1x2x3", "Eta: 1", "Seed: -1"]
    assert odd.left_out == named


def test_a_text_that_is_no_settings_is_read_at_once():
    begun = time.process_time()
    assert read_text("a" * 100_000).settings["prompt"] == "a" * 100_000
    assert read_text(" " * 50_000 + "\n" + "a " * 24_000).settings["negative_prompt"] == ""
    assert time.process_time() - begun < 2
    with pytest.raises(Refused, match=r"at most 100000 characters of settings \(got 100001\)"):
        read_text("a" * 100_001)


HARD = (
    *("Negative prompt: a", "Steps: 20, Sampler: Euler, Seed: 5", "\n", " ", ",", ":", '"', "\\"),
    *('{"a": 1}', "<lora:x:0.5>", "(a:1.3)", "[a]", "\r\n", "\u2028", "\u3000", "\x00", "\ud800"),
    *("りんご", "🍎", "é", "diffusax: {}", "BREAK", "a", "b", "  "),
)
"""Parts of prompts, which webui's rules read back as other ones in many orders."""
TEXT = st.lists(st.sampled_from(HARD), max_size=6).map("".join)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NUMBER = st.floats(-100, 100)
SHARE = st.floats(0, 1)
DRAWINGS = st.fixed_dictionaries(
    {
        "prompt": TEXT,
        "negative_prompt": TEXT,
        "model": NAME,
        "width": st.integers(8, 4096),
        "height": st.integers(8, 4096),
        "num_inference_steps": st.integers(1, 1000),
        "guidance_scale": NUMBER,
        "sampler": st.sampled_from([*SAMPLER_NAMES, *SPACED_NAMES, *SCHEDULERS]),
        "seed": st.integers(0, 2**32 - 1),
        "guidance_rescale": SHARE,
        "prompt_weighting": st.booleans(),
        "long_prompt": st.booleans(),
        "adapters": st.dictionaries(NAME, NUMBER, max_size=2),
        "clip_skip": st.none() | st.integers(0, 9),
    }
)
OVER = st.fixed_dictionaries({"strength": SHARE})
PAINTED = st.fixed_dictionaries(
    {
        "strength": SHARE,
        "mask_blur": st.floats(0, 64),
        "padding_mask_crop": st.none() | st.integers(0, 4096),
    }
)
EDITED = st.fixed_dictionaries({"image_guidance_scale": NUMBER})
PICTURES = {"image": PICTURE}
KINDS = (
    *(st.just(({}, {})), st.tuples(OVER, st.just(PICTURES)), st.tuples(EDITED, st.just(PICTURES))),
    st.tuples(PAINTED, st.just({**PICTURES, "mask_image": PICTURE})),
)


@settings(max_examples=examples(60, 2000), deadline=None)
@given(DRAWINGS, st.one_of(KINDS), st.booleans())
def test_every_drawing_is_read_back_from_its_image(fields, kind, steered):
    more, pictures = kind
    steering = (Control(model="edges: a, b", image=PICTURE, scale=0.1 + 0.2),) if steered else ()
    generation = Generation(**fields, **more, **pictures, controls=steering)
    file = io.BytesIO()
    PICTURE.save(file, "PNG", pnginfo=png_parameters(write_infotext(generation, fields["seed"])))
    read = read_image(open_image(file.getvalue()))
    expected = {name: getattr(generation, name) for name in FIELDS}
    assert {name: getattr(Generation(**read.settings), name) for name in FIELDS} == expected
    assert type(read.text) is str
    assert ("ControlNet: edges: a, b" in read.left_out) == steered
    assert ("the image that it began with" in read.left_out) == ("strength" in more)


def test_settings_are_in_the_file():
    text = write_infotext(Generation(prompt="ein Äpfelchen 🍎", **DRAWN), 5)
    file = io.BytesIO()
    PICTURE.save(file, "PNG", pnginfo=png_parameters(text))
    assert read_image(Image.open(file)).settings == {
        **DRAWN,
        "prompt": "ein Äpfelchen 🍎",
        "negative_prompt": "",
        "seed": 5,
    }
    with pytest.raises(Refused, match="this one has none"):
        read_image(PICTURE)


def test_names_of_samplers_go_both_ways():
    assert {sampler.own for sampler in WEBUI_SAMPLERS} == {
        name.removesuffix("_karras") for name in SAMPLER_NAMES
    }
    for name in (*SAMPLER_NAMES, *SPACED_NAMES):
        # Which steps were aligned for a model is no part of a name there.
        assert from_webui(*to_webui(name)) == name.removesuffix("_xl")
    assert from_webui("Euler a") == from_webui("k_euler_a", "automatic") == "euler_a"
    assert from_webui("DPM++ 2M") == from_webui("dpm++ 2m karras") == "dpm++2m_karras"
    assert from_webui("DPM++ 2M", "Simple") == from_webui("dpm++2m") == "dpm++2m"
    assert from_webui("PNDMScheduler") == "PNDMScheduler"
    assert to_webui("PNDMScheduler") == ("PLMS", None)
    assert to_webui("DPMSolverMultistepScheduler") == ("DPM++ 2M", None)
    with pytest.raises(NotFound, match=r"sampler must be one of .* \(got 'Restart'\)") as caught:
        from_webui("Restart")
    assert caught.value.status == 404
    # A schedule type that a sampler has no use for is none there, and neither is an unknown one.
    assert from_webui("LCM", "SGM Uniform") == from_webui("LCM Karras") == "lcm"
    assert from_webui("DDIM", "karras") == from_webui("DDIM", "Exponential") == "ddim"
    assert from_webui("Euler", "some other") == "euler"
    with pytest.raises(Refused, match=r"must be one of Automatic, Uniform, .*, Beta for Euler a"):
        from_webui("Euler a", "KL Optimal")


def test_schedule_types_of_webui():
    assert from_webui("Euler a", "Karras") == from_webui("Euler a Karras") == "euler_a_karras"
    assert from_webui("Euler", "SGM Uniform") == from_webui("Euler", "sgm_uniform")
    assert from_webui("Euler", "SGMUniform") == "euler_sgm_uniform"
    assert from_webui("DPM++ 2M", "Polyexponential") == "dpm++2m_exponential"
    assert from_webui("DPM++ 2M", "beta") == from_webui("DPM++ 2M Beta") == "dpm++2m_beta"
    # What these two take by themselves there.
    for name, own in (("DPM++ 2M SDE", "dpm++2m_sde"), ("DPM++ 3M SDE", "dpm++3m_sde")):
        assert from_webui(name) == from_webui(name, "Automatic") == f"{own}_exponential"
        assert to_webui(own) == (name, "Uniform")
        assert to_webui(f"{own}_exponential") == (name, "Exponential")
    assert to_webui("euler_a_karras") == ("Euler a", "Karras")
    assert to_webui("euler_align_your_steps_xl") == ("Euler", "Align Your Steps")
    xl = types.SimpleNamespace(family="Stable Diffusion XL")
    assert from_webui("Euler", "Align Your Steps", xl) == "euler_align_your_steps_xl"
    assert from_webui("Euler", "Beta", xl) == "euler_beta"
    with_others = write_infotext(Generation(**{**DRAWN, "sampler": "euler_a_beta"}), 1)
    assert "Sampler: Euler a, Schedule type: Beta" in with_others
    assert read_text(with_others).settings["sampler"] == "euler_a_beta"
