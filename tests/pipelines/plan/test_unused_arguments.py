"""Every argument of every call changes its run, is refused, or is named in a warning."""

import inspect

import jax
import numpy as np
import pytest
from support.effort import few
from support.pairs import mask, picture
from support.tiny_transformers import FLUX_FILL, flux_pipeline, klein_pipeline, z_image_pipeline

import diffusax
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.pipeline.call import prepare_call
from diffusax.pipelines.plan.arguments import read_call


def rule(predictions, step):
    return predictions[0]


def watch(*_):
    return None


NORMAL = np.random.default_rng(0).standard_normal
VALUES = {
    "prompt": "another",
    "prompt_2": "a hat",
    "negative_prompt": "blurry",
    "negative_prompt_2": "a hat",
    "num_images_per_prompt": 2,
    "batch_size": 2,
    "clip_skip": 1,
    "max_sequence_length": 4,
    "text_encoder_out_layers": (1, 2, 2),
    "long_prompt": True,
    "prompt_weighting": True,
    "padding_mask_crop": 8,
    "height": 56,
    "width": 56,
    "max_area": 20 * 24,
    "num_inference_steps": 7,
    "original_inference_steps": 33,
    "timesteps": [901, 501, 20],
    "sigmas": [1.0, 0.6, 0.3],
    "strength": 0.35,
    "denoising_start": 0.3,
    "denoising_end": 0.7,
    "eta": 0.5,
    "use_clipped_model_output": True,
    "cross_attention_kwargs": {"scale": 0.5},
    "joint_attention_kwargs": {"scale": 0.5},
    "attention_kwargs": {"scale": 0.5},
    "ip_adapter_image": picture(5),
    "ip_adapter_image_embeds": [NORMAL((2, 1, 24))],
    "negative_ip_adapter_image": picture(5),
    "guidance_scale": 4.25,
    "true_cfg_scale": 2.5,
    "image_guidance_scale": 2.5,
    "guidance_rescale": 0.5,
    "guidance_start": 0.5,
    "guidance_end": 0.5,
    "guide": rule,
    "cfg_normalization": 1.0,
    "cfg_truncation": 0.5,
    "controlnet_conditioning_scale": 0.5,
    "control_guidance_start": 0.5,
    "control_guidance_end": 0.5,
    "control_mode": 0,
    "guess_mode": True,
    "adapter_conditioning_scale": 0.5,
    "adapter_conditioning_factor": 0.5,
    "original_size": (100, 200),
    "crops_coords_top_left": (3, 4),
    "target_size": (100, 200),
    "negative_original_size": (100, 200),
    "negative_crops_coords_top_left": (3, 4),
    "negative_target_size": (100, 200),
    "aesthetic_score": 3.0,
    "negative_aesthetic_score": 3.0,
    "seed": 5,
    "generator": 5,
    "noise": "torch",
    "callback_on_step_end_tensor_inputs": ["latents"],
    "callback_steps": 3,
}
"""A value of each argument that changes the run of some call."""
RESULTS = {"output_type", "return_dict", "callback_on_step_end", "self"}
"""The arguments that concern the result alone."""


def outcome(pipe, caplog, call, name, value):
    """What becomes of an argument: "changes", "warns", "refuses" or "is silent"."""
    caplog.clear()
    try:
        before = fingerprint(pipe, call)
        after = fingerprint(pipe, {**call, name: value})
    except (ValueError, TypeError) as error:
        return f"refuses: {error}"
    said = [r.getMessage() for r in caplog.records if r.name == "diffusax.pipelines.tasks.unused"]
    said = [line for line in said if name in line.partition(" nothing in this call: ")[0]]
    if said:
        return f"warns: {said[-1]}"
    return "is silent" if before == after else "changes"


def fingerprint(pipe, call):
    """All numbers of the run that a call prepares."""
    c, checked = resolve_adapters(pipe.parts, read_call(pipe, (), {"seed": 3, **call}))
    run = prepare_call(pipe.task, c, checked)
    numbers = jax.tree.leaves((run.plan, run.schedule.levels, run.decoder_condition))
    shown = [np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes() for x in numbers]
    loras = [(name, lora.digest) for name, lora in run.loras.items()]
    return shown, loras, jax.tree.structure(run.plan), run.overlay is None


def is_key(x):
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


