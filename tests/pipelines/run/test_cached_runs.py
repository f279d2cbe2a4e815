"""Caches of steps in runs: what compiles, and that each image decides as it would alone."""

import contextlib

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.adapted import random_adapter
from support.many_devices import run_on_devices
from support.pairs import picture
from support.runs import RUNS
from support.step_caches import computed_rows
from support.tiny_transformers import FLUX_SIZE, flux_pipeline, z_image_pipeline

import diffusax
from diffusax import DeepCacheConfig, FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusax.batch.programs import advance_batch
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import lower

CALL = {"prompt": "a red apple", "num_inference_steps": 8, "output_type": "latent", **FLUX_SIZE}
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 2.0}
DEEP = {"prompt": "a cat", "num_inference_steps": 6, "output_type": "latent"}
TAYLOR = TaylorSeerCacheConfig(3, 2, taylor_factors_dtype="float32")


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    flux_pipeline(folder)
    pipe = diffusax.FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def sd(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextlib.contextmanager
def cached(model, config):
    model.enable_cache(config)
    try:
        yield
    finally:
        model.disable_cache()


def draw(pipe, **call):
    return np.asarray(pipe(**call).images)


def denoise_text(pipe):
    call = ahead.example_call(pipe, 1, (24, 40), {"prompt": "a", "max_sequence_length": 32})
    requests = ahead.requests(pipe.parts, pipe.task, call)
    (request,) = [r for r in requests if r.program.name == "denoise"]
    return lower(request).as_text()


def test_numbers_compile_nothing_and_without_a_cache_programs_are_as_before(flux):
    plain, call = denoise_text(flux), {**CALL, **GUIDED, "seed": 0}
    without = draw(flux, **call)
    for first, others in (
        (FirstBlockCacheConfig(0.6), [FirstBlockCacheConfig(0.9), FirstBlockCacheConfig(0.7)]),
        (TAYLOR, [TaylorSeerCacheConfig(n, 1, 7, taylor_factors_dtype="float32") for n in (2, 5)]),
    ):
        with cached(flux.transformer, first):
            assert flux.transformer.is_cache_enabled
            assert denoise_text(flux).count("stablehlo.case") > plain.count("stablehlo.case")
            with count_compilations() as compiled:
                found = [draw(flux, **call)]
            assert compiled
        with count_compilations() as compiled:
            for config in others:
                with cached(flux.transformer, config):
                    found.append(draw(flux, **call))
                    draw(flux, **{**call, "num_inference_steps": 11, "true_cfg_scale": 5.0})
            np.testing.assert_array_equal(draw(flux, **call), without)
        assert compiled == []
        assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(found, [*found[1:], without]))
    assert denoise_text(flux) == plain


def test_each_image_of_a_batch_decides_as_it_does_alone(flux):
    call = {**CALL, "prompt": ["a red apple", "two dogs on a hill"], **GUIDED}
    with cached(flux.transformer, FirstBlockCacheConfig(0.6)):
        rows = computed_rows(flux, **call, seed=[1, 2])
        together = draw(flux, **call, seed=[1, 2])
        for i, prompt in enumerate(call["prompt"]):
            own = {**call, "prompt": prompt, "seed": [i + 1]}
            np.testing.assert_allclose(together[i : i + 1], draw(flux, **own), atol=1e-4)
            np.testing.assert_array_equal(rows[:, 2 * i : 2 * i + 2], computed_rows(flux, **own))
    assert (rows.any(1) & ~rows.all(1)).any()
    assert not rows.all()


def test_a_branch_that_guidance_leaves_out_keeps_what_it_has(flux):
    call = {**CALL, **GUIDED, "seed": 0, "guidance_start": 0.25, "guidance_end": 0.75}
    with cached(flux.transformer, FirstBlockCacheConfig(0.0)):
        rows = computed_rows(flux, **call)
    np.testing.assert_array_equal(rows[:, 0], [True] * 8)
    np.testing.assert_array_equal(rows[:, 1], [False, False, *[True] * 4, False, False])


@pytest.mark.parametrize("config", [FirstBlockCacheConfig(0.6), TAYLOR])
def test_images_of_a_running_batch_keep_their_own_phase(flux, config):
    calls = [{**CALL, "seed": i, "num_inference_steps": 6 + 2 * i} for i in range(3)]
    calls[0] |= GUIDED
    calls[2] |= {**GUIDED, "guidance_end": 0.5}
    with cached(flux.transformer, config):
        alone = [draw(flux, **call) for call in calls]
        with diffusax.RunningBatch(flux, smallest=8) as batch:
            futures = [batch.submit(**call) for call in calls]
            together = [np.asarray(future.result().images) for future in futures]
    for ours, own in zip(together, alone):
        np.testing.assert_allclose(ours, own, atol=1e-4)


def test_calls_with_other_numbers_share_a_running_batch_and_its_lanes(sd):
    configs = [DeepCacheConfig(n, 1) for n in (1, 2, 4)]
    alone, futures = [], []
    # The third takes the lanes of the first, whose evaluations are no multiple of its interval.
    calls = [{**DEEP, "num_inference_steps": n, "seed": i} for i, n in enumerate((5, 9, 6))]
    for config, call in zip(configs, calls):
        with cached(sd.unet, config):
            alone.append(draw(sd, **call))
    before = advance_batch.compiled_shapes
    with diffusax.RunningBatch(sd, lanes=4, smallest=4) as batch:
        for config, call in zip(configs, calls):
            with cached(sd.unet, config):
                futures.append(batch.submit(**call))
        together = [np.asarray(future.result().images) for future in futures]
    assert advance_batch.compiled_shapes <= before + 1
    for ours, own in zip(together, alone):
        np.testing.assert_allclose(ours, own, atol=1e-4 * own.std())


