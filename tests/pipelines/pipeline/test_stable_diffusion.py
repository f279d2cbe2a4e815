import subprocess
import sys
import textwrap

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny import build_stable_diffusion

import diffusax
from diffusax import samplers
from diffusax.networks import Model
from diffusax.runtime.programs.compilations import count_compilations

PROMPT = "a photo of a cat"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "tiny"
    return folder, build_stable_diffusion(folder)


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return diffusax.DiffusionPipeline.from_pretrained(checkpoint[0])


@pytest.fixture
def pipe(loaded):
    """One pipeline for all tests, so that its programs compile once; put back after each."""
    scheduler, params = loaded.scheduler, dict(loaded.params)
    yield loaded
    loaded.scheduler, loaded.params = scheduler, params
    loaded.disable_vae_tiling()


@pytest.fixture
def reference(checkpoint):
    return checkpoint[1]


def draw(pipe, prompt=PROMPT, steps=2, output_type="np", **options):
    return pipe(prompt, num_inference_steps=steps, output_type=output_type, **options).images


def test_turning_a_knob_compiles_nothing(pipe):
    draw(pipe, seed=0)
    with count_compilations() as compiled:
        draw(pipe, "something else", negative_prompt="ugly", seed=5)
        draw(pipe, steps=7, guidance_scale=3.0, guidance_rescale=0.5)
        draw(pipe, seed=[9], eta=0.5)
        original = pipe.scheduler
        for name in samplers.fitting_samplers(original)[0]:
            pipe.scheduler = samplers.scheduler_from_name(name, original)
            draw(pipe, steps=4, eta=0.3 if name in ("ddim", "tcd") else 0.0, seed=1)
    assert compiled == []


@pytest.mark.parametrize("noise_sampler_seed", [7, [2**40, 3]], ids=["one", "each"])
def test_a_seeded_brownian_motion_gives_the_pictures_of_diffusers(
    pipe, reference, noise_sampler_seed
):
    options = {"noise_sampler_seed": noise_sampler_seed, "use_karras_sigmas": True}
    pipe.scheduler = diffusax.DPMSolverSDEScheduler.from_config(pipe.scheduler, **options)
    original = reference.scheduler
    reference.scheduler = diffusers.DPMSolverSDEScheduler.from_config(pipe.scheduler.to_config())
    try:
        generators = [torch.Generator().manual_seed(s) for s in (3, 4)]
        expected = draw(reference, [PROMPT, "b"], steps=3, generator=generators)
        actual = draw(pipe, [PROMPT, "b"], steps=3, generator=[3, 4])
        assert np.abs(actual - expected).max() < 1e-4
    finally:
        reference.scheduler = original


def test_a_run_that_begins_below_the_level_without_signal_is_drawn(pipe, reference):
    """There an epsilon prediction says nothing; text to image is refused."""
    options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    options |= {"clip_sample": False, "prediction_type": "epsilon"}
    theirs = diffusers.StableDiffusionImg2ImgPipeline(
        **reference.components, requires_safety_checker=False
    )
    ours = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    ours.scheduler = diffusax.DDIMScheduler.from_config(pipe.scheduler, **options)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(ours.scheduler.to_config())
    size = pipe.parts.default_size
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    given = {"image": Image.fromarray(image), "strength": 0.5, "steps": 4}
    expected = draw(theirs, generator=torch.Generator().manual_seed(0), **given)
    assert np.abs(draw(ours, generator=0, **given) - expected).max() < 1e-4
    with pytest.raises(ValueError, match="without signal"):
        draw(ours, generator=0, **{**given, "strength": 1.0})
    pipe.scheduler = ours.scheduler
    with pytest.raises(ValueError, match="without signal"):
        draw(pipe, seed=0)


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusax.FlowMatchEulerDiscreteScheduler(),
        diffusax.FlowMatchHeunDiscreteScheduler(shift=3.0),
        diffusax.EDMEulerScheduler(),
        diffusax.EDMDPMSolverMultistepScheduler(),
        diffusax.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        diffusax.EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous"),
    ],
    ids=lambda scheduler: scheduler.class_name,
)
def test_a_sampler_for_other_networks_is_an_error_before_anything_compiles(pipe, scheduler):
    pipe.scheduler = scheduler
    for drawn in (pipe, diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)):
        image = {} if drawn is pipe else {"image": Image.new("RGB", (32, 32))}
        with (
            count_compilations() as compiled,
            pytest.raises(ValueError, match=rf"scheduler={scheduler.class_name} is for.*Euler"),
        ):
            draw(drawn, seed=0, **image)
        assert compiled == []


