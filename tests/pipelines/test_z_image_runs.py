"""What every family has, with Z-Image: running batches, offline runs, adapters, saved programs."""

import jax
import numpy as np
import pytest
import torch
from lora import add_lora, lora_layers
from offline.runs import pictures, pixels, run
from z_images import SIZE, pipeline

import diffusax
from diffusax import offline
from diffusax.pipelines import ahead
from diffusax.runtime.compilations import count_compilations

PROMPT = "an old house on a hill"
KEPT = {"output_type": "np", **SIZE}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z-image")
    reference = pipeline(folder)
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder)
    assert type(pipe) is diffusax.ZImagePipeline
    pipe.set_progress_bar_config(disable=True)
    return reference, pipe


@pytest.fixture
def pipe(both):
    return both[1]


def test_other_prompts_steps_guidance_and_seeds_compile_nothing(pipe):
    pipe(PROMPT, seed=0, num_inference_steps=2, **KEPT)
    with count_compilations() as compiled:
        pipe("two dogs", seed=1, num_inference_steps=3, guidance_scale=2.0, **KEPT)
        more = {"cfg_normalization": 0.9, "cfg_truncation": 0.5, "negative_prompt": "a hat"}
        pipe("a", seed=2, num_inference_steps=4, sigmas=[1.0, 0.5], **more, **KEPT)
        sampler = diffusax.FlowMatchHeunDiscreteScheduler(shift=2.0)
        other = diffusax.ZImagePipeline.from_pipe(pipe, scheduler=sampler)
        other.set_progress_bar_config(disable=True)
        other("a", seed=2, num_inference_steps=3, **KEPT)
    assert compiled == []


@pytest.mark.slow
def test_programs_that_are_listed_ahead_are_those_of_a_call(pipe):
    call = ahead.example_call(pipe, 1, (24, 40), {"prompt": PROMPT})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, call)}
    assert found == {"encode_texts", "denoise", "decode"}
    inputs = pipe.prepare_inputs(PROMPT, seed=0, num_inference_steps=2, **SIZE)
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    expected = pipe(PROMPT, seed=0, num_inference_steps=2, **KEPT).images
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
def test_a_running_batch_mixes_prompts_lengths_steps_and_guidance(pipe):
    calls = [
        {"prompt": "a red apple", "seed": 1, "num_inference_steps": 3, "cfg_normalization": 0.9},
        {"prompt": PROMPT, "seed": 2, "num_inference_steps": 4, "guidance_scale": 2.0},
        {"prompt": "two dogs", "seed": 3, "num_inference_steps": 2, "guidance_scale": 0.0},
    ]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call, **KEPT) for call in calls]
        found = [future.result(120).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call, **KEPT).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_whole_offline_run(pipe, tmp_path):
    rows = [
        {"prompt": "a red apple", "seed": 1, **SIZE},
        {"prompt": PROMPT * 4, "seed": 2, "steps": 3, **SIZE},
        {"prompt": "two dogs", "seed": 3, "guidance": 0.0, **SIZE},
    ]
    assert run(pipe, rows, tmp_path) == offline.Summary(drawn=3, errors=0, finished=True)
    found = {info["line"]: pixels(data) for info, data in pictures(tmp_path)}
    for number, row in enumerate(rows, 1):
        call = {"num_inference_steps": row.get("steps", 2), "seed": row["seed"], **SIZE}
        image = pipe(row["prompt"], guidance_scale=row.get("guidance", 5.0), **call).images[0]
        # Programs of another batch size round otherwise, which may turn a half.
        assert np.abs(found[number].astype(int) - np.asarray(image).astype(int)).max() <= 1


def test_adapters_are_those_of_pytorch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    reference = pipeline(folder)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    add_lora(reference.transformer, "style", 3)
    layers = lora_layers(reference.transformer, "style")
    assert any("context_refiner" in path for path in layers)
    pipe.add_adapter("style", {"transformer": layers})
    call = {"num_inference_steps": 2, "output_type": "np", **SIZE}
    expected = reference(PROMPT, generator=torch.Generator().manual_seed(7), **call).images
    actual = pipe(PROMPT, generator=7, adapters={"style": 1.0}, **call).images
    assert np.abs(actual - expected).max() < 1e-4
    plain = pipe(PROMPT, generator=7, adapters={}, **call).images
    assert np.abs(plain - expected).max() > 0.02


def test_converted_from_pytorch_objects_and_saved(both, tmp_path):
    reference, pipe = both
    converted = diffusax.DiffusionPipeline.from_torch(reference)
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is diffusax.ZImagePipeline
    assert converted.transformer.network == pipe.transformer.network
    call = {"num_inference_steps": 2, "seed": 3, **KEPT}
    expected = pipe(PROMPT, **call).images
    np.testing.assert_array_equal(converted(PROMPT, **call).images, expected)
    converted.save_pretrained(tmp_path)
    again = type(reference).from_pretrained(tmp_path)
    theirs = again(PROMPT, generator=torch.Generator().manual_seed(1), **call_of(call)).images
    ours = pipe(PROMPT, generator=1, **call_of(call)).images
    assert np.abs(theirs - ours).max() < 1e-4


def call_of(call):
    return {k: v for k, v in call.items() if k != "seed"}


def test_the_task_classes_find_it(pipe):
    for auto, name in (
        (diffusax.AutoPipelineForImage2Image, "ZImageImg2ImgPipeline"),
        (diffusax.AutoPipelineForInpainting, "ZImageInpaintPipeline"),
    ):
        other = auto.from_pipe(pipe)
        assert type(other).__name__ == name
        assert other.params["transformer"] is pipe.params["transformer"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"height": 26}, "height must be divisible by 4"),
        ({"guide": lambda y, step: y[0], "cfg_normalization": True}, "only one of guide and cfg"),
        ({"joint_attention_kwargs": {"x": 1}}, "joint_attention_kwargs may hold only 'scale'"),
        ({"prompt": None, "prompt_embeds": [np.zeros((3, 7))]}, r"list of \(tokens, width\)"),
    ],
)
def test_what_is_wrong_is_named(pipe, call, message):
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": PROMPT, **KEPT, **call})
