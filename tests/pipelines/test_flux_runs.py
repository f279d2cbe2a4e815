"""What every family has, with FLUX.1: running batches, offline runs, adapters, saved programs."""

import jax
import numpy as np
import pytest
import torch
from fluxes import SIZE, controlnet, pipeline
from lora import add_lora, lora_layers
from offline.runs import pictures, pixels, run
from pairs import mask, picture

import diffusax
from diffusax import offline
from diffusax.pipelines import ahead
from diffusax.pipelines.arguments import check_call
from diffusax.pipelines.tasks import image_to_image
from diffusax.runtime.compilations import count_compilations

PROMPT = "an old house on a hill"
KEPT = {"output_type": "np", **SIZE}
SIDES = {"height": 24, "width": 40}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    reference = pipeline(folder)
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder)
    assert type(pipe) is diffusax.FluxPipeline
    pipe.set_progress_bar_config(disable=True)
    return reference, pipe


@pytest.fixture
def pipe(both):
    return both[1]


def test_other_prompts_steps_guidance_and_seeds_compile_nothing(pipe):
    guided = {"negative_prompt": "a hat", **KEPT}
    pipe(PROMPT, seed=0, num_inference_steps=2, true_cfg_scale=1.5, **guided)
    with count_compilations() as compiled:
        call = {"seed": 1, "num_inference_steps": 3, "guidance_scale": 2.0}
        pipe("two dogs", "a dog", true_cfg_scale=3.0, **call, **guided)
        sampler = diffusax.FlowMatchHeunDiscreteScheduler(shift=2.0)
        other = diffusax.FluxPipeline.from_pipe(pipe, scheduler=sampler)
        other.set_progress_bar_config(disable=True)
        other("a", seed=2, num_inference_steps=3, true_cfg_scale=2.0, **guided)
    assert compiled == []