def test_loras_and_images_to_begin_with(flux):
    networks = {"transformer": flux.parts.networks["transformer"]}
    layers = random_adapter(networks["transformer"], "transformer", 3, seed=0).components
    pipe = diffusax.FluxImg2ImgPipeline.from_pipe(flux)
    pipe.set_progress_bar_config(disable=True)
    pipe.add_adapter("style", layers)
    call = {**CALL, "seed": 0, "image": picture(1), "strength": 0.7}
    try:
        with cached(pipe.transformer, FirstBlockCacheConfig(0.6)):
            beside = draw(pipe, **call, adapters={"style": 0.8})
            plain = draw(pipe, **call)
            pipe.fuse_lora(adapter_names=["style"], lora_scale=0.8)
            merged = draw(pipe, **call, adapters={})
            pipe.unfuse_lora()
    finally:
        pipe.delete_adapters("style")
    np.testing.assert_allclose(beside, merged, atol=1e-3)
    assert np.abs(beside - plain).max() > 0.01


@pytest.mark.slow
def test_the_pure_function_of_a_call_has_the_cache_and_gradients(flux):
    call = {**CALL, "seed": 0, "num_inference_steps": 4, "output_type": "np"}
    with cached(flux.transformer, TAYLOR):
        inputs = flux.prepare_inputs(**{k: v for k, v in call.items() if k != "output_type"})
        images = flux.generate_fn(flux.params, inputs)
        np.testing.assert_allclose(images, draw(flux, **call), atol=1e-4)

        def loss(latents):
            plan = inputs.plan._replace(latents=latents)
            return flux.generate_fn(flux.params, inputs._replace(plan=plan)).mean()

        gradient = jax.grad(loss)(jnp.asarray(inputs.plan.latents))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def test_a_network_by_itself_computes_all(flux):
    context = flux.transformer.cache_context("cond", step_index=1)
    arrays = {
        "hidden_states": np.ones((1, 15, 64), np.float32),
        "encoder_hidden_states": np.ones((1, 7, 20), np.float32),
        "pooled_projections": np.ones((1, 16), np.float32),
        "timestep": np.ones(1, np.float32),
        "guidance": np.ones(1, np.float32),
        "txt_ids": np.zeros((7, 3)),
        "img_ids": np.stack([np.zeros(15), *np.divmod(np.arange(15), 5)], -1),
    }
    plain = flux.transformer(**arrays).sample
    with cached(flux.transformer, FirstBlockCacheConfig(0.6)), context:
        np.testing.assert_array_equal(flux.transformer(**arrays).sample, plain)


def test_configs_of_diffusers_are_taken(flux):
    given = diffusers.TaylorSeerCacheConfig(
        cache_interval=4, taylor_factors_dtype=torch.float16, cache_identifiers=["proj_out"]
    )
    with cached(flux.transformer, given):
        own = flux.transformer.switches.cache
    assert own == TaylorSeerCacheConfig(
        4, taylor_factors_dtype="float16", cache_identifiers=["proj_out"]
    )
    assert not flux.transformer.is_cache_enabled


def test_what_cannot_be_is_said_in_a_sentence(flux, sd, tmp_path):
    with pytest.raises(ValueError, match="a AutoencoderKL has no cache of steps"):
        flux.vae.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ValueError, match="must be a DeepCacheConfig for a UNet2D"):
        sd.unet.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ValueError, match=r"at most 3, the last skip .*\(got 9\)"):
        sd.unet.enable_cache(DeepCacheConfig(cache_branch_id=9))
    with (
        cached(flux.transformer, FirstBlockCacheConfig()),
        pytest.raises(ValueError, match="on already, of FirstBlockCacheConfig; call disable_cache"),
    ):
        flux.transformer.enable_cache(TAYLOR)
    with pytest.raises(ValueError, match=r"cache_identifiers must be regular .*'\*'"):
        TaylorSeerCacheConfig(cache_identifiers=["*"])
    with pytest.raises(ValueError, match="threshold must be"):
        FirstBlockCacheConfig(threshold=-1)
    with pytest.raises(ValueError, match="dtype must be a floating-point type"):
        TaylorSeerCacheConfig(taylor_factors_dtype="int7")
    z_image_pipeline(tmp_path)
    z_image = diffusax.ZImagePipeline.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cache_identifiers=\[r'layers\\.\\d\+\\.attention'\]"):
        z_image.transformer.enable_cache(TaylorSeerCacheConfig())
    z_image.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_identifiers=[r"layers\.\d+\.attention"])
    )


@pytest.mark.slow
def test_four_devices_draw_what_one_does(tmp_path):
    flux_pipeline(tmp_path)
    found = run_on_devices(RUNS / "step_caches_on_mesh.py", tmp_path)
    assert found == ["data=4", "data=2,tensor=2"]
