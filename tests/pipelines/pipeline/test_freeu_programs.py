"""FreeU in batches, in programs made ahead and exported, in what is shared and noted."""

import logging

import numpy as np
import pytest
from jax import export
from support.compiled_programs import compiled_programs, forget_executables

import diffusax
from diffusax import samplers
from diffusax.offline.run import pipeline_facts
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline.ahead_of_time import compile_all
from diffusax.runtime.programs.exporting import export_requests, flat_arguments

NUMBERS = (0.9, 0.2, 1.2, 1.4)
CALL = {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 3.0}


@pytest.fixture
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_freeu(*NUMBERS)
    return pipe


@pytest.mark.slow
def test_images_of_one_batch_have_samplers_and_numbers_of_their_own(pipe):
    given = {0: ("euler_a", NUMBERS), 1: ("heun", (0.6, 0.4, 1.1, 1.2))}
    with diffusax.RunningBatch(pipe) as batch:
        futures = []
        for seed, (name, numbers) in given.items():
            pipe.enable_freeu(*numbers)
            futures.append(batch.submit("a cat", seed=seed, sampler=name, **CALL))
        together = [future.result(120).images[0] for future in futures]
    own, alone = pipe.scheduler, []
    for seed, (name, numbers) in given.items():
        pipe.enable_freeu(*numbers)
        pipe.scheduler = samplers.scheduler_from_name(name, own)
        alone.append(pipe("a cat", seed=seed, **CALL).images[0])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    pipe.enable_freeu(*NUMBERS)
    other = pipe("a cat", seed=1, **CALL).images[0]
    assert np.abs(alone[1] - other).max() > 1e-3


@pytest.mark.slow
def test_programs_made_ahead_and_exported(pipe, tmp_path):
    expected = pipe("a cat", seed=1, **CALL).images
    c = pipe.parts
    call = ahead.example_call(pipe, 1, None, {**CALL, "seed": 1, "prompt": "a cat"})
    found = {r.program.name: r for r in ahead.requests(c, pipe.task, call)}
    try:
        compile_all([found["denoise"]], None)
        with compiled_programs() as compiled:
            again = pipe("a cat", seed=1, **CALL).images
        assert "denoise" not in compiled
        np.testing.assert_allclose(again, expected, atol=1e-4)
    finally:
        forget_executables()
    export_requests([found["denoise"]], tmp_path, ("cpu",), image_axes=ahead.image_axes)
    prepared = pipe.task(c, call)
    state = np.zeros((6, *prepared.plan.latents.shape), np.float32)
    state[0] = prepared.plan.latents
    rows = np.int32(0), np.int32(len(prepared.schedule))
    given = (c.denoiser_params, state, prepared.plan, *rows)
    run = export.deserialize((tmp_path / "denoise.stablehlo").read_bytes())
    after = run.call(flat_arguments(found["denoise"], given))
    latents = pipe("a cat", seed=1, **{**CALL, "output_type": "latent"}).images
    np.testing.assert_allclose(np.asarray(after[0]).transpose(0, 3, 1, 2), latents, atol=1e-3)


@pytest.mark.slow
def test_the_whole_call_as_a_function_of_the_numbers(pipe):
    expected = pipe("a cat", seed=1, **CALL).images
    inputs = pipe.prepare_inputs("a cat", seed=1, num_inference_steps=3, guidance_scale=3.0)
    assert inputs.plan.step_inputs.freeu.shape == (len(inputs.plan.table.timestep), 4)
    np.testing.assert_allclose(pipe.generate_fn(pipe.params, inputs), expected, atol=1e-4)


def test_pipelines_of_one_model(pipe):
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert other.parts.freeu == pipe.parts.freeu == NUMBERS
    other.unet.disable_freeu()
    assert other.parts.freeu is None
    assert pipe.parts.freeu == NUMBERS
    pipe.unet = other.unet
    assert pipe.parts.freeu is None


def test_what_large_runs_note(pipe):
    assert pipeline_facts(pipe)["freeu"] == list(NUMBERS)
    pipe.disable_freeu()
    assert pipeline_facts(pipe)["freeu"] is None


def test_fused_projections_are_accepted(pipe, caplog):
    with caplog.at_level(logging.INFO, "diffusax"):
        pipe.fuse_qkv_projections(unet=True, vae=False)
        pipe.unfuse_qkv_projections()
        pipe.unet.fuse_qkv_projections()
        pipe.vae.unfuse_qkv_projections()
    names = ["fuse_qkv_projections", "unfuse_qkv_projections"]
    assert [message.split(" ")[0] for message in caplog.messages] == names * 2
    assert "changes nothing in diffusax" in caplog.text