def test_a_pipeline_made_with_a_sampler_has_networks_for_it(checkpoint, loaded):
    flow, edm = diffusax.FlowMatchEulerDiscreteScheduler(), diffusax.EDMEulerScheduler()
    made = diffusax.DiffusionPipeline.from_pretrained(checkpoint[0], scheduler=flow)
    given = diffusax.StableDiffusionPipeline.from_pipe(loaded, scheduler=flow)
    for pipe in (made, given):
        assert draw(pipe, seed=0).shape == (1, 64, 64, 3)
        pipe.scheduler = samplers.scheduler_from_name("flow_heun", pipe.scheduler)
        draw(pipe, seed=0)
        for other in (edm, loaded.scheduler):
            pipe.scheduler = other
            with pytest.raises(ValueError, match="flow matching"):
                draw(pipe, seed=0)


def test_a_new_shape_compiles(pipe):
    with count_compilations() as compiled:
        draw(pipe, seed=0, height=40)
    assert compiled


def test_torch_noise_gives_the_pictures_of_a_torch_generator(pipe, reference):
    pipe.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler)
    scheduler, original = diffusers.EulerAncestralDiscreteScheduler, reference.scheduler
    reference.scheduler = scheduler.from_config(pipe.scheduler.to_config())
    try:
        generators = [torch.Generator().manual_seed(s) for s in (3, 4)]
        for seed, generator in ((7, torch.Generator().manual_seed(7)), ([3, 4], generators)):
            expected = draw(reference, [PROMPT, "b"], steps=4, generator=generator)
            actual = draw(pipe, [PROMPT, "b"], steps=4, seed=seed, noise="torch")
            assert np.abs(actual - expected).max() < 1e-4
    finally:
        reference.scheduler = original


def test_a_picture_does_not_depend_on_its_batch(pipe):
    pipe.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler)
    four = draw(pipe, num_images_per_prompt=4, seed=3)
    two = draw(pipe, num_images_per_prompt=2, seed=3)
    np.testing.assert_allclose(four[:2], two, atol=1e-5)
    assert np.abs(four[0] - four[1]).max() > 0.01
    own_seed = draw(pipe, num_images_per_prompt=2, seed=[8, 3])
    np.testing.assert_allclose(own_seed[1], two[0], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_rescale": 0.7},
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 2},
        {"height": 48, "width": 80},
    ],
)
def test_call_arguments_mean_what_they_do_in_diffusers(pipe, reference, options):
    n = options.get("num_images_per_prompt", 1)
    h, w = options.get("height", 64) // 4, options.get("width", 64) // 4
    latents = np.random.default_rng(0).normal(size=(n, 4, h, w)).astype(np.float32)
    actual = draw(pipe, latents=latents, **options)
    expected = draw(reference, latents=torch.tensor(latents), **options)
    assert np.abs(actual - expected).max() < 1e-4


def test_embeddings_stand_for_prompts(pipe):
    expected = draw(pipe, negative_prompt="dog", seed=0)
    positive, negative = pipe.encode_prompt(PROMPT, negative_prompt="dog")
    for options in (
        {"prompt_embeds": positive, "negative_prompt_embeds": negative},
        {"prompt_embeds": np.asarray(positive), "negative_prompt": "dog"},
        {"prompt": PROMPT, "negative_prompt_embeds": negative},
    ):
        images = draw(pipe, **{"prompt": None, **options}, seed=0)
        np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
