"""FLUX.3 klein's pipeline against diffusers' modular one: every pixel, on the same weights."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux3.before_denoise import (
    Flux3TextRoPEInputsStep,
    _prepare_image_ids,
)
from diffusers.modular_pipelines.flux3.decoders import Flux3DecodeStep
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from support.pairs import Pair, generators, mask, picture, slow
from support.tiny_flux3 import FLUX3_CALL, flux3_pipeline

import diffusax

PROMPTS = ["a red apple", "an old house on a hill by the sea, " * 3]
"""With the chat around them of one and of two windows of 80 tokens."""
IMAGES = [picture(1, 67, 90), picture(2, 80, 64)]
"""Both sides of one, and neither of the other, are no multiples of the 4 pixels of a token."""
UNSIZED = {k: v for k, v in FLUX3_CALL.items() if k not in ("height", "width")}


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(**options):
        key = tuple(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("flux3")
            reference = flux3_pipeline(folder, **options)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[key] = Pair(reference, ours)
        return made[key]

    return pair


def test_text_to_image_with_guidance_and_without(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.Flux3KleinPipeline
    guided = pair.check(prompt=PROMPTS, **FLUX3_CALL)
    plain = pair.check(prompt=PROMPTS, guidance_scale=1.0, **FLUX3_CALL)
    assert np.abs(guided - plain).max() > 0.05


def test_a_distilled_checkpoint(pairs_of):
    pair = pairs_of(distilled=True)
    drawn = pair.check(prompt=PROMPTS, **FLUX3_CALL)
    _, scaled = pair.draw(prompt=PROMPTS, guidance_scale=1.5, **FLUX3_CALL)
    np.testing.assert_array_equal(scaled, pair.draw(prompt=PROMPTS, **FLUX3_CALL)[1])
    assert np.abs(drawn - pairs_of().draw(prompt=PROMPTS, **FLUX3_CALL)[1]).max() > 0.05


@pytest.mark.slow
def test_a_distilled_checkpoint_looks_at_images(pairs_of):
    call = {"prompt": PROMPTS[0], "image": IMAGES, "num_inference_steps": 3, **UNSIZED}
    assert pairs_of(distilled=True).check(**call).shape == (1, 88, 64, 3)


def test_a_distilled_checkpoint_makes_sixteen_steps(pairs_of):
    ours = pairs_of(distilled=True).ours
    ours(prompt="a hat", **FLUX3_CALL)
    assert ours.num_timesteps == 16
    ours(prompt="a hat", num_inference_steps=50, **FLUX3_CALL)
    assert ours.num_timesteps == 50


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (IMAGES, (88, 64)),
        (IMAGES[0], (90, 67)),
        slow(picture(3, 90, 50), (50, 90)),
        slow([picture(1, 67, 90)], (90, 67)),
    ],
)
def test_images_to_look_at(pairs_of, image, size):
    seen = pairs_of().check(image=image, prompt=PROMPTS[1], num_inference_steps=2, **UNSIZED)
    assert seen.shape == (1, *size, 3)


def test_a_given_size_is_that_of_the_result(pairs_of):
    given = {"image": IMAGES[0], "prompt": PROMPTS[0], "num_inference_steps": 2}
    both = pairs_of().check(**given, **FLUX3_CALL)
    assert both.shape == (1, 24, 40, 3)
    one = pairs_of().check(**given, height=24, **UNSIZED)
    assert one.shape == (1, 24, 68, 3)


@pytest.mark.parametrize("output_type", ["pil", slow("pt")])
def test_what_fills_up_an_image_is_cut_off(pairs_of, output_type):
    call = {"image": IMAGES[0], "prompt": PROMPTS[0], "num_inference_steps": 2, **UNSIZED}
    expected, actual = pairs_of().draw(output_type=output_type, **call)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= (1 if output_type == "pil" else 1e-4)


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "negative_prompt": "a hat " * 30},
        slow({"timesteps": [1000.0, 600.0, 250.0]}),
        slow({"text_encoder_out_layers": (3, 0, 2), "num_images_per_prompt": 2, "seed": [3, 4]}),
        slow({"max_sequence_length": 70}),
        slow({"max_sequence_length": 100}),
    ],
)
def test_arguments_do_what_they_do_in_diffusers(pairs_of, call):
    if "num_images_per_prompt" in call:
        call = {**call, "prompt": PROMPTS[0], "seed": 3}
    pairs_of().check(**{"prompt": PROMPTS, **FLUX3_CALL, **call})


def test_given_latents_and_embeddings(pairs_of):
    pair = pairs_of()
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 16, 6, 10, generator=generator)
    pair.check(prompt=PROMPTS, latents=latents, **FLUX3_CALL)
    embeds, negatives = pair.ours.encode_prompt(PROMPTS, text_encoder_out_layers=(1, 2, 4))
    assert [len(x) for x in embeds] == [80, 160]
    assert [len(x) for x in negatives] == [80, 80]
    call = {"latents": latents, "num_inference_steps": 4, "output_type": "np", **FLUX3_CALL}
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": negatives}
    expected = pair.ours(prompt=PROMPTS, **call).images
    np.testing.assert_allclose(pair.ours(**given, **call).images, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("distilled", [False, True])
def test_the_layers_that_diffusers_reads(pairs_of, distilled):
    pair = pairs_of(distilled=distilled, layers=32)
    pair.check(prompt=PROMPTS[1], num_inference_steps=2, height=24, width=40)


REPAINT = {
    "prompt": PROMPTS[1],
    "image": picture(1, 42, 26),
    "mask_image": mask(2, 42, 26),
    "strength": 0.7,
    "num_inference_steps": 4,
    **UNSIZED,
}
"""Of 6x10 latents: the borders of the image are no multiples of 4."""


@torch.no_grad()
def repainted(reference, generator, image_reference=None):
    """Inpainting with diffusers' blocks and networks, step by step, 1 h w c.

    diffusers has none of FLUX.3; the order of the steps is that of its pipeline for FLUX.2 klein.
    """
    pipe, steps, size = reference.pipe, REPAINT["num_inference_steps"], {"height": 24, "width": 40}
    processor = Flux2ImageProcessor(vae_scale_factor=4, vae_latent_channels=4)
    options = {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True}
    masks = VaeImageProcessor(vae_scale_factor=4, vae_latent_channels=4, **options)
    small = masks.preprocess(REPAINT["mask_image"], **size)
    small = torch.nn.functional.interpolate(small, size=(6, 10), mode="bilinear")
    maps = [processor.preprocess(REPAINT["image"], **size)]
    if image_reference is not None:
        cut = {"height": 28, "width": 32, "resize_mode": "crop"}
        maps.append(processor.preprocess(image_reference, **cut))
    vae = pipe.vae
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = (vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()
    fold = Flux3VaeEncoderStep._patchify_latents
    seen = [(fold(vae.encode(x).latent_dist.mode()) - mean) / std for x in maps]

    encode = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    layers = {"hidden_states_layers": UNSIZED["text_encoder_out_layers"]}
    texts = [encode(pipe.text_encoder, pipe.tokenizer, text, **layers) for text in (PROMPTS[1], "")]
    ids = [_prepare_image_ids(*y.shape[-2:], 0.5, -1 - i) for i, y in enumerate(seen)]
    looks = {
        "image_cond_hidden_states": torch.cat([y.flatten(2).transpose(1, 2) for y in seen], 1),
        "image_cond_ids": torch.cat(ids),
        "img_ids": _prepare_image_ids(6, 10, 0.5),
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=6.93)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    begin = int(steps - min(steps * REPAINT["strength"], float(steps)))
    times = scheduler.timesteps[begin:]
    scheduler.set_begin_index(begin)
    noise = torch.randn(1, 16, 6, 10, generator=generator)
    x = scheduler.scale_noise(seen[0], times[:1], noise)
    for i, t in enumerate(times):
        given = {"hidden_states": x.flatten(2).transpose(1, 2), "timestep": t[None] / 1000, **looks}
        y, other = (
            pipe.transformer(
                encoder_hidden_states=text,
                txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(text),
                **given,
            ).sample
            for text in texts
        )
        guided = (other + 3.5 * (y - other)).transpose(1, 2).unflatten(2, (6, 10))
        x, known = scheduler.step(guided, t, x).prev_sample, seen[0]
        if i + 1 < len(times):
            known = scheduler.scale_noise(known, times[i + 1 : i + 2], noise)
        x = (1 - small) * known + small * x
    images = vae.decode(Flux3DecodeStep._unpatchify_latents(x * std + mean)).sample
    return processor.postprocess(images, output_type="np")


@pytest.mark.parametrize("image_reference", [None, slow(picture(3, 33, 30))])
def test_inpainting_as_of_flux_2(pairs_of, image_reference):
    pair = pairs_of()
    ours = diffusax.AutoPipelineForInpainting.from_pipe(pair.ours)
    assert type(ours) is diffusax.Flux3KleinInpaintPipeline
    ours.set_progress_bar_config(disable=True)
    given = {} if image_reference is None else {"image_reference": image_reference}
    expected = repainted(pair.reference, generators(7), image_reference)
    actual = ours(**REPAINT, **given, generator=generators(7), output_type="np").images
    assert actual.shape == expected.shape == (1, 24, 40, 3)
    assert np.abs(actual - expected).max() < 1e-4
