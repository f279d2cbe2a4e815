"""FLUX.1's pipelines against PyTorch's: every pixel, on the same weights and noise."""

import diffusers
import numpy as np
import pytest
import torch
from support.pairs import Pair, mask, picture, slow
from support.tiny_transformers import FLUX_FILL, FLUX_SIZE, flux_controlnet, flux_pipeline

import diffusax

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
"""The second is longer than the 32 tokens of T5 in these calls."""
RAW = torch.rand(2, 3, 24, 40, generator=torch.Generator().manual_seed(1))
SCHNELL = {"guidance_embeds": False, "schedule": {"shift": 1.0}}


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(task="", **changes):
        key = repr(changes)
        if key not in made:
            folder = tmp_path_factory.mktemp("flux")
            name = "FluxFillPipeline" if "in_channels" in changes else "FluxPipeline"
            made[key] = (
                flux_pipeline(folder, name, **changes),
                diffusax.DiffusionPipeline.from_pretrained(folder),
            )
            made[key][1].set_progress_bar_config(disable=True)
        theirs, ours = made[key]
        if not task:
            return Pair(theirs, ours)
        name = f"Flux{task}Pipeline"
        reference = getattr(diffusers, name)(**theirs.components)
        reference.set_progress_bar_config(disable=True)
        return Pair(reference, getattr(diffusax, name).from_pipe(ours))

    return pair


def test_text_to_image_with_embedded_and_with_true_guidance(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.FluxPipeline
    plain = pair.check(prompt=PROMPTS, prompt_2=["a", "a house"], guidance_scale=2.0, **FLUX_SIZE)
    other = pair.check(prompt=PROMPTS, prompt_2=["a", "a house"], guidance_scale=3.5, **FLUX_SIZE)
    assert np.abs(plain - other).max() > 0.01
    negative = {"negative_prompt": ["blurry", ""], "negative_prompt_2": ["grey", "a hat"]}
    guided = pair.check(prompt=PROMPTS, **negative, true_cfg_scale=2.5, **FLUX_SIZE)
    unguided = pair.check(prompt=PROMPTS, true_cfg_scale=2.5, **FLUX_SIZE)
    assert np.abs(guided - unguided).max() > 0.05


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2, "prompt": PROMPTS[1]},
        pytest.param({"prompt": PROMPTS, "height": 40, "width": 24}, marks=pytest.mark.slow),
    ],
)
def test_schnell_equals_diffusers(pairs_of, call):
    pairs_of(**SCHNELL).check(**{**FLUX_SIZE, **call})


