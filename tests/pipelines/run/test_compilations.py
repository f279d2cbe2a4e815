"""What compiles nothing: every knob, sampler, further checkpoint and task on one shape."""

import jax
import numpy as np
import pytest
from support.effort import first
from support.pairs import mask, picture

import diffusax
from diffusax import samplers
from diffusax.pipelines.run import programs
from diffusax.runtime.programs.compilations import count_compilations

STEPS = 3


@pytest.fixture(scope="module")
def load(tiny_checkpoints):
    """A pipeline of ours of a class, kind and variation, quiet."""

    def make(name, kind, variation="a", **components):
        folder, _ = tiny_checkpoints.pipeline(kind, variation)
        pipe = getattr(diffusax, name).from_pretrained(folder, **components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def draw(pipe, seed=0, **call):
    call = {"prompt": "a cat", "num_inference_steps": STEPS, "output_type": "np", **call}
    return pipe(**call, seed=seed).images


def assert_compiles_nothing(pipe, base, changes):
    """One call with `base`, then one with each change: the pictures change, no program is made."""
    first = draw(pipe, **base)
    draw(pipe, **base, seed=1)
    for change in changes:
        with count_compilations() as compiled:
            images = draw(pipe, **{**base, **change})
        assert compiled == [], change
        assert np.abs(images - first).max() > 1e-4, change


IMAGE = {"image": picture(1), "num_inference_steps": 6}


@pytest.mark.slow
def test_strength_and_guidance_interval(load):
    pipe = load("StableDiffusionImg2ImgPipeline", "sd")
    changes = [{"strength": s} for s in (0.5, 0.9, 1.0)]
    changes += [{"guidance_start": 0.4}, {"guidance_end": 0.5}, {"guidance_scale": 3.0}]
    changes += [{"image": picture(2)}, {"prompt": "a dog"}, {"num_inference_steps": 9}]
    assert_compiles_nothing(pipe, IMAGE, changes)


def test_a_new_number_of_steps(load):
    """A schedule goes to the device without a program, also when all programs were let go."""
    pipe = load("StableDiffusionPipeline", "sd")
    draw(pipe, num_inference_steps=4)
    jax.clear_caches()
    draw(pipe, num_inference_steps=4)
    draw(pipe, num_inference_steps=4)
    with count_compilations() as compiled:
        draw(pipe, num_inference_steps=11)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", "sd-inpaint"])
def test_masks_compile_nothing(load, kind):
    pipe = load("StableDiffusionInpaintPipeline", kind)
    base = {**IMAGE, "mask_image": mask(1), "strength": 0.8}
    changes = [{"mask_image": mask(2)}, {"strength": 0.5}, {"guidance_start": 0.3}]
    assert_compiles_nothing(pipe, base, changes)


@pytest.fixture
def steered(load, tiny_checkpoints):
    controlnet = diffusax.ControlNetModel.from_pretrained(tiny_checkpoints.controlnet("sd")[0])
    return load("StableDiffusionControlNetPipeline", "sd", controlnet=controlnet)


@pytest.mark.slow
def test_controls_compile_nothing(steered):
    changes = [
        {"controlnet_conditioning_scale": 0.3},
        {"control_guidance_start": 0.4},
        {"control_guidance_end": 0.5},
        {"guess_mode": True},
        {"image": picture(4)},
        {"guidance_end": 0.5},
    ]
    assert_compiles_nothing(steered, {"image": picture(3)}, changes)


def test_a_watched_run_embeds_the_control_picture_once(steered, monkeypatch):
    embedded, given, shown = [], [], []
    embed, denoise = programs.embed_control, programs.denoise

    def count(*args):
        embedded.append(embed(*args))
        return embedded[-1]

    def note(denoiser, params, state, plan, start, stop):
        given.append(plan.conditions.control[0])
        return denoise(denoiser, params, state, plan, start, stop)

    monkeypatch.setattr(programs, "embed_control", count)
    monkeypatch.setattr(programs, "denoise", note)
    call = {"image": picture(3)}
    alone = draw(steered, **call)
    del embedded[:], given[:]
    watched = draw(
        steered,
        **call,
        callback_on_step_end=lambda pipe, i, t, tensors: shown.append(tensors["image"]),
        callback_on_step_end_tensor_inputs=["image"],
    )
    np.testing.assert_array_equal(watched, alone)
    assert len(embedded) == 1
    assert len(given) == len(shown) == steered.num_timesteps
    for hint in given:
        np.testing.assert_array_equal(hint, embedded[0][0])
    assert shown[0].shape == (1, 3, 64, 64)


@pytest.mark.slow
def test_the_whole_call_is_a_differentiable_function_of_the_control_picture(steered):
    inputs = steered.prepare_inputs("a cat", picture(3), num_inference_steps=STEPS, seed=0)
    images = steered.generate_fn(steered.params, inputs)
    np.testing.assert_allclose(images, draw(steered, image=picture(3)), atol=1e-4)

    def brightness(pictures):
        conditions = inputs.plan.conditions._replace(control=(pictures,))
        changed = inputs._replace(plan=inputs.plan._replace(conditions=conditions))
        return steered.generate_fn(steered.params, changed).mean()

    gradient = jax.grad(brightness)(jax.numpy.asarray(inputs.plan.conditions.control[0]))
    assert gradient.shape == (1, 1, 64, 64, 3)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


@pytest.mark.slow
def test_given_embeddings_of_another_dtype(load):
    pipe = load("StableDiffusionPipeline", "sd", dtype="bfloat16")
    positive, negative = pipe.encode_prompt("a cat")
    expected = draw(pipe)
    embeds = {
        "prompt_embeds": np.asarray(positive, np.float32),
        "negative_prompt_embeds": np.asarray(negative, np.float32),
    }
    with count_compilations() as compiled:
        images = draw(pipe, prompt=None, **embeds)
    assert compiled == []
    np.testing.assert_array_equal(images, expected)


@pytest.mark.slow
def test_the_guidance_of_images_compiles_nothing(load):
    pipe = load("StableDiffusionInstructPix2PixPipeline", "sd-instruct")
    changes = [{"image_guidance_scale": 2.0}, {"guidance_scale": 3.0}, {"guidance_start": 0.5}]
    assert_compiles_nothing(pipe, {"image": picture(3)}, changes)


@pytest.mark.slow
def test_sizes_and_aesthetic_scores(load):
    pipe = load("StableDiffusionXLImg2ImgPipeline", "xl-refiner")
    changes = [
        {"aesthetic_score": 9.0},
        {"negative_aesthetic_score": 5.0},
        {"original_size": (300, 200)},
        {"crops_coords_top_left": (8, 16)},
        {"strength": 0.8},
        {"denoising_start": 0.5},
    ]
    base = {"image": picture(3), "num_inference_steps": 6, "strength": 0.5}
    assert_compiles_nothing(pipe, base, changes)
    base = load("StableDiffusionXLPipeline", "xl")
    changes = [{"target_size": (90, 80)}]
    changes += [{"negative_target_size": (5, 6), "negative_original_size": (7, 8)}]
    changes += [{"denoising_end": 0.6}, {"prompt_2": "a dog"}, {"guidance_rescale": 0.5}]
    changes += [{"negative_prompt": "red"}]
    assert_compiles_nothing(base, {"negative_prompt": "blue"}, changes)


@pytest.mark.parametrize("kind", first(["sd", "xl"]))
def test_another_checkpoint_of_the_architecture(load, kind):
    name = "StableDiffusionXLPipeline" if kind == "xl" else "StableDiffusionPipeline"
    first = draw(load(name, kind, "a"))
    with count_compilations() as compiled:
        second = draw(load(name, kind, "c"))
    assert compiled == []
    assert np.abs(first - second).max() > 1e-2


@pytest.mark.slow
def test_a_session_of_three_tasks_with_every_sampler(load):
    text = load("StableDiffusionPipeline", "sd")
    image = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(text)
    inpaint = diffusax.AutoPipelineForInpainting.from_pipe(image)
    for pipe in (image, inpaint):
        pipe.set_progress_bar_config(disable=True)
    calls = (
        (text, {}),
        (image, {"image": picture(1), "strength": 0.7}),
        (inpaint, {"image": picture(1), "mask_image": mask(1), "strength": 0.7}),
    )
    for _ in range(2):
        for pipe, call in calls:
            draw(pipe, num_inference_steps=4, **call)
    original = text.scheduler
    with count_compilations() as compiled:
        for name in samplers.fitting_samplers(original)[0]:
            scheduler = samplers.scheduler_from_name(name, original)
            for pipe, call in (*calls, calls[0]):
                pipe.scheduler = scheduler
                draw(pipe, num_inference_steps=4, **call)
    assert compiled == []


def test_from_pipe_shares_programs_and_parameters(load):
    text = load("StableDiffusionXLPipeline", "xl")
    draw(text)
    with count_compilations() as compiled:
        other = diffusax.StableDiffusionXLPipeline.from_pipe(text)
        draw(other)
    assert compiled == []
    assert other.params["unet"] is text.params["unet"]
