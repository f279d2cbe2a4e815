"""Calls of several images are prepared as calls of a power of two, whose first images they are."""

import dataclasses

import jax
import numpy as np
import PIL.Image
import pytest

import diffusax
from diffusax.batch.running_batch import padded
from diffusax.pipelines.plan.arguments import check_call
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.runtime.programs.compilations import count_compilations

SECONDS = 120


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    ("given", "own", "size"),
    [
        ({"prompt": ["a", "b", "c"], "seed": 5}, 3, 4),
        ({"prompt": "a", "num_images_per_prompt": 3, "negative_prompt": "x"}, 3, 4),
        ({"prompt": ["a", "b"], "num_images_per_prompt": 2, "seed": [1, 2, 3, 4]}, 4, 4),
        (
            {
                "prompt": ["a", "b", "c"],
                "negative_prompt": ["x", "y", "z"],
                "num_images_per_prompt": 2,
                "seed": [1, 2, 3, 4, 5, 6],
            },
            *(6, 8),
        ),
        ({"prompt": ["a", "b", "c"], "image": PIL.Image.new("RGB", (64, 64), "red")}, 3, 4),
    ],
)
def test_the_first_images_are_those_of_the_call(pipe, given, own, size):
    if "image" in given:
        pipe = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    c = dataclasses.replace(pipe.parts, text_cache=TextCache())
    call = check_call({"seed": 1, "num_inference_steps": 2, "guidance_scale": 3.0, **given})
    more, count = padded(call)
    assert count == own
    expected, found = (pipe.task(c, one).plan for one in (call, more))
    for name in ("latents", "noise", "conditions"):
        for before, after in zip(*(jax.tree.leaves(getattr(p, name)) for p in (expected, found))):
            assert (len(before), len(after)) == (own, size)
            if name == "noise":
                before, after = map(jax.random.key_data, (before, after))
            np.testing.assert_allclose(after[:own], before, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "a"},
        {"prompt": ["a", "b", "c"], "noise": "torch"},
        {"prompt": ["a", "b", "c"], "negative_prompt": ["x", "y"]},
        {"prompt": ["a", "b", "c"], "seed": [1, 2]},
        {"prompt": ["a", "b", "c"], "latents": np.zeros((3, 4, 16, 16), np.float32)},
        {"prompt_embeds": np.zeros((3, 77, 32), np.float32)},
        {"prompt": []},
    ],
)
def test_other_calls_are_left_as_they_are(given):
    call = check_call(given)
    assert padded(call) == (call, None)


def test_after_a_warm_up_other_numbers_of_images_compile_nothing(pipe):
    call = {"num_inference_steps": 2, "height": 32, "width": 32}
    with diffusax.RunningBatch(pipe, lanes=4, smallest=4) as batch:
        batch.warm("a cat", guidance_scale=3.0, **call)
        with count_compilations(every_thread=True) as compiled:
            futures = [
                batch.submit(["a cat"] * count, guidance_scale=scale, **call)
                for count in (1, 2, 3, 4)
                for scale in (1.0, 2.5)
            ]
            futures.append(batch.submit("a cat", num_images_per_prompt=3, **call))
            counts = [len(future.result(SECONDS).images) for future in futures]
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 3]
    assert compiled == []