@pytest.mark.slow
def test_programs_that_are_listed_ahead_are_those_of_a_call(pipe):
    given = {"prompt": PROMPT, "max_sequence_length": 32}
    call = ahead.example_call(pipe, 1, (24, 40), given)
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, call)}
    assert found == {"encode_texts", "denoise", "decode"}
    inputs = pipe.prepare_inputs(PROMPT, seed=0, num_inference_steps=2, **SIZE)
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    expected = pipe(PROMPT, seed=0, num_inference_steps=2, **KEPT).images
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
def test_a_running_batch_mixes_prompts_steps_and_guidance(pipe):
    calls = [
        {"prompt": "a red apple", "seed": 1, "num_inference_steps": 3, "guidance_scale": 1.0},
        {"prompt": PROMPT, "seed": 2, "num_inference_steps": 4, "guidance_scale": 3.0},
        {
            "prompt": "two dogs",
            "seed": 3,
            "num_inference_steps": 2,
            "negative_prompt": "a hat",
            "true_cfg_scale": 2.0,
        },
    ]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call, **KEPT) for call in calls]
        found = [future.result(120).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call, **KEPT).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_running_batch_of_images_to_look_at(pipe):
    kontext = diffusax.FluxKontextPipeline.from_pipe(pipe)
    kontext.set_progress_bar_config(disable=True)
    own = {"max_area": 24 * 40, "_auto_resize": False, "num_inference_steps": 2}
    calls = [
        {"prompt": prompt, "image": picture(i, 30, 24), "seed": i, **own, **KEPT}
        for i, prompt in enumerate(("a red apple", PROMPT))
    ]
    with diffusax.RunningBatch(kontext) as batch:
        found = [batch.submit(**call) for call in calls]
        found = [future.result(120).images[0] for future in found]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, kontext(**call).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_running_batch_with_a_controlnet(pipe, tmp_path):
    controlnet().save_pretrained(tmp_path)
    net = diffusax.FluxControlNetModel.from_pretrained(tmp_path)
    steered = diffusax.AutoPipelineForText2Image.from_pipe(pipe, controlnet=net)
    assert type(steered) is diffusax.FluxControlNetPipeline
    steered.set_progress_bar_config(disable=True)
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 2.0}
    calls = [
        {"prompt": "a red apple", "control_image": picture(1), "num_inference_steps": 3, **guided},
        {"prompt": PROMPT, "control_image": picture(2), "num_inference_steps": 2},
    ]
    with diffusax.RunningBatch(steered) as batch:
        found = [batch.submit(seed=i, **call, **KEPT) for i, call in enumerate(calls)]
        found = [future.result(120).images[0] for future in found]
    for i, (image, call) in enumerate(zip(found, calls, strict=True)):
        np.testing.assert_allclose(image, steered(seed=i, **call, **KEPT).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_whole_offline_run(pipe, tmp_path):
    rows = [
        {"prompt": "a red apple", "seed": 1, **SIDES},
        {"prompt": PROMPT * 4, "seed": 2, "steps": 3, **SIDES},
        {"prompt": "two dogs", "seed": 3, "guidance": 1.0, **SIDES},
    ]
    assert run(pipe, rows, tmp_path) == offline.Summary(drawn=3, errors=0, finished=True)
    found = {info["line"]: pixels(data) for info, data in pictures(tmp_path)}
    for number, row in enumerate(rows, 1):
        call = {"num_inference_steps": row.get("steps", 2), "seed": row["seed"], **SIDES}
        image = pipe(row["prompt"], guidance_scale=row.get("guidance", 3.5), **call).images[0]
        # Programs of another batch size round otherwise, which may turn a half.
        assert np.abs(found[number].astype(int) - np.asarray(image).astype(int)).max() <= 1


@pytest.mark.slow
def test_adapters_are_those_of_pytorch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    reference = pipeline(folder)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    add_lora(reference.transformer, "style", 3)
    layers = lora_layers(reference.transformer, "style")
    assert any("proj_out" in path for path in layers)
    pipe.add_adapter("style", {"transformer": layers})
    call = {"num_inference_steps": 2, "output_type": "np", **SIZE}
    expected = reference(PROMPT, generator=torch.Generator().manual_seed(7), **call).images
    actual = pipe(PROMPT, generator=7, adapters={"style": 1.0}, **call).images
    assert np.abs(actual - expected).max() < 1e-4
    plain = pipe(PROMPT, generator=7, adapters={}, **call).images
    assert np.abs(plain - expected).max() > 0.02


@pytest.mark.slow
def test_converted_from_pytorch_objects_and_saved(both, tmp_path):
    reference, pipe = both
    converted = diffusax.DiffusionPipeline.from_torch(reference)
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is diffusax.FluxPipeline
    assert converted.transformer.network == pipe.transformer.network
    call = {"num_inference_steps": 2, **KEPT}
    expected = pipe(PROMPT, seed=3, **call).images
    np.testing.assert_array_equal(converted(PROMPT, seed=3, **call).images, expected)
    converted.save_pretrained(tmp_path)
    again = type(reference).from_pretrained(tmp_path)
    theirs = again(PROMPT, generator=torch.Generator().manual_seed(1), **call).images
    ours = pipe(PROMPT, generator=1, **call).images
    assert np.abs(theirs - ours).max() < 1e-4


def test_the_task_classes_find_it(pipe):
    for auto, name in (
        (diffusax.AutoPipelineForImage2Image, "FluxImg2ImgPipeline"),
        (diffusax.AutoPipelineForInpainting, "FluxInpaintPipeline"),
    ):
        other = auto.from_pipe(pipe)
        assert type(other).__name__ == name
        assert other.params["transformer"] is pipe.params["transformer"]
    kontext = diffusax.FluxKontextPipeline.from_pipe(pipe)
    kept = diffusax.AutoPipelineForImage2Image.from_pipe(kontext)
    assert type(kept) is diffusax.FluxKontextPipeline


def test_images_to_start_from_are_resized_to_the_models_size(pipe):
    call = {"prompt": "a", "image": picture(), "strength": 0.5, "num_inference_steps": 2, "seed": 0}
    run = image_to_image(pipe.parts, check_call({**call, "max_sequence_length": 8}))
    assert run.plan.latents.shape == (1, 128, 128, 16)


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("", {"height": 26}, "height must be divisible by 4"),
        ("", {"max_sequence_length": 513}, "max_sequence_length must be at most 512"),
        ("", {"latents": np.zeros((1, 60, 16))}, r"or \(images, tokens, width\) = \(1, 60, 64\)"),
        ("", {"negative_ip_adapter_image": picture()}, "negative_ip_adapter_image must be None"),
        ("", {"ip_adapter_image": picture()}, "IP-Adapter"),
        (
            "Fill",
            {"image": picture(), "mask_image": mask()},
            "filling needs a transformer with 36 input channels",
        ),
    ],
)
def test_what_is_wrong_is_named(pipe, name, call, message):
    other = getattr(diffusax, f"Flux{name}Pipeline").from_pipe(pipe)
    with pytest.raises(ValueError, match=message):
        other(**{"prompt": PROMPT, **KEPT, **call})
