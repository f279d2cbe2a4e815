"""Qwen-Image-Edit: running batches, exported functions, saved and listed programs, adapters."""

import jax
import numpy as np
import pytest
import torch
from support.compiled_programs import forget_executables
from support.lora import add_lora, lora_layers
from support.pairs import picture
from support.qwen_edits import PLUS, images, make_areas_smaller, with_positions
from support.tiny_transformers import qwen_image_pipeline

import diffusax
from diffusax.cli.console import main
from diffusax.pipelines.pipeline import ahead

PROMPT = "an old house on a hill"
LONG = "an old house on a hill by the sea, and two dogs that run before it"
SIZE = {"height": 24, "width": 40}
GUIDED = {"negative_prompt": "a hat", "true_cfg_scale": 2.0}


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    make_areas_smaller(monkeypatch.setattr)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a checkpoint, and the pipeline of PyTorch."""
    folder = tmp_path_factory.mktemp("qwen-image-edit")
    return folder, with_positions(qwen_image_pipeline(folder, PLUS, zero_cond_t=True))


def opened(folder):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe(made):
    return opened(made[0])


@pytest.mark.slow
def test_a_running_batch_of_other_images_and_numbers_of_them(pipe):
    calls = [
        {"prompt": PROMPT, "seed": 1, "num_inference_steps": 3, "image": images(2)},
        {"prompt": LONG, "seed": 2, "image": images(2), **GUIDED},
        {"prompt": "a hat", "seed": 3, "image": [picture(5, 70, 50), picture(6, 40, 90)]},
        {"prompt": LONG, "seed": 3, "image": images(1)},
    ]
    calls = [{"num_inference_steps": 2, "output_type": "np", **SIZE, **call} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)


def test_the_function_to_export_takes_the_images_as_arrays(pipe):
    call = {"prompt": PROMPT, "seed": 0, "num_inference_steps": 2, "image": images(2), **SIZE}
    run = jax.jit(pipe.generate_fn)
    found = run(pipe.params, pipe.prepare_inputs(**call))
    np.testing.assert_allclose(found, pipe(**call, output_type="np").images, atol=1e-5)
    others = {**call, "image": [picture(3, 70, 50), picture(4, 40, 90)]}
    with diffusax.count_compilations() as count:
        again = run(pipe.params, pipe.prepare_inputs(**others))
    assert not count
    assert np.abs(again - found).max() > 0.01


@pytest.mark.slow
def test_saved_programs_are_those_of_a_call(made, pipe, tmp_path):
    call = {"prompt": PROMPT, "num_inference_steps": 2, "image": images(2), **SIZE, **GUIDED}
    listed = ahead.example_call(pipe, 1, (24, 40), {"prompt": PROMPT, "image": images(2)})
    found = {request.program.name for request in ahead.requests(pipe.parts, pipe.task, listed)}
    assert found == {"encode_texts", "encode_image", "denoise", "decode"}
    expected = pipe(**call, seed=1, output_type="np").images
    pipe.compile(sizes=[(24, 40)], image=images(2), **GUIDED)
    assert len(pipe.save_compiled(tmp_path)) >= 4
    forget_executables()
    other = opened(made[0])
    assert other.load_compiled(tmp_path) >= 4
    jax.clear_caches()
    with diffusax.count_compilations() as compiled:
        again = other(**call, seed=1, output_type="np").images
    np.testing.assert_allclose(again, expected, atol=1e-5)
    assert not {"denoise", "encode_texts", "encode_image", "decode"} & set(compiled)


def test_adapters_are_those_of_pytorch(tmp_path):
    reference = with_positions(qwen_image_pipeline(tmp_path, PLUS, zero_cond_t=True))
    pipe = opened(tmp_path)
    add_lora(reference.transformer, "style", 3)
    pipe.add_adapter("style", {"transformer": lora_layers(reference.transformer, "style")})
    call = {"prompt": PROMPT, "num_inference_steps": 2, "image": images(2), "output_type": "np"}
    expected = reference(generator=torch.Generator().manual_seed(7), **call, **SIZE).images
    actual = pipe(generator=7, adapters={"style": 1.0}, **call, **SIZE).images
    assert np.abs(actual - expected).max() < 1e-4
    assert np.abs(pipe(generator=7, adapters={}, **call, **SIZE).images - expected).max() > 0.01


def test_texts_cannot_be_encoded_before_their_images_are_known(made):
    with pytest.raises(ValueError, match="image must be given"):
        diffusax.DiffusionPipeline.from_pretrained(made[0], encode_first=[PROMPT])


@pytest.mark.slow
def test_commands_take_several_images(made, pipe, tmp_path):
    first, second = images(2)
    first.save(tmp_path / "a.png")
    second.save(tmp_path / "b.png")
    files = ["--image", str(tmp_path / "a.png"), "--reference", str(tmp_path / "b.png")]
    given = ["--steps", "2", "--seed", "1", "--guidance", "3", "--output", str(tmp_path / "c.png")]
    main(["generate", PROMPT, "--model", str(made[0]), *files, *given])
    call = {"num_inference_steps": 2, "seed": 1, "guidance_scale": 3.0}
    expected = pipe(prompt=PROMPT, image=[first, second], **call).images[0]
    found = np.asarray(diffusax.load_image(tmp_path / "c.png"), np.int32)
    assert np.abs(found - np.asarray(expected, np.int32)).max() <= 1