def test_long_and_weighted_prompts_change_the_picture(pipe, caplog):
    long = " ".join(["word"] * 90) + " castle"
    cut = draw(pipe, long, seed=0)
    assert "castle" in caplog.text
    whole = draw(pipe, long, seed=0, long_prompt=True)
    assert np.abs(whole - cut).max() > 1e-3
    weighted = draw(pipe, "a (cat:1.5)", seed=0, prompt_weighting=True)
    assert np.abs(weighted - draw(pipe, "a cat", seed=0)).max() > 1e-3


def test_output_types_are_what_they_name(pipe):
    array = draw(pipe, seed=0)
    assert (array.shape, array.dtype) == ((1, 64, 64, 3), np.float32)
    assert isinstance(draw(pipe, seed=0, output_type="jax"), jax.Array)
    image = draw(pipe, seed=0, output_type="pil")[0]
    assert isinstance(image, Image.Image)
    np.testing.assert_array_equal(np.asarray(image), (array[0] * 255).round().astype(np.uint8))
    assert draw(pipe, seed=0, output_type="latent").shape == (1, 4, 16, 16)


def test_callback_sees_every_step_and_may_change_latents_and_stop(pipe):
    seen = []

    def watch(pipe, step, timestep, tensors):
        seen.append((step, timestep, tensors["latents"].shape))

    plain = draw(pipe, steps=4, seed=0)
    np.testing.assert_array_equal(draw(pipe, steps=4, seed=0, callback_on_step_end=watch), plain)
    timesteps = pipe.scheduler.schedule(4).timesteps
    assert [s[:2] for s in seen] == list(enumerate(timesteps))
    assert seen[0][2] == (1, 4, 16, 16)

    latents = draw(
        pipe,
        steps=4,
        seed=0,
        output_type="latent",
        callback_on_step_end=lambda p, i, t, x: {"latents": np.zeros(seen[0][2])},
    )
    assert not np.asarray(latents).any()

    steps = []
    draw(pipe, steps=4, callback_on_step_end=lambda p, i, t, x: steps.append(i) or i < 1)
    assert steps == [0, 1]


def test_a_component_that_was_replaced_can_be_put_back(pipe):
    before, own = pipe.params["vae"], pipe.vae
    other = jax.tree.map(lambda x: x + 1, before)
    try:
        pipe.vae = Model(own.network, other)
        assert pipe.params["vae"] is other
        assert own.params is before
    finally:
        pipe.vae = own
    assert pipe.params["vae"] is before


