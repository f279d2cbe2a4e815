"""Caches of steps against PyTorch: diffusers' own, or the definition of the method.

Latents are equal after runs in which some steps compute all and some do not.
"""

import contextlib

import diffusers
import numpy as np
import pytest
import torch
from support.lora import add_lora, lora_layers
from support.pairs import Pair, picture
from support.step_caches import (
    DeepReference,
    FirstBlockReference,
    computed_rows,
    diffusers_decisions,
)
from support.tiny_flux3 import FLUX3_CALL, flux3_pipeline
from support.tiny_transformers import (
    FLUX_SIZE,
    KLEIN_CALL,
    KREA2_SIZE,
    Z_IMAGE_SIZE,
    flux_controlnet,
    flux_pipeline,
    klein_pipeline,
    krea2_pipeline,
    qwen_image21_pipeline,
    qwen_image_pipeline,
    z_image_pipeline,
)

import diffusax

GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
CALLS = {
    "flux": (flux_pipeline, {**FLUX_SIZE, **GUIDED}),
    "klein": (klein_pipeline, {**KLEIN_CALL, "guidance_scale": 1.0}),
    "klein3": (flux3_pipeline, {**FLUX3_CALL, "guidance_scale": 1.0, "output_type": "np"}),
    "krea2": (krea2_pipeline, {**KREA2_SIZE, "guidance_scale": 0.0}),
    "qwen": (qwen_image_pipeline, {**KREA2_SIZE, **GUIDED}),
    "qwen21": (qwen_image21_pipeline, {"height": 64, "width": 96}),
    "z": (z_image_pipeline, {**Z_IMAGE_SIZE, "guidance_scale": 0.0}),
}
COMMON = {"prompt": "a red apple", "num_inference_steps": 8, "output_type": "latent"}
FLOAT = {"taylor_factors_dtype": torch.float32}


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = CALLS[name][0](folder)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            for pipe in (getattr(reference, "pipe", reference), ours):
                pipe.set_progress_bar_config(disable=True)
            made[name] = Pair(reference, ours)
        return made[name]

    return pair


@contextlib.contextmanager
def cached(pair, config, own=None):
    """Turns a cache on in both pipelines, or in ours alone where it is `own`."""
    if own is None:
        pair.reference.transformer.enable_cache(config)
    pair.ours.transformer.enable_cache(own or config)
    try:
        yield
    finally:
        if own is None:
            pair.reference.transformer.disable_cache()
        pair.ours.transformer.disable_cache()


def compare(pair, name, **call):
    expected, actual = pair.draw(**{**COMMON, **CALLS[name][1], **call})
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    return actual


@pytest.mark.parametrize(("name", "threshold"), [("flux", 0.6), ("qwen", 0.75)])
def test_first_block_cache_decides_as_diffusers_for_each_branch(
    pairs_of, monkeypatch, name, threshold
):
    decided = diffusers_decisions(monkeypatch)
    pair = pairs_of(name)
    plain = compare(pair, name)
    with cached(pair, diffusers.FirstBlockCacheConfig(threshold=threshold)):
        latents = compare(pair, name)
        rows = computed_rows(pair.ours, **{**COMMON, **CALLS[name][1]}, seed=7, noise="torch")
    theirs = np.reshape(decided, (8, 2))
    np.testing.assert_array_equal(rows, theirs)
    assert 2 <= theirs.sum() < theirs.size
    assert np.abs(latents - plain).max() > 0.01


@pytest.mark.parametrize(
    ("name", "first", "last", "threshold"),
    [
        ("klein", "transformer_blocks.0", "norm_out", 0.9),
        ("klein3", "single_transformer_blocks.0", "norm_out", 0.9),
        ("z", "layers.0", "all_final_layer.2-1", 1.2),
        ("krea2", "transformer_blocks.0", "final_layer", 0.9),
        ("qwen21", "transformer_blocks.0", "norm_out", 0.9),
    ],
)
def test_first_block_cache_of_transformers_without_one_in_diffusers(
    pairs_of, name, first, last, threshold
):
    pair = pairs_of(name)
    plain = compare(pair, name)
    own = diffusax.FirstBlockCacheConfig(threshold=threshold)
    pipe = getattr(pair.reference, "pipe", pair.reference)
    reference = FirstBlockReference(pipe.transformer, first, last, threshold)
    with cached(pair, None, own), reference:
        latents = compare(pair, name)
        rows = computed_rows(pair.ours, **{**COMMON, **CALLS[name][1]}, seed=7, noise="torch")
    assert rows[:, 0].tolist() == reference.decisions
    assert 1 <= sum(reference.decisions) < 8
    assert np.abs(latents - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flux", {"cache_interval": 3, "disable_cache_before_step": 2}),
        ("flux", {"cache_interval": 3, "disable_cache_before_step": 3, "use_lite_mode": True}),
        ("qwen", {"cache_interval": 2, "disable_cache_before_step": 1, "max_order": 2}),
        ("klein", {"cache_interval": 4, "disable_cache_after_step": 6}),
        # diffusers forgets the first step, in which it computes the text's tokens, too.
        ("qwen21", {"cache_interval": 3, "disable_cache_before_step": 3}),
        (
            "flux",
            {
                "cache_interval": 3,
                "cache_identifiers": [r"single_transformer_blocks\.1"],
                "skip_predict_identifiers": [
                    r"transformer_blocks\.1\.ff",
                    r"single.*\.0\.proj_mlp",
                ],
            },
        ),
    ],
)
def test_taylor_seer_equals_diffusers(pairs_of, name, options):
    pair = pairs_of(name)
    plain = compare(pair, name)
    with cached(pair, diffusers.TaylorSeerCacheConfig(**options, **FLOAT)):
        latents = compare(pair, name)
    assert np.abs(latents - plain).max() > 0.01


