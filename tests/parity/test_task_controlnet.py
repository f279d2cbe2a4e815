"""ControlNets, one and several, in three tasks, against diffusers."""

import pytest
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, mask, picture, slow

TEXT = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "num_inference_steps": 5}
FROM_TEXT = {**TEXT, "image": [picture(11), picture(12)]}
FROM_IMAGE = {
    **TEXT,
    "image": [picture(1), picture(2)],
    "control_image": [picture(11), picture(12)],
    "strength": 0.7,
}
INPAINT = {**FROM_IMAGE, "mask_image": [mask(1), mask(2)]}
TASKS = {
    "text": ("StableDiffusion{}ControlNetPipeline", FROM_TEXT, "image"),
    "image": ("StableDiffusion{}ControlNetImg2ImgPipeline", FROM_IMAGE, "control_image"),
    "inpaint": ("StableDiffusion{}ControlNetInpaintPipeline", INPAINT, "control_image"),
}
OPTIONS = {
    "as-is": {},
    "scale": {"controlnet_conditioning_scale": 0.45},
    "late-start": {"control_guidance_start": 0.35},
    "early-end": {"control_guidance_end": 0.6},
    "interval": {"control_guidance_start": 0.2, "control_guidance_end": 0.8},
    "no-control": {"controlnet_conditioning_scale": 0.0},
    "guess": {"guess_mode": True, "guidance_scale": 3.0},
    "guess-without-guidance": {"guess_mode": True, "guidance_scale": 1.0},
    "no-guidance": {"guidance_scale": 1.0},
    "ancestral": {"sampler": "euler-ancestral"},
    "heun": {"sampler": "heun", "control_guidance_end": 0.5},
    "a-generator-per-image": {"seed": [3, 4]},
}
ON_XL = ("interval", "guess", "scale", "no-guidance")
CASES = [("sd", "a", task, name) for task in TASKS for name in OPTIONS]
CASES += [("xl", "a", task, "as-is") for task in TASKS]
CASES += [("xl", "a", "text", name) for name in ON_XL]
CASES += [slow("xl", "a", task, name) for task in ("image", "inpaint") for name in ON_XL]
CASES += [("sd", "b", task, "as-is") for task in TASKS]
CASES += [slow("xl", "b", task, "as-is") for task in TASKS]
CASES += [slow(kind, "c", task, "as-is") for kind in ("sd", "xl") for task in TASKS]


def make(pairs, kind, variation, task, controls=1):
    class_name, call, control = TASKS[task]
    name = class_name.format("XL" if kind.startswith("xl") else "")
    return pairs(name, kind, variation, controls=controls), dict(call), control


KEPT = [("sd", "a", "text", name) for name in ("as-is", "interval", "guess", "no-guidance")]
KEPT += [
    ("sd", "a", "image", "as-is"),
    ("sd", "a", "inpaint", "as-is"),
    ("xl", "a", "text", "as-is"),
]


@pytest.mark.parametrize(("kind", "variation", "task", "option"), few(CASES, *KEPT))
def test_one_controlnet_equals_diffusers(pairs, kind, variation, task, option):
    pair, call, _ = make(pairs, kind, variation, task)
    pair.check(**{**call, **OPTIONS[option]})


@pytest.mark.parametrize("task", few(TASKS, "text"))
@pytest.mark.parametrize("sampler", few(["pndm", "dpm++2m-karras", "unipc"], "unipc"))
def test_every_sampler_equals_diffusers(pairs, task, sampler):
    pair, call, _ = make(pairs, "sd", "a", task)
    pair.check(**{**call, "num_inference_steps": 8}, sampler=sampler)


@pytest.mark.slow
@pytest.mark.parametrize("task", few(TASKS, "text"))
@pytest.mark.parametrize("kind", ["sd", slow("xl")])
def test_two_controlnets_equal_diffusers(pairs, kind, task):
    pair, call, control = make(pairs, kind, "a", task, controls=2)
    call = {**call, "prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}
    call |= {"num_images_per_prompt": 2, control: [picture(11), picture(12)]}
    for name in ("image", "mask_image"):
        if name in call and name != control:
            call[name] = call[name][0]
    pair.check(**call, controlnet_conditioning_scale=[1.0, 0.4])
    pair.check(**call, controlnet_conditioning_scale=0.7)
    pair.check(
        **call,
        controlnet_conditioning_scale=[0.8, 0.6],
        control_guidance_start=[0.0, 0.3],
        control_guidance_end=[0.5, 1.0],
    )
    if kind == "sd":
        pair.check(**call, guess_mode=True, controlnet_conditioning_scale=[1.0, 0.4])


@pytest.mark.parametrize("task", few(TASKS, "text"))
def test_one_picture_for_two_prompts(pairs, task):
    pair, call, _ = make(pairs, "sd", "a", task)
    for name in ("image", "control_image", "mask_image"):
        if name in call:
            call[name] = call[name][0]
    pair.check(**call)


def test_a_control_picture_of_another_size(pairs):
    pair, call, control = make(pairs, "sd", "a", "text")
    call[control] = [picture(11, 90, 50), picture(12, 90, 50)]
    pair.check(**call, height=64, width=64)


@pytest.mark.slow
def test_sizes_of_xl_equal_diffusers(pairs):
    pair, call, _ = make(pairs, "xl", "a", "text")
    pair.check(**call, original_size=(30, 40), target_size=(70, 80), crops_coords_top_left=(2, 5))
    pair.check(**call, prompt_2=["a pear", "cats"], denoising_end=0.6)


@pytest.mark.slow
def test_nine_channels_with_a_controlnet(pairs):
    pair, call, _ = make(pairs, "sd-inpaint", "a", "inpaint")
    pair.check(**call)
    pair.check(**{**call, "strength": 1.0})
    crop = {**call, "image": picture(5, 128, 112), "mask_image": mask(5, 128, 112)}
    crop |= {"control_image": picture(6, 128, 112), "padding_mask_crop": 8, "output_type": "pil"}
    crop |= {"prompt": PROMPTS[0], "negative_prompt": None, "num_images_per_prompt": 2}
    expected, actual = pair.draw(**crop, height=64, width=64)
    assert abs(actual - expected).max() <= 1
