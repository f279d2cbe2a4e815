"""Qwen-Image 2.1 with images to look at: running batches, exported functions, listed programs."""

import jax
import numpy as np
import pytest
from support.pairs import picture
from support.tiny_transformers import qwen_image21_pipeline

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.serving.catalogue.entries import describe_model

PROMPT = "an old house on a hill"
LONG = "an old house on a hill by the sea, and two dogs that run before it"
SIZE = {"height": 32, "width": 64}
LOOKS = {"image": [picture(1, 64, 72), picture(2, 80, 64)], "output_resolution": 64}
KEPT = {"num_inference_steps": 2, **SIZE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("qwen-image21")
    qwen_image21_pipeline(made)
    return made


@pytest.fixture(scope="module")
def pipe(folder):
    made = diffusax.DiffusionPipeline.from_pretrained(folder)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.slow
def test_a_running_batch_of_texts_and_images_to_look_at(pipe):
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 2.0}
    calls = [
        {"prompt": PROMPT, "seed": 1, "num_inference_steps": 3, **LOOKS},
        {"prompt": LONG, "seed": 2, **LOOKS},
        {"prompt": LONG, "seed": 3, **guided, **LOOKS},
        {"prompt": LONG, "seed": 3},
        {"prompt": "a hat", "seed": 4, "image": picture(3, 40, 90), "output_resolution": 32},
    ]
    calls = [{**KEPT, "output_type": "np", **call} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)


def test_the_function_to_export_takes_the_images_as_arrays(pipe):
    call = {"prompt": PROMPT, "seed": 0, **KEPT, **LOOKS}
    run = jax.jit(pipe.generate_fn)
    found = run(pipe.params, pipe.prepare_inputs(**call))
    np.testing.assert_allclose(found, pipe(**call, output_type="np").images, atol=1e-5)
    others = {**call, "image": [picture(3, 64, 72), picture(4, 80, 64)]}
    with diffusax.count_compilations() as count:
        again = run(pipe.params, pipe.prepare_inputs(**others))
    assert not count
    assert np.abs(again - found).max() > 0.01


@pytest.mark.slow
def test_programs_that_are_listed_ahead_encode_images_to_look_at(pipe):
    looking = ahead.example_call(pipe, 1, (32, 64), {"prompt": PROMPT, **LOOKS})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, looking)}
    assert found == {"encode_texts", "encode_image", "denoise", "decode"}


def test_the_server_finds_it(folder):
    entry = describe_model(folder, "qwen", "Qwen-Image 2.1").entry
    assert entry.tasks == ("text-to-image", "image-to-image")
    assert (entry.height, entry.multiple, entry.guidance_scale) == (1024, 32, 1.0)