@pytest.mark.parametrize(
    ("kind", "interval", "branch"), [("sd", 3, 0), ("sd", 2, 2), ("xl", 3, 1), ("xl", 4, 3)]
)
def test_deep_cache_equals_its_definition(pairs, kind, interval, branch):
    name = f"StableDiffusion{'XL' if kind == 'xl' else ''}Pipeline"
    pair, call = pairs(name, kind), {**COMMON, "sampler": "euler", "guidance_scale": 3.0}
    expected, plain = pair.draw(**call)
    scale = plain.std()
    np.testing.assert_allclose(plain / scale, expected / scale, atol=1e-4)
    config = diffusax.DeepCacheConfig(cache_interval=interval, cache_branch_id=branch)
    pair.ours.unet.enable_cache(config)
    try:
        with DeepReference(pair.reference.unet, interval, branch):
            expected, actual = pair.draw(**call)
    finally:
        pair.ours.unet.disable_cache()
    np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-4)
    assert np.abs(actual - plain).max() > 0.01 * scale


def test_deep_cache_with_a_controlnet_that_steers_each_step(pairs):
    pair = pairs("StableDiffusionControlNetPipeline", "sd", controls=1)
    call = {**COMMON, "sampler": "euler", "guidance_scale": 3.0, "image": picture(2)}
    scale = pair.draw(**call)[1].std()
    for branch in (0, 2):
        pair.ours.unet.enable_cache(diffusax.DeepCacheConfig(3, branch))
        try:
            with DeepReference(pair.reference.unet, 3, branch):
                expected, actual = pair.draw(**call)
        finally:
            pair.ours.unet.disable_cache()
        np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-4)


def test_first_block_cache_with_a_controlnet_that_steers_each_step(pairs_of, tmp_path):
    pair, net = pairs_of("flux"), flux_controlnet()
    net.save_pretrained(tmp_path)
    reference = diffusers.FluxControlNetPipeline(**pair.reference.components, controlnet=net)
    own = diffusax.FluxControlNetModel.from_pretrained(tmp_path)
    steered = Pair(reference, diffusax.FluxControlNetPipeline.from_pipe(pair.ours, controlnet=own))
    for pipe in (steered.reference, steered.ours):
        pipe.set_progress_bar_config(disable=True)
    call = {**COMMON, **FLUX_SIZE, "control_image": picture(1, 40, 24)}
    watched = FirstBlockReference(reference.transformer, "transformer_blocks.0", "norm_out", 0.7)
    with cached(steered, None, diffusax.FirstBlockCacheConfig(0.7)), watched:
        expected, actual = steered.draw(**call)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert 1 <= sum(watched.decisions) < 8


def test_images_to_begin_with_and_a_lora(tmp_path):
    theirs = qwen_image_pipeline(tmp_path)
    pair = Pair(
        diffusers.QwenImageImg2ImgPipeline(**theirs.components),
        diffusax.QwenImageImg2ImgPipeline.from_pretrained(tmp_path),
    )
    for pipe in (pair.reference, pair.ours):
        pipe.set_progress_bar_config(disable=True)
    call = {**COMMON, **KREA2_SIZE, **GUIDED, "image": picture(1), "strength": 0.8}
    with cached(pair, diffusers.FirstBlockCacheConfig(threshold=0.75)):
        expected, plain = pair.draw(**call)
        np.testing.assert_allclose(plain, expected, atol=1e-4)
    add_lora(pair.reference.transformer, "style", 3, ["to_q", "to_v", "net.2"])
    layers = lora_layers(pair.reference.transformer, "style")
    pair.ours.add_adapter("style", {"transformer": layers})
    pair.ours.set_adapters("style")
    with cached(pair, diffusers.FirstBlockCacheConfig(threshold=0.75)):
        expected, actual = pair.draw(**call)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(actual - plain).max() > 0.01