PROMPT = "a (red:1.4) apple on a table by the old house " + 9 * "and two dogs that run before it, "
IMAGE, MASK = picture(1), mask(2)
CALL = {"prompt": PROMPT, "num_inference_steps": 5}
OFF = {"guidance_scale": 1.0}
SEEN = {**CALL, "image": IMAGE}
SHORT = {"prompt": "a (red:1.4) apple", "num_inference_steps": 5, "height": 40, "width": 24}
LAYERS = {"text_encoder_out_layers": (0, 1, 2)}
MASKED = {**SEEN, "mask_image": MASK, "strength": 0.9}
EMBEDS = {"prompt": None, "prompt_embeds": NORMAL((1, 7, 32))}
SITUATIONS = {
    "text to image": ("StableDiffusionPipeline", "sd", CALL),
    "without guidance": ("StableDiffusionPipeline", "sd", {**CALL, **OFF}),
    "image to image": ("StableDiffusionImg2ImgPipeline", "sd", {**CALL, "image": IMAGE}),
    "inpainting": ("StableDiffusionInpaintPipeline", "sd-inpaint", MASKED),
    "inpainting by latents": ("StableDiffusionInpaintPipeline", "sd", MASKED),
    "edits": ("StableDiffusionInstructPix2PixPipeline", "sd-instruct", SEEN),
    "edits without guidance": (
        "StableDiffusionInstructPix2PixPipeline",
        "sd-instruct",
        {**SEEN, **OFF},
    ),
    "consistency": ("LatentConsistencyModelPipeline", "lcm", CALL),
    "ControlNet": ("StableDiffusionControlNetPipeline", "sd", SEEN),
    "T2I-Adapter": ("StableDiffusionAdapterPipeline", "sd", SEEN),
    "XL": ("StableDiffusionXLPipeline", "xl", CALL),
    "XL without guidance": ("StableDiffusionXLPipeline", "xl", {**CALL, **OFF}),
    "XL image to image": (
        "StableDiffusionXLImg2ImgPipeline",
        "xl",
        {**SEEN, "strength": 0.9},
    ),
    "refiner": ("StableDiffusionXLImg2ImgPipeline", "xl-refiner", {**SEEN, "strength": 0.9}),
    "XL inpainting": ("StableDiffusionXLInpaintPipeline", "xl-inpaint", MASKED),
    "XL ControlNet": ("StableDiffusionXLControlNetPipeline", "xl", SEEN),
    "XL edits": ("StableDiffusionXLInstructPix2PixPipeline", "xl-instruct", SEEN),
    "FLUX": ("FluxPipeline", {}, SHORT),
    "FLUX with true guidance": (
        "FluxPipeline",
        {},
        {**SHORT, "negative_prompt": "grey", "true_cfg_scale": 2.0},
    ),
    "schnell": ("FluxPipeline", {"guidance_embeds": False}, SHORT),
    "FLUX image to image": ("FluxImg2ImgPipeline", {}, {**SHORT, "image": IMAGE}),
    "FLUX inpainting": ("FluxInpaintPipeline", {}, {**MASKED, **SHORT}),
    "FLUX Fill": ("FluxFillPipeline", FLUX_FILL, {**MASKED, **SHORT}),
    "Kontext": (
        "FluxKontextPipeline",
        {},
        {**SHORT, "image": IMAGE, "_auto_resize": False, "max_area": 40 * 24},
    ),
    "klein": ("Flux2KleinPipeline", False, {**SHORT, **LAYERS}),
    "distilled klein": ("Flux2KleinPipeline", True, {**SHORT, **LAYERS}),
    "Z-Image": ("ZImagePipeline", None, SHORT),
    "Z-Image without guidance": ("ZImagePipeline", None, {**SHORT, "guidance_scale": 0.0}),
}
KEPT = ("text to image", "without guidance")
EXPECTED = {
    "text to image": {
        "eta": "PNDMScheduler has no eta",
        "cross_attention_kwargs": "multiplies the weights of LoRAs, and none is active",
        "callback_steps": "there is no callback",
        "callback_on_step_end_tensor_inputs": "there is no callback",
    },
    "without guidance": {
        "negative_prompt": "guidance_scale=1 turns guidance off",
        "guidance_rescale": "guidance_scale=1 turns guidance off",
        "guidance_start": "guidance_scale=1 turns guidance off",
        "guidance_end": "guidance_scale=1 turns guidance off",
        "guide": "guidance_scale=1 turns guidance off",
    },
    "edits without guidance": {"image_guidance_scale": "guidance needs guidance_scale above 1"},
    "refiner": {"prompt_2": "has one text encoder", "target_size": "told an aesthetic score"},
    "XL": {
        "negative_prompt_2": "takes zeros for both",
        "negative_target_size": "count together only",
    },
    "XL image to image": {"aesthetic_score": "told a target size"},
    "FLUX": {
        "negative_prompt": "true_cfg_scale=1 turns guidance off",
        "true_cfg_scale": "guidance needs negative_prompt",
    },
    "schnell": {"guidance_scale": "is told no guidance scale"},
    "distilled klein": {"guidance_scale": "is told no guidance scale"},
    "Z-Image without guidance": {"cfg_truncation": "guidance_scale=0 turns guidance off"},
}
"""Of some situations what the warnings say."""


