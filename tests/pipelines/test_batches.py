"""Images with samplers, steps and guidance of their own in one batch."""

import jax
import numpy as np
import pytest

import diffusax
from diffusax.pipelines import programs, tasks
from diffusax.pipelines.arguments import Call

CALLS = [
    ("pndm", Call(prompt="a cat", num_inference_steps=5, seed=1, guidance_scale=7.5)),
    ("dpm++2m_karras", Call(prompt="a dog", num_inference_steps=3, seed=2, guidance_scale=3.0)),
    ("euler_a", Call(prompt="a fox", num_inference_steps=4, seed=3, guidance_scale=1.5)),
    (
        "heun",
        Call(prompt="an owl", num_inference_steps=3, seed=4, guidance_scale=5.0, guidance_end=0.5),
    ),
]


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd", "a")
    return diffusax.StableDiffusionPipeline.from_pretrained(folder)


def run(pipe, plan, rows):
    state = programs.first_state(plan.latents)
    c = pipe.parts
    state = programs.denoise(c.denoiser, c.denoiser_params, state, plan, 0, rows)
    return np.asarray(programs.final_latents(state))


def test_four_images_with_four_samplers_equal_each_alone(pipe):
    own, prepared = pipe.scheduler, []
    for name, call in CALLS:
        pipe.scheduler = diffusax.samplers.scheduler_from_name(name, own)
        prepared.append(tasks.text_to_image(pipe.parts, call))
    pipe.scheduler = own
    alone = [run(pipe, one.plan, len(one.schedule)) for one in prepared]
    rows = max(len(one.schedule) for one in prepared)
    together = run(pipe, programs.batch_plans([one.plan for one in prepared]), rows)
    assert len({len(one.schedule) for one in prepared}) > 1
    for single, one in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, single[0], atol=1e-4 * np.abs(single).max())
    spread = [np.abs(a - b).max() for a in alone for b in alone if a is not b]
    assert min(spread) > 0.1


@pytest.mark.slow
def test_a_batch_of_plans_keeps_what_inpainting_knows(pipe):
    mask = np.zeros((64, 64), np.float32)
    mask[:, :32] = 1
    image = np.random.default_rng(0).random((64, 64, 3)).astype(np.float32)
    calls = [
        Call(
            prompt="a cat",
            image=image,
            mask_image=mask,
            num_inference_steps=3,
            seed=seed,
            strength=strength,
        )
        for seed, strength in ((1, 1.0), (2, 0.7))
    ]
    prepared = [tasks.inpaint(pipe.parts, call) for call in calls]
    alone = [run(pipe, one.plan, len(one.schedule)) for one in prepared]
    rows = max(len(one.schedule) for one in prepared)
    together = run(pipe, programs.batch_plans([one.plan for one in prepared]), rows)
    assert jax.tree.structure(prepared[0].plan) == jax.tree.structure(prepared[1].plan)
    for single, one in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, single[0], atol=1e-4 * np.abs(single).max())