VELOCITY = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
DEV = {"shift": 3.0, "use_dynamic_shifting": True}
"""FLUX.1-dev's own options, which leave the line of shifts to defaults."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("UniPCMultistepScheduler", {"schedule": DEV}),
        slow("UniPCMultistepScheduler", {}),
        slow("UniPCMultistepScheduler", {"schedule": {"shift": 3.0}}),
        ("DPMSolverMultistepScheduler", {"schedule": DEV}),
        slow("DPMSolverMultistepScheduler", {}),
        slow("DPMSolverSinglestepScheduler", {"schedule": DEV}),
        slow("DEISMultistepScheduler", {"schedule": DEV}),
    ],
)
def test_schedulers_of_other_methods_shift_by_the_size(pairs_of, name, changes):
    pair = pairs_of(**changes)
    with pair.scheduler(name, **VELOCITY):
        pair.check(prompt=PROMPTS[1], **FLUX_SIZE)


@pytest.mark.slow
def test_kontext_with_unipc_keeps_the_pipelines_own_noise_levels(pairs_of):
    pair = pairs_of("Kontext", schedule=DEV)
    call = {"image": picture(1, 26, 50), "_auto_resize": False, "max_area": 30 * 40, **FLUX_SIZE}
    with pair.scheduler("UniPCMultistepScheduler", **VELOCITY):
        pair.check(prompt=PROMPTS[1], **call)


def test_heun_is_refused_where_the_shift_depends_on_the_size(pairs_of):
    pair = pairs_of()
    with (
        pair.scheduler("FlowMatchHeunDiscreteScheduler"),
        pytest.raises(ValueError, match=r"cannot shift noise levels .*Heun\w+\(shift=3.0\)"),
    ):
        pair.ours(prompt=PROMPTS[1], num_inference_steps=2, **FLUX_SIZE)


def test_embeddings_and_packed_latents(pairs_of):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    given = {
        "prompt_embeds": normal(2, 9, 20),
        "pooled_prompt_embeds": normal(2, 16),
        "negative_prompt_embeds": normal(2, 9, 20),
        "negative_pooled_prompt_embeds": normal(2, 16),
        "latents": normal(2, 60, 64),
    }
    size = {"height": 24, "width": 40}
    pairs_of().check(**given, true_cfg_scale=2.0, output_type="latent", **size)


def test_arguments_that_diffusers_refuses_are_refused(pairs_of):
    pair = pairs_of()
    embeds, pooled, _ = (torch.tensor(np.asarray(x)) for x in pair.ours.encode_prompt("a"))
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    calls = {
        "negative_pooled_prompt_embeds must be given": {
            "prompt": "a",
            "negative_prompt_embeds": embeds,
            "true_cfg_scale": 2.0,
        },
        "only one of prompt_2 and prompt_embeds": {**given, "prompt_2": "a hat"},
        "only one of negative_prompt_2 and negative_prompt_embeds": {
            **{f"negative_{name}": value for name, value in given.items()},
            **given,
            "negative_prompt_2": "a hat",
        },
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            pair.ours(**call, **FLUX_SIZE)
        with pytest.raises(ValueError, match=r"Cannot forward both|must also be passed|have to"):
            pair.reference(**call, **FLUX_SIZE)


def test_a_rule_of_guidance_without_a_negative_prompt_is_refused(pairs_of):
    with pytest.raises(ValueError, match="give negative_prompt and a true_cfg_scale above 1"):
        pairs_of().ours(prompt="a", guide=lambda predictions, step: predictions[0], **FLUX_SIZE)


def test_a_callback_is_given_packed_latents_and_prompts(pairs_of):
    def after(pipe, step, timestep, tensors):
        assert tuple(tensors["latents"].shape) == (1, 60, 64)
        return {"latents": tensors["latents"] * 0.9, "prompt_embeds": tensors["prompt_embeds"] + 1}

    call = {"prompt": PROMPTS[0], "negative_prompt": "a hat", "true_cfg_scale": 2.0, **FLUX_SIZE}
    inputs = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    changed = pairs_of().check(**call, **inputs, callback_on_step_end=after)
    assert np.abs(changed - pairs_of().draw(**call)[1]).max() > 0.01


@pytest.mark.parametrize(
    "more",
    [{"strength": 0.6}, pytest.param({"strength": 0.9, "seed": [3, 4]}, marks=pytest.mark.slow)],
)
def test_image_to_image_equals_diffusers(pairs_of, more):
    call = {"prompt": PROMPTS, "num_inference_steps": 4, **FLUX_SIZE, **more}
    pairs_of("Img2Img").check(image=picture(1, 42, 26), **call)


@pytest.mark.slow
def test_image_to_image_in_tiles(pairs_of):
    pair = pairs_of("Img2Img")
    call = {"prompt": PROMPTS[0], "num_inference_steps": 2, "max_sequence_length": 32}
    call |= {"image": picture(1, 96, 72), "height": 72, "width": 96}
    _, whole = pair.draw(**call)
    for pipe in (pair.reference, pair.ours):
        pipe.vae.enable_tiling()
    try:
        tiled = pair.check(**call)
    finally:
        for pipe in (pair.reference, pair.ours):
            pipe.vae.disable_tiling()
    assert np.abs(tiled - whole).max() > 1e-3


@pytest.mark.parametrize(
    "more",
    [
        {"strength": 0.6},
        pytest.param(
            {"strength": 1.0, "true_cfg_scale": 2.0, "negative_prompt": "a hat"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"padding_mask_crop": 4, "output_type": "pil"}, marks=pytest.mark.slow),
    ],
)
def test_inpainting_equals_diffusers(pairs_of, more):
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "prompt": PROMPTS[1]}
    pair = pairs_of("Inpaint")
    if more.get("output_type") != "pil":
        pair.check(**call, **FLUX_SIZE, **more)
        return
    expected, actual = pair.draw(**call, **FLUX_SIZE, **more)
    # Images of 8 bits: a number near a half is rounded to either side.
    assert np.abs(expected - actual).max() <= 1


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"strength": 0.7, "prompt": PROMPTS}, marks=pytest.mark.slow)]
)
def test_fill_equals_diffusers(pairs_of, more):
    pair = pairs_of(**FLUX_FILL)
    assert type(pair.ours) is diffusax.FluxFillPipeline
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "prompt": PROMPTS[1]}
    # Its guidance of 30 is a sinusoid of 30,000, of which each digit of a frequency counts.
    found = pair.check(**{**call, **FLUX_SIZE, **more})
    other = pair.check(**{**call, **FLUX_SIZE, **more}, guidance_scale=3.5)
    assert np.abs(found - other).max() > 1e-3


@pytest.mark.parametrize(
    "more",
    [
        {"image": picture(1, 26, 50), "_auto_resize": False},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {
                "image": [picture(1, 30, 24), picture(2, 30, 24)],
                "_auto_resize": False,
                "prompt": PROMPTS,
                "negative_prompt": ["a hat", "grey"],
                "true_cfg_scale": 2.0,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kontext_equals_diffusers(pairs_of, more):
    call = {"prompt": PROMPTS[1], "max_area": 30 * 40, **FLUX_SIZE, **more}
    found = pairs_of("Kontext").check(**call)
    assert found.shape[1:3] == (24, 44)


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        (
            [{"num_mode": 3}],
            {
                "control_image": picture(1, 42, 26),
                "control_mode": 1,
                "controlnet_conditioning_scale": 0.7,
                "control_guidance_end": 0.6,
                "prompt": PROMPTS[1],
                "negative_prompt": "a hat",
                "true_cfg_scale": 2.0,
            },
        ),
        # A batch of tensors is taken as it is, whatever its range and size.
        pytest.param(
            [{}],
            {"control_image": 0.8 * RAW, "prompt": PROMPTS},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [{}, {"seed": 6}],
            {
                "control_image": [picture(1, 40, 24), picture(2, 40, 24)],
                "controlnet_conditioning_scale": [0.5, 0.8],
                "prompt": PROMPTS,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_controlnets_equal_diffusers(steered, changes, call):
    steered(*changes).check(**call, **FLUX_SIZE)


@pytest.fixture
def steered(pairs_of, tmp_path):
    """Makes a pair of pipelines with ControlNets of the given changes."""

    def made(*changes, several=None):
        pair, theirs, ours = pairs_of(), [], []
        for i, change in enumerate(changes):
            theirs.append(flux_controlnet(**change))
            theirs[-1].save_pretrained(tmp_path / str(i))
            ours.append(diffusax.FluxControlNetModel.from_pretrained(tmp_path / str(i)))
        if not (len(changes) > 1 if several is None else several):
            (theirs,), (ours,) = theirs, ours
        reference = diffusers.FluxControlNetPipeline(**pair.reference.components, controlnet=theirs)
        reference.set_progress_bar_config(disable=True)
        return Pair(
            reference, diffusax.FluxControlNetPipeline.from_pipe(pair.ours, controlnet=ours)
        )

    return made


def test_a_callback_changes_what_a_controlnet_sees_and_reads(steered):
    def after(pipe, step, timestep, tensors):
        assert tuple(tensors["control_image"].shape) == (1, 60, 64)
        return {name: 0.5 * tensors[name] for name in ("control_image", "prompt_embeds")}

    call = {"prompt": PROMPTS[1], "control_image": picture(1, 40, 24), **FLUX_SIZE}
    names = ["control_image", "prompt_embeds"]
    inputs = {"callback_on_step_end_tensor_inputs": names, "callback_on_step_end": after}
    pair = steered({})
    changed = pair.check(**call, **inputs)
    assert np.abs(changed - pair.draw(**call)[1]).max() > 0.01


def test_a_controlnet_that_knows_several_kinds_sees_several_images(steered):
    call = {
        "prompt": PROMPTS[1],
        "control_image": [picture(1, 40, 24), picture(2, 40, 24)],
        "control_mode": [0, 2],
        "controlnet_conditioning_scale": [0.5, 0.8],
        "control_guidance_start": [0.0, 0.0],
        "control_guidance_end": [1.0, 0.6],
        **FLUX_SIZE,
    }
    steered({"num_mode": 3}, several=True).check(**call)


def test_kontext_resizes_the_image_to_a_size_of_its_training():
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    from diffusax.images.references import KONTEXT_SIZES

    assert sorted(KONTEXT_SIZES) == sorted((h, w) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)


def test_encode_prompt_equals_diffusers(pairs_of):
    pair = pairs_of()
    call = {"prompt": PROMPTS, "max_sequence_length": 20}
    expected = pair.reference.encode_prompt(**call)
    actual = pair.ours.encode_prompt(**call)
    for theirs, ours in zip(expected, actual, strict=True):
        assert np.abs(np.asarray(ours) - theirs.detach().numpy()).max() < 1e-5
