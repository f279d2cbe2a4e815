"""Settings as text, by the rules of stable-diffusion-webui (infotext_utils.py)."""

import json

import pytest

from diffusax.infotext.text import parse, read, webui_parameters, write

WEBUI = """a (red:1.2) apple,

  on a table <lora:style:0.8>
Negative prompt: blurry,
Negative prompt: ugly
Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 965400086, \
Size: 512x768, Model hash: 6ce0161689, Model: "v1-5, pruned", Denoising strength: 0.7, \
Hires resize: 1024x1536, Lora hashes: "style: 0f1b2c3d", Version: v1.10.1"""


def test_webui_s_keys_and_defaults_are_those_of_its_api():
    found = webui_parameters(WEBUI)
    assert {name: found[name] for name in list(found) if name not in DEFAULTS} == {
        "Prompt": "a (red:1.2) apple,\n\non a table <lora:style:0.8>",
        "Negative prompt": "blurry,\nugly",
        "Steps": "20",
        "Sampler": "DPM++ 2M",
        "Schedule type": "Karras",
        "CFG scale": "7",
        "Seed": "965400086",
        **{"Size-1": "512", "Size-2": "768", "Hires resize-1": "1024", "Hires resize-2": "1536"},
        **{"Model hash": "6ce0161689", "Model": "v1-5, pruned", "Denoising strength": "0.7"},
        **{"Lora hashes": "style: 0f1b2c3d", "Version": "v1.10.1"},
    }
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    empty = webui_parameters("")
    assert (empty["Prompt"], empty["Hires resize-1"], empty["Schedule type"]) == (
        "",
        0,
        "Automatic",
    )
    old = webui_parameters("a\nSteps: 1, Size: 1024x512, First pass size: 0x0, Hypernet: h")
    assert [old[name] for name in ("Size-1", "Size-2", "Hires resize-1", "Hires resize-2")] == [
        *(768, 384, 1024, 512)
    ]
    assert old["Prompt"] == "a<hypernet:h:1.0>"


DEFAULTS = {
    **{"Clip skip": "1", "Hires sampler": "Use same sampler", "Hires prompt": ""},
    **{"Hires checkpoint": "Use same checkpoint", "Hires negative prompt": "", "RNG": "GPU"},
    **{"Mask mode": "Inpaint masked", "Masked content": "original", "VAE Encoder": "Full"},
    **{"Inpaint area": "Whole picture", "Masked area padding": 32, "VAE Decoder": "Full"},
    **{"Schedule max sigma": 0, "Schedule min sigma": 0, "Schedule rho": 0},
    **{"FP8 weight": "Disable", "Hires schedule type": "Use same scheduler"},
    "Refiner switch by sampling steps": False,
}


def test_a_text_of_few_settings_is_a_prompt():
    assert parse("a cat: small, black") == ("a cat: small, black", "", {})
    assert parse("\n a \n\nNegative prompt:\n b\nSteps: 1, Seed: 2") == (
        *("a\n", "b\nSteps: 1, Seed: 2", {}),
    )


def test_what_webui_s_rules_read_back_is_written_as_webui_does():
    text = write({"prompt": "a\nb, c: d", "negative_prompt": "e", "seed": 5, "guidance_scale": 7.0})
    assert text.startswith(
        "a\nb, c: d\nNegative prompt: e\nCFG scale: 7, Seed: 5, RNG: jax, Version"
    )
    assert "diffusax:" not in text


@pytest.mark.parametrize(
    "prompt",
    [
        "a\nNegative prompt: b",
        " a",
        "a\r",
        "\u2028",
        "<lora:x:1>\n",
        "Steps: 1, Seed: 2, Size: 1x1",
    ],
)
def test_other_prompts_are_written_once_more_in_one_line_that_webui_reads_over(prompt):
    fields = {"prompt": prompt, "negative_prompt": "c", "seed": 5, "num_inference_steps": 3}
    text = write(fields)
    assert read(text).fields == fields
    # webui reads all other settings as before.
    assert webui_parameters(text)["Steps"] == "3"
    assert json.loads(parse(text)[2].get("diffusax", "{}")).get("prompt", prompt) == prompt


def test_what_cannot_be_restored_is_named():
    found = read(
        "a\nSteps: 9, Sampler: Euler a, Schedule type: KL Optimal, Variation seed: 7, "
        "Variation seed strength: 0.5, Refiner: xl, Refiner switch at: 0.8, Eta: 0.5, RNG: NV, "
        'FreeU: 1, Denoising strength: 0.5, Mask blur: 4, ControlNet 0: "Model: canny, Weight: 1"'
    )
    assert found.fields["sampler"] == "euler_a"
    assert found.fields["variation_seed"] == 7
    assert found.fields["variation_strength"] == 0.5
    assert found.left_out == [
        *("Schedule type: KL Optimal", "RNG: NV", "the image that it began with", "the mask"),
        *("Refiner: xl", "Refiner switch at: 0.8", "Eta: 0.5", "FreeU: 1"),
        "ControlNet 0: Model: canny, Weight: 1",
    ]


def test_guidance_of_flux_and_layers_of_clip_are_those_that_the_pipelines_take():
    forge = read("a\nSteps: 9, Sampler: Euler, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 1")
    assert forge.fields["guidance_scale"] == 3.5
    assert read("a\nSteps: 9, Seed: 1, Clip skip: 0, Size: 8x8").fields["clip_skip"] == 0
    assert read("a\nSteps: 9, Seed: 1, Clip skip: 2, Size: 8x8").fields["clip_skip"] == 1
    assert read("a\nSteps: 9, Seed: 1, Emphasis: None").fields["prompt_weighting"] is False
    assert "padding_mask_crop" not in read("a\nSteps: 1, Seed: 1, Masked area padding: 9").fields
