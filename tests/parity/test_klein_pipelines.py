"""FLUX.2 klein's pipeline against PyTorch's: every pixel, on the same weights and noise."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from support.effort import first
from support.lora import add_lora, lora_layers
from support.pairs import Pair, mask, picture, slow
from support.tiny_transformers import KLEIN_CALL, KLEIN_SIZE, klein_pipeline

import diffusax
from diffusax.pipelines.families.flux2 import empirical_mu

PROMPTS = ["a red apple", "an old house on a hill by the sea"]
CUT = "two dogs that run before " * 4
"""With the chat around it longer than the 64 tokens of a tiny call."""
IMAGES = [picture(1, 66, 90), picture(2, 80, 64)]
"""Both sides of one, and neither of the other, are no multiples of the 4 pixels of a token."""


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(**options):
        key = tuple(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("klein")
            reference = klein_pipeline(folder, **options)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[key] = Pair(reference, ours)
        return made[key]

    return pair


def test_text_to_image_with_guidance_and_without(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.Flux2KleinPipeline
    guided = pair.check(prompt=PROMPTS, **KLEIN_CALL)
    plain = pair.check(prompt=PROMPTS, guidance_scale=1.0, **KLEIN_CALL)
    assert np.abs(guided - plain).max() > 0.05


@pytest.mark.parametrize("images", [IMAGES, slow(IMAGES[0])], ids=["several", "one"])
def test_images_to_look_at(pairs_of, images):
    call = {k: v for k, v in KLEIN_CALL.items() if k not in ("height", "width")}
    seen = pairs_of().check(image=images, prompt=PROMPTS[1], num_inference_steps=2, **call)
    # Of the size of the first, whose borders are cut off.
    assert seen.shape == (1, 88, 64, 3)


@pytest.mark.slow
def test_images_to_look_at_in_tiles(pairs_of):
    pair = pairs_of()
    for pipe in (pair.reference, pair.ours):
        pipe.vae.enable_tiling()
    try:
        call = {**KLEIN_CALL, "height": 96, "width": 128, "num_inference_steps": 2}
        pair.check(image=picture(1, 128, 96), prompt=PROMPTS[1], **call)
    finally:
        for pipe in (pair.reference, pair.ours):
            pipe.vae.disable_tiling()


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2, "prompt": CUT},
        pytest.param({"text_encoder_out_layers": (4, 0, -2)}, marks=pytest.mark.slow),
        pytest.param({"output_type": "latent", "seed": [3, 4]}, marks=pytest.mark.slow),
    ],
)
def test_arguments_do_what_they_do_in_diffusers(pairs_of, call):
    pairs_of().check(**{"prompt": PROMPTS, **KLEIN_CALL, **call})


def test_given_latents_and_embeddings(pairs_of):
    generator = torch.Generator().manual_seed(1)
    given = {
        "latents": torch.randn(2, 16, 6, 10, generator=generator),
        "prompt_embeds": torch.randn(2, 64, 48, generator=generator),
        "negative_prompt_embeds": torch.randn(2, 64, 48, generator=generator),
    }
    pairs_of().check(**given, **KLEIN_CALL)


def test_callbacks_see_latents_as_tokens(pairs_of):
    seen = []

    def after(pipe, step, timestep, tensors):
        seen.append(tensors["latents"])
        return {"latents": 0.9 * tensors["latents"]}

    pairs_of().check(prompt=PROMPTS, callback_on_step_end=after, **KLEIN_CALL)
    theirs, ours = seen[:4], seen[4:]
    for x, y in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(y, x, atol=1e-4)


def test_callbacks_change_the_prompts_and_not_the_negative_ones(pairs_of):
    def halve(pipe, step, timestep, tensors):
        return {"prompt_embeds": 0.5 * tensors["prompt_embeds"]}

    call = {
        "prompt": PROMPTS[1],
        "callback_on_step_end_tensor_inputs": ["prompt_embeds"],
        **KLEIN_CALL,
    }
    changed = pairs_of().check(**call, callback_on_step_end=halve)
    assert np.abs(changed - pairs_of().draw(**call)[1]).max() > 0.01


def test_a_distilled_checkpoint_ignores_the_scale(pairs_of):
    pair = pairs_of(is_distilled=True)
    assert pair.ours.config["is_distilled"]
    _, scaled = pair.draw(prompt=PROMPTS, guidance_scale=4.0, **KLEIN_CALL)
    plain = pair.check(prompt=PROMPTS, guidance_scale=1.0, **KLEIN_CALL)
    assert np.abs(scaled - plain).max() < 1e-4


@pytest.mark.parametrize("tokens", [60, 4096, 4300, 4301, 9000])
def test_the_shift_for_a_size_and_steps(tokens):
    for steps in (1, 4, 50, 200):
        expected = pipeline_flux2_klein.compute_empirical_mu(tokens, steps)
        assert empirical_mu(tokens, steps) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"use_dynamic_shifting": False}, {"time_shift_type": "linear"}]
)
def test_other_shifts_equal_diffusers(pairs_of, options):
    pairs_of(**options).check(prompt=PROMPTS, num_inference_steps=7, **KLEIN_CALL)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", slow("UniPCMultistepScheduler")])
def test_schedulers_of_other_methods_shift_by_the_size_and_the_steps(pairs_of, name):
    pair = pairs_of()
    with pair.scheduler(name, use_flow_sigmas=True, prediction_type="flow_prediction"):
        pair.check(prompt=PROMPTS[1], **KLEIN_CALL)


@pytest.mark.slow
def test_the_layers_and_the_length_that_diffusers_reads(pairs_of):
    pairs_of(layers=28).check(prompt=PROMPTS[1], num_inference_steps=2, height=24, width=40)


def test_encode_prompt_returns_embeddings_and_positions(pairs_of):
    pair = pairs_of()
    call = {"num_images_per_prompt": 2, "max_sequence_length": 64}
    call["text_encoder_out_layers"] = (1, 2, 3)
    expected = pair.reference.encode_prompt(PROMPTS, **call)
    actual = pair.ours.encode_prompt(PROMPTS, **call)
    assert np.abs(np.asarray(actual[0]) - expected[0].numpy()).max() < 1e-4
    np.testing.assert_array_equal(actual[1], expected[1])


def repainter(pairs_of, **options):
    """Both pipelines for inpainting, of the components of those for text to image."""
    pair = pairs_of(**options)
    theirs = diffusers.Flux2KleinInpaintPipeline.from_pipe(pair.reference)
    theirs.set_progress_bar_config(disable=True)
    ours = diffusax.AutoPipelineForInpainting.from_pipe(pair.ours)
    assert type(ours) is diffusax.Flux2KleinInpaintPipeline
    ours.set_progress_bar_config(disable=True)
    return Pair(theirs, ours)


REPAINT = {
    "prompt": PROMPTS,
    "image": picture(1, 42, 26),
    "mask_image": mask(2, 42, 26),
    "strength": 0.7,
    **{k: v for k, v in KLEIN_CALL.items() if k not in KLEIN_SIZE},
}
"""Of 6x10 latents: the borders of the image are no multiples of 4."""


@pytest.mark.parametrize(
    "call",
    first(
        [
            {"image_reference": picture(3, 30, 35), "guidance_scale": 3.0},
            {"image_reference": [picture(3, 30, 35), picture(4, 20, 40)], "strength": 1.0},
            {"image_reference": [picture(3, 30, 35)] * 3, "prompt": "a hat"},
            {"guidance_scale": 1.0, "num_images_per_prompt": 2, "height": 80, "width": 64},
            {"sigmas": [0.9, 0.6, 0.3], "strength": 1.0},
            {"output_type": "latent", "prompt": "a hat", "image": [picture(5, 42, 26)]},
        ]
    ),
)
def test_inpainting_equals_diffusers(pairs_of, call):
    repainter(pairs_of).check(**{**REPAINT, **call})


@pytest.mark.slow
def test_inpainting_around_the_mask(pairs_of):
    pair = repainter(pairs_of)
    call = {**REPAINT, "padding_mask_crop": 4, "output_type": "pil", "num_inference_steps": 3}
    # FLUX.2's processor puts the middle of what is generated into the image, instead of making all
    # of it as small as the part around the mask.
    old, factor = pair.reference.image_processor, pair.reference.vae_scale_factor
    pair.reference.image_processor = VaeImageProcessor(vae_scale_factor=2 * factor)
    expected, actual = pair.draw(**call)
    pair.reference.image_processor = old
    assert actual.shape == expected.shape == (2, 26, 42, 3)
    # In steps of 1/255, where rounding may turn a half.
    assert np.abs(actual - expected).max() <= 1
    assert np.abs(expected - np.asarray(REPAINT["image"])).max() > 100


@pytest.mark.slow
def test_inpainting_of_latents_equals_diffusers(pairs_of):
    generator = torch.Generator().manual_seed(1)
    given = {
        "image": torch.randn(1, 16, 6, 10, generator=generator),
        "image_reference": torch.randn(1, 16, 4, 5, generator=generator),
        "latents": torch.randn(2, 16, 6, 10, generator=generator),
        "prompt_embeds": torch.randn(2, 64, 48, generator=generator),
        "negative_prompt_embeds": torch.randn(2, 64, 48, generator=generator),
    }
    call = {k: v for k, v in REPAINT.items() if k != "prompt"}
    repainter(pairs_of).check(**{**call, **given})


def test_images_to_look_at_that_are_computed_once(tmp_path):
    parts = klein_pipeline(tmp_path / "klein").components
    reference = diffusers.Flux2KleinKVPipeline(**parts, is_distilled=True)
    reference.save_pretrained(tmp_path / "kv")
    reference.set_progress_bar_config(disable=True)
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "kv")
    ours.set_progress_bar_config(disable=True)
    assert type(ours) is diffusax.Flux2KleinKVPipeline
    pair = Pair(reference, ours)
    call = {k: v for k, v in KLEIN_CALL.items() if k not in ("height", "width")}
    call |= {"prompt": PROMPTS, "num_inference_steps": 3}
    seen = pair.check(image=IMAGES, **call)
    plain = pair.check(**call, **KLEIN_SIZE)
    assert plain.shape[1:3] == tuple(KLEIN_SIZE.values())
    # Images that see the text and the result are others.
    klein = diffusax.Flux2KleinPipeline.from_pretrained(tmp_path / "klein")
    klein.set_progress_bar_config(disable=True)
    own = {"output_type": "np", "generator": 7, **call}
    other = klein(image=IMAGES, guidance_scale=1.0, **own).images
    assert np.abs(seen - other).max() > 0.01
    add_lora(reference.transformer, "style", 3, ["to_q", "to_qkv_mlp_proj", "linear_out"])
    ours.add_adapter("style", {"transformer": lora_layers(reference.transformer, "style")})
    seed = {"generator": torch.Generator().manual_seed(7), "output_type": "np"}
    expected = reference(image=IMAGES, **seed, **call).images
    adapted = ours(image=IMAGES, adapters={"style": 1.0}, **own).images
    assert np.abs(adapted - expected).max() < 1e-4
    assert np.abs(adapted - seen).max() > 0.01
    with diffusax.count_compilations() as count:
        ours(image=[picture(3, 66, 90), picture(4, 80, 64)], **{**own, "num_inference_steps": 2})
    assert not count