@pytest.fixture(scope="module")
def pipe_of(pairs, tmp_path_factory):
    """Makes the pipeline of a situation."""

    def make(class_name, kind):
        if class_name.startswith("Stable") or class_name.startswith("Latent"):
            more = {"controls": int("ControlNet" in class_name)}
            more |= {"t2i": ("sd",)} if "Adapter" in class_name else {}
            return pairs(class_name, kind, **more).ours
        folder = tmp_path_factory.mktemp("pipe")
        if class_name.startswith("ZImage"):
            z_image_pipeline(folder)
        elif class_name.startswith("Flux2"):
            klein_pipeline(folder, is_distilled=kind)
        else:
            own = "FluxFillPipeline" if kind is FLUX_FILL else "FluxPipeline"
            flux_pipeline(folder, own, **kind)
        return getattr(diffusax, class_name).from_pretrained(folder)

    return make


def sweep(pipe, caplog, call):
    signature = inspect.signature(type(pipe).__call__).parameters
    names = [name for name in VALUES if name in {**signature, "callback_steps": None}]
    return {name: outcome(pipe, caplog, call, name, VALUES[name]) for name in names}


@pytest.mark.parametrize("name", few(SITUATIONS, *KEPT))
def test_no_argument_is_ignored_in_silence(pipe_of, caplog, name):
    class_name, kind, call = SITUATIONS[name]
    found = sweep(pipe_of(class_name, kind), caplog, call)
    assert [key for key, value in found.items() if value == "is silent"] == []
    assert "changes" in found.values()
    for argument, reason in EXPECTED.get(name, {}).items():
        assert found[argument].startswith(f"warns: {argument} changes nothing in this call: ")
        assert reason in found[argument]


@pytest.mark.parametrize(
    ("call", "warning"),
    [
        (
            {**EMBEDS, **OFF, "clip_skip": 1},
            "clip_skip changes nothing in this call: the embeddings of all prompts are given",
        ),
        (
            {**CALL, "latents": NORMAL((1, 4, 16, 16)), "generator": 5},
            "generator changes nothing in this call: latents are given, and PNDMScheduler draws no "
            "noise between steps",
        ),
        (
            {**CALL, **OFF, "negative_prompt": ["ugly"], "guidance_rescale": 0.2},
            "negative_prompt and guidance_rescale change nothing in this call: guidance_scale=1 "
            "turns guidance off",
        ),
        ({**CALL, **OFF, "negative_prompt": ""}, None),
        ({**CALL, "eta": 0.0, "guidance_rescale": 0.0, "guidance_end": 1}, None),
    ],
)
def test_a_sentence_names_arguments_and_why_they_change_nothing(pairs, caplog, call, warning):
    pipe = pairs("StableDiffusionPipeline", "sd").ours
    fingerprint(pipe, {"seed": None, **call})
    said = [r.getMessage() for r in caplog.records if r.name == "diffusax.pipelines.tasks.unused"]
    assert said == ([] if warning is None else [warning])


@pytest.mark.slow
def test_noise_alone_leaves_nothing_of_the_image(pipe_of, caplog):
    pipe = pipe_of("FluxImg2ImgPipeline", {})
    call = {**SHORT, "image": IMAGE}
    assert fingerprint(pipe, {**call, "image": picture(4)}) != fingerprint(pipe, call)
    assert caplog.records == []
    # Of five steps none is left out.
    call["strength"] = 0.9
    assert fingerprint(pipe, {**call, "image": picture(4)}) == fingerprint(pipe, call)
    reason = "image changes nothing in this call: strength=0.9 starts the run from noise alone"
    assert [record.getMessage() for record in caplog.records] == [reason] * 2