@pytest.mark.slow
def test_generate_fn_is_pure_and_differentiable(pipe):
    inputs = pipe.prepare_inputs(PROMPT, num_inference_steps=2, seed=4)
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    np.testing.assert_allclose(images, draw(pipe, seed=4), atol=1e-5)
    np.testing.assert_allclose(pipe.generate_fn(pipe.params, inputs), images, atol=1e-5)
    with count_compilations() as compiled:
        pipe.generate_fn(pipe.params, inputs)
    assert not compiled

    def brightness(noise):
        changed = inputs._replace(plan=inputs.plan._replace(latents=noise))
        return pipe.generate_fn(pipe.params, changed).mean()

    start = inputs.plan.latents
    gradient = jax.jit(jax.grad(brightness))(start)
    direction = np.asarray(gradient) / np.linalg.norm(gradient)
    f = jax.jit(brightness)
    slope = (f(start + 1e-2 * direction) - f(start - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(slope, np.linalg.norm(gradient), rtol=0.05)


def test_custom_timesteps_and_sigmas(pipe, reference):
    pipe.scheduler = diffusax.EulerDiscreteScheduler.from_config(pipe.scheduler)
    by_sigmas = draw(pipe, seed=0, sigmas=[14.0, 3.0, 0.5, 0.0])
    by_timesteps = draw(pipe, seed=0, timesteps=[900, 400, 10])
    assert np.abs(by_sigmas - by_timesteps).max() > 1e-3


@pytest.mark.slow
def test_tiled_decoding_is_that_of_diffusers(pipe, reference):
    latents = np.random.default_rng(0).normal(size=(1, 4, 40, 24)).astype(np.float32)
    pipe.enable_vae_tiling()
    reference.vae.enable_tiling()
    try:
        size = {"height": 160, "width": 96}
        expected = draw(reference, latents=torch.tensor(latents), **size)
    finally:
        reference.vae.disable_tiling()
    actual = draw(pipe, latents=latents, **size)
    assert np.abs(actual - expected).max() < 1e-3


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_nan_is_an_error_that_says_what_to_do(pipe, part):
    broken = jax.tree.map(lambda x: x * np.nan, pipe.params[part])
    pipe.params[part] = broken
    with pytest.raises(FloatingPointError, match="float32"):
        draw(pipe, seed=0)
    if part == "unet":
        with pytest.raises(FloatingPointError, match="latents"):
            draw(pipe, seed=0, output_type="latent")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 65}, r"height must be divisible by 4 \(got 65\); use 64 or 68"),
        ({"width": 0 - 4}, "width"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": 3}, "prompt must be a string or a list of strings"),
        ({"prompt": None}, "prompt or prompt_embeds must be given"),
        ({"prompt": ["a", "b"], "negative_prompt": ["x"] * 3}, "negative_prompt has 3 entries"),
        ({"prompt_embeds": np.zeros((1, 77, 32))}, "only one of prompt and prompt_embeds"),
        (
            {"prompt": None, "prompt_embeds": np.zeros((1, 77, 5))},
            "prompt_embeds must be an array of shape",
        ),
        (
            {"prompt": None, "prompt_embeds": np.full((1, 77, 32), "a")},
            r"^prompt_embeds must be an array of real numbers \(got <U1\)$",
        ),
        (
            {"negative_prompt_embeds": np.full((1, 77, 32), "a")},
            r"^negative_prompt_embeds must be an array of real numbers \(got <U1\)$",
        ),
        (
            {"latents": np.full((1, 4, 16, 16), "a")},
            r"^latents must be an array of real numbers \(got <U1\)$",
        ),
        ({"latents": np.ones((1, 4, 16, 16), object)}, "latents must be an array of real numbers"),
        ({"latents": np.ones((1, 4, 16, 16)) * 1j}, "latents must be an array of real numbers"),
        ({"steps": 0}, "num_inference_steps must be at least 1"),
        ({"steps": 1001}, "must be at most num_train_timesteps"),
        ({"latents": np.zeros((1, 4, 9, 9))}, "latents must have shape"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 images"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"output_type": "tensor"}, "output_type must be one of"),
        ({"noise": "numpy"}, "noise must be one of"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt must be at least 1"),
        ({"timesteps": [3, 2, 1]}, "does not take custom timesteps"),
    ],
)
def test_bad_calls_are_one_sentence(pipe, options, message):
    with pytest.raises(ValueError, match=message):
        draw(pipe, **options)


def test_saved_pipeline_opens_in_diffusers_and_here(pipe, reference, tmp_path):
    pipe.scheduler = diffusax.EulerDiscreteScheduler.from_config(pipe.scheduler)
    pipe.save_pretrained(tmp_path)
    again = diffusax.StableDiffusionPipeline.from_pretrained(tmp_path)
    np.testing.assert_array_equal(draw(again, seed=1), draw(pipe, seed=1))
    upstream = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert type(upstream).__name__ == "StableDiffusionPipeline"
    latents = np.random.default_rng(0).normal(size=(1, 4, 16, 16)).astype(np.float32)
    expected = draw(upstream, latents=torch.tensor(latents))
    assert np.abs(draw(pipe, latents=latents) - expected).max() < 1e-4


def test_generation_imports_no_torch(checkpoint):
    program = f"""
        import sys
        import diffusax
        pipe = diffusax.DiffusionPipeline.from_pretrained({str(checkpoint[0])!r})
        pipe("a cat", num_inference_steps=1, noise="torch", seed=0)
        print(sorted({{"torch", "diffusers", "transformers"}} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_bfloat16_pipeline_draws_nearly_the_same(checkpoint, pipe):
    rounded = diffusax.DiffusionPipeline.from_pretrained(checkpoint[0], dtype="bfloat16")
    difference = draw(rounded, seed=0) - draw(pipe, seed=0)
    assert 0 < np.abs(difference).mean() < 0.05
