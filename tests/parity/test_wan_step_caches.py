"""Caches of steps with Wan against diffusers' own; see test_step_caches.py."""

import contextlib

import diffusers
import numpy as np
import pytest
import torch
from support.pairs import picture
from support.step_caches import FirstBlockReference, computed_rows, diffusers_decisions
from support.tiny_transformers import (
    wan_image_components,
    wan_pipeline,
    wan_transformer,
    wan_vace_transformer,
)

import diffusax
from diffusax import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"prompt": "a photo of a cat", "negative_prompt": "dogs", "guidance_scale": 3.0}
CALL |= {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 8}
CALL |= {"max_sequence_length": 24, "output_type": "latent"}
ATTENTIONS = {"cache_identifiers": [r"blocks\.\d+\.attn1", r"blocks\.\d+\.attn2"]}


def opened(folder, kind="WanPipeline", **parts):
    theirs = wan_pipeline(folder, kind, **parts)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    parts = {
        "text": lambda: {},
        "two": lambda: {
            "transformer": wan_transformer(num_layers=3),
            "transformer_2": wan_transformer(7, num_layers=3),
            "boundary_ratio": 0.85,
        },
        "images": wan_image_components,
        "vace": lambda: {"transformer": wan_vace_transformer()},
    }
    kinds = {"images": "WanImageToVideoPipeline", "vace": "WanVACEPipeline"}
    made = {}

    def pair(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = opened(folder, kinds.get(name, "WanPipeline"), **parts[name]())
        return made[name]

    return pair


@contextlib.contextmanager
def cached(pipes, **configs):
    """Turns caches on by component."""
    for pipe in pipes:
        for name, config in configs.items():
            getattr(pipe, name).enable_cache(config)
    try:
        yield
    finally:
        for pipe in pipes:
            for name in configs:
                getattr(pipe, name).disable_cache()


def draw(pipe, name="text", **call):
    given = {**CALL, **call}
    if name == "images":
        given |= {"image": picture(0, 48, 24), "max_sequence_length": 512}
    return np.asarray(pipe(**given, generator=torch.Generator().manual_seed(0)).frames)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("text", diffusers.FirstBlockCacheConfig(threshold=0.6)),
        ("images", diffusers.FirstBlockCacheConfig(threshold=0.2)),
        (
            "text",
            diffusers.TaylorSeerCacheConfig(
                cache_interval=3, taylor_factors_dtype=torch.float32, **ATTENTIONS
            ),
        ),
        (
            "text",
            diffusers.TaylorSeerCacheConfig(
                cache_interval=3, taylor_factors_dtype=torch.float32, use_lite_mode=True
            ),
        ),
    ],
)
def test_one_transformer(pairs_of, monkeypatch, name, config):
    decided = diffusers_decisions(monkeypatch)
    theirs, ours = pairs_of(name)
    plain = draw(ours, name)
    with cached((theirs, ours), transformer=config):
        expected, found = draw(theirs, name), draw(ours, name)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - plain).max() > 0.01
    if isinstance(config, diffusers.FirstBlockCacheConfig):
        assert 2 <= sum(decided) < len(decided)


TWO = {
    "both": {
        "transformer": diffusers.FirstBlockCacheConfig(threshold=0.5),
        "transformer_2": diffusers.TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=1,
            taylor_factors_dtype=torch.float32,
            **ATTENTIONS,
        ),
    },
    "the first": {"transformer": diffusers.FirstBlockCacheConfig(threshold=0.5)},
    "the second": {"transformer_2": diffusers.FirstBlockCacheConfig(threshold=0.5)},
}


@pytest.mark.parametrize("kind", TWO)
def test_two_transformers_have_caches_of_their_own(pairs_of, kind):
    theirs, ours = pairs_of("two")
    first = ours.scheduler.schedule(8).timesteps >= 850
    assert 2 < first.sum() < 6
    plain = draw(ours)
    with cached((theirs, ours), **TWO[kind]):
        expected, found = draw(theirs), draw(ours)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - plain).max() > 1e-3
    np.testing.assert_array_equal(draw(ours), plain)


def test_vace_leaves_out_what_its_control_adds_with_the_blocks(pairs_of):
    theirs, ours = pairs_of("vace")
    call = {"guidance_scale": 1.0, "video": [picture(seed, 32, 16) for seed in range(5)]}
    plain = draw(ours, **call)
    reference = FirstBlockReference(theirs.transformer, "blocks.0", "norm_out", 0.6)
    with cached((ours,), transformer=FirstBlockCacheConfig(0.6)), reference:
        expected, found = draw(theirs, **call), draw(ours, **call)
        rows = computed_rows(ours, **{**CALL, **call}, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert rows[:, 0].tolist() == reference.decisions
    assert 1 <= sum(reference.decisions) < 8
    assert np.abs(found - plain).max() > 1e-3


def test_in_a_running_batch_and_for_other_numbers(pairs_of):
    _, ours = pairs_of("two")
    taylor = TaylorSeerCacheConfig(2, 1, taylor_factors_dtype="float32", **ATTENTIONS)
    calls = [{**CALL, "seed": i, "num_inference_steps": 6 + 2 * i} for i in range(2)]
    with cached((ours,), transformer=FirstBlockCacheConfig(0.5), transformer_2=taylor):
        alone = [np.asarray(ours(**call).frames) for call in calls]
        with diffusax.RunningBatch(ours, smallest=4) as batch:
            futures = [batch.submit(**call) for call in calls]
            together = [np.asarray(future.result(120).frames) for future in futures]
    for found, expected in zip(together, alone):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    with count_compilations() as compiled:
        taylor = TaylorSeerCacheConfig(3, 2, taylor_factors_dtype="float32", **ATTENTIONS)
        with cached((ours,), transformer=FirstBlockCacheConfig(0.4), transformer_2=taylor):
            other = np.asarray(ours(**calls[0]).frames)
    assert compiled == []
    assert np.abs(other - alone[0]).max() > 1e-3


def test_hooks_see_the_transformer_of_each_step(pairs_of):
    _, ours = pairs_of("two")
    hooks = {"blocks.0.attn2": lambda x, at: (x, x.mean())}
    result = ours(**CALL, seed=0, hooks=hooks)
    (kept,) = result.kept.values()
    assert kept.shape == (8,)
    assert np.isfinite(kept).all()
    np.testing.assert_array_equal(result.frames, ours(**CALL, seed=0).frames)


def test_a_cache_of_attentions_must_name_them(pairs_of):
    _, ours = pairs_of("text")
    with pytest.raises(ValueError, match=r"such as cache_identifiers=\[r'blocks"):
        ours.transformer.enable_cache(TaylorSeerCacheConfig())
