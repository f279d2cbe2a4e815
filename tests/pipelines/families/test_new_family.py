"""A family that src/ knows nothing of does all that Stable Diffusion does."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from PIL import Image
from support.many_devices import run_on_devices
from support.offline_runs import pictures, pixels, run
from support.runs import RUNS
from support.toy_family import ToyImg2ImgPipeline, ToyPipeline, toy_pipeline

import diffusax
from diffusax import offline
from diffusax.offline.requests import check_image
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.plan.arguments import Call
from diffusax.runtime.programs.compilations import count_compilations

PROMPTS = ["a red apple", "an old house on a hill by the sea"]
CALL = {"prompt": PROMPTS, "prompt_3": ["apple", "a house, in detail"], "seed": [3, 4]}


@pytest.fixture
def pipe():
    return toy_pipeline()


def told(pipe, texts):
    """Context, length and pooled output of three texts, one network at a time."""
    states = []
    for n, text in zip(("", "_2", "_3"), texts):
        ids = np.frombuffer(text.encode() or b" ", np.uint8).astype(np.int32)
        states.append(np.asarray(getattr(pipe, f"text_encoder{n}")(ids[None]))[0])
    pooled = np.concatenate([states[0].mean(0), states[1].mean(0)])
    return states[2][None], np.array([len(states[2])]), pooled[None]


def latents_by_hand(pipe, texts, noise, scale, steps=4):
    """Euler's steps along the guided velocity, the prompts without a pad."""
    shift, x = pipe.scheduler.shift, np.asarray(noise)[None]
    sigmas = np.linspace(1, 0.001 * shift / (1 + (shift - 1) * 0.001), steps)
    sigmas = np.append(shift * sigmas / (1 + (shift - 1) * sigmas), 0)
    for now, after in itertools.pairwise(sigmas):
        t = np.array([now], np.float32)
        y, negative = (
            np.asarray(pipe.transformer(x, t, *told(pipe, which))) for which in (texts, [""] * 3)
        )
        guided = negative + scale * (y - negative)
        norms = (np.linalg.norm(z, axis=-1, keepdims=True) for z in (y, guided))
        x = x + (after - now) * guided * np.divide(*norms)
    return x[0]


def test_prompts_of_several_lengths_are_each_as_they_are_alone(pipe):
    noise = np.random.default_rng(0).standard_normal((2, 4, 16, 16)).astype(np.float32)
    drawn = pipe(**CALL, latents=noise, output_type="latent").images
    for i, found in enumerate(np.asarray(drawn)):
        texts = [PROMPTS[i], PROMPTS[i], CALL["prompt_3"][i]]
        expected = latents_by_hand(pipe, texts, noise[i].transpose(1, 2, 0), 3.0)
        np.testing.assert_allclose(found.transpose(1, 2, 0), expected, atol=2e-4)
    assert np.abs(drawn[0] - drawn[1]).mean() > 0.1


def test_schedules_may_depend_on_the_size():
    pipe = toy_pipeline(use_dynamic_shifting=True)
    small, large = (
        pipe.task(pipe.parts, Call(prompt="a", height=n, width=n, num_inference_steps=4))
        for n in (32, 64)
    )
    assert small.schedule.timesteps[1] < large.schedule.timesteps[1]


def test_a_pipeline_is_the_same_after_saving_and_loading(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    again = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is ToyPipeline
    np.testing.assert_array_equal(again(**CALL).images, pipe(**CALL).images)
    half = ToyImg2ImgPipeline.from_pretrained(tmp_path, dtype="bfloat16", vae_dtype="float32")
    assert half.transformer.dtype == "bfloat16"
    assert half.vae.dtype == "float32"


def test_image_to_image_keeps_more_of_the_image_at_less_strength(pipe):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (32, 32, 3), np.uint8))
    other = ToyImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    call = {"image": image, "seed": 0, "guidance_scale": 1.0, "output_type": "latent"}
    near, far = (other("a house", strength=s, **call).images for s in (0.25, 1.0))
    pixels = np.asarray(image, np.float32)[None] / 127.5 - 1
    kept = np.asarray(pipe.vae.run(pixels, method="encode")[0]).transpose(0, 3, 1, 2)
    alike = [np.corrcoef(np.ravel(x), np.ravel(kept))[0, 1] for x in (near, far)]
    assert alike[0] > alike[1] + 0.3


def test_a_running_batch_of_own_prompts_steps_and_guidance(pipe):
    calls = [
        Call(prompt="a red apple", negative_prompt="", seed=1, num_inference_steps=3),
        Call(
            prompt="a red pear!",
            negative_prompt="",
            seed=2,
            num_inference_steps=5,
            guidance_scale=2.0,
        ),
    ]
    names = ("prompt", "negative_prompt", "seed", "num_inference_steps", "guidance_scale")
    given = [{name: dataclasses.asdict(call)[name] for name in names} for call in calls]
    pictures = [check_image(pipe.parts, call, pipe.scheduler) for call in calls]
    assert pictures[0].kind == pictures[1].kind
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**one) for one in given]
        for future, one in zip(futures, given, strict=True):
            alone = pipe(**one).images[0]
            np.testing.assert_allclose(future.result(120).images[0], alone, atol=1e-4)


def test_a_whole_offline_run(pipe, tmp_path):
    rows = [
        {"prompt": "a red apple", "seed": 1},
        {"prompt": "an old house on a hill by the sea", "seed": 2, "steps": 3},
        {"prompt": "a red pear!", "seed": 3, "guidance": 1.0},
    ]
    assert run(pipe, rows, tmp_path) == offline.Summary(drawn=3, errors=0, finished=True)
    found = {info["line"]: pixels(data) for info, data in pictures(tmp_path)}
    for number, row in enumerate(rows, 1):
        expected = pipe(
            row["prompt"],
            num_inference_steps=row.get("steps", 2),
            guidance_scale=row.get("guidance", 3.0),
            seed=row["seed"],
            output_type="pil",
        ).images[0]
        # Programs of another batch size round otherwise, which may turn a half.
        difference = found[number].astype(int) - np.asarray(expected).astype(int)
        assert np.abs(difference).max() <= 1
        assert found[number].std() > 1


def test_compiled_ahead_and_knobs_compile_nothing(pipe):
    call = ahead.example_call(pipe, 1, None, {"prompt": "a red apple"})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, call)}
    assert found == {"encode_texts", "denoise", "decode"}
    pipe("a red apple", seed=0)
    with count_compilations() as compiled:
        pipe("a red house", seed=1, guidance_scale=5.0, num_inference_steps=7)
    assert compiled == []


def test_the_whole_call_is_a_pure_function(pipe):
    inputs = pipe.prepare_inputs(**CALL)
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    np.testing.assert_allclose(images, pipe(**CALL).images, atol=1e-5)


@pytest.mark.slow
def test_meshes_draw_what_one_device_does():
    found = run_on_devices(RUNS / "new_family_on_mesh.py")
    assert found == ["data=2,tensor=2", "data=2,fsdp=2"]
