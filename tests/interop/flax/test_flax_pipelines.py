"""diffusers' Flax pipelines: PyTorch's pictures from the same noise, and the old arguments."""

import inspect
import json
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.core import freeze
from PIL import Image
from support.data_sets import smooth_picture

import diffusax
from diffusax.interop import flax
from diffusax.interop.flax import pipeline as base
from diffusax.runtime.programs.compilations import count_compilations

SIGNATURES = Path(__file__).with_name("flax_signatures.json")
TOLERANCE = 1e-4
PROMPTS = ["a red apple, on a table", "Two DOGS running!"]
NEGATIVES = ["blurry", "a very ugly hat"]
NONE = {"safety_checker": None, "feature_extractor": None}
LEVELS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
DDIM = {**LEVELS, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}


def noise(seed=0):
    return np.random.default_rng(seed).standard_normal((2, 4, 16, 16), np.float32)


def pair(tiny_checkpoints, name, kind, **options):
    """PyTorch's pipeline and ours of a kind of checkpoint, both with DDIM unless SDXL's."""
    folder, saved = tiny_checkpoints.pipeline(kind)
    parts = {**saved.components, **options}
    if not kind.startswith("xl"):
        parts["scheduler"] = diffusers.DDIMScheduler(**DDIM)
        parts["requires_safety_checker"] = False
    reference = getattr(diffusers, name)(**parts)
    reference.set_progress_bar_config(disable=True)
    given = {} if kind.startswith("xl") else {**NONE, "scheduler": flax.FlaxDDIMScheduler(**DDIM)}
    ours, params = getattr(flax, f"Flax{name}").from_pretrained(folder, **given)
    return reference, ours, params


def check(expected, actual):
    assert actual.shape == expected.shape
    assert expected.std() > 0.03
    assert np.abs(actual - expected).max() < TOLERANCE


def test_text_to_image_is_that_of_pytorch(tiny_checkpoints):
    reference, ours, params = pair(tiny_checkpoints, "StableDiffusionPipeline", "sd")
    for scale, negative in ((7.5, None), (3, NEGATIVES)):
        expected = reference(
            PROMPTS,
            negative_prompt=negative,
            num_inference_steps=4,
            guidance_scale=scale,
            latents=torch.tensor(noise()),
            output_type="np",
        ).images
        actual = ours(
            ours.prepare_inputs(PROMPTS),
            params,
            jax.random.PRNGKey(0),
            4,
            guidance_scale=scale,
            latents=noise(),
            neg_prompt_ids=None if negative is None else ours.prepare_inputs(negative),
        ).images
        check(expected, actual)


@pytest.mark.slow
def test_noise_and_scale_are_the_callers(tiny_checkpoints):
    _, ours, params = pair(tiny_checkpoints, "StableDiffusionPipeline", "sd")
    ids, key = ours.prepare_inputs(PROMPTS), jax.random.PRNGKey(5)
    scales = jnp.array([7.5, 2.0])
    first = ours(ids, params, key, num_inference_steps=4, guidance_scale=scales).images
    drawn = jax.random.normal(key, (2, 4, 16, 16))
    again = ours(ids, params, key, 4, latents=drawn, return_dict=False)
    assert again[1] is False
    np.testing.assert_allclose(first[0], again[0][0], atol=1e-5)
    assert np.abs(first[1] - again[0][1]).max() > 0.01
    with pytest.raises(ValueError, match="Unexpected latents shape"):
        ours(ids, params, key, 3, latents=drawn[:1])
    with pytest.raises(ValueError, match="one number or one per image, 2"):
        ours(ids, params, key, 3, guidance_scale=jnp.ones(3))
    with pytest.raises(ValueError, match="divisible by 8 but are 60 and 64"):
        ours(ids, params, key, 3, height=60, width=64)


@pytest.mark.slow
def test_extra_large_is_that_of_pytorch(tiny_checkpoints):
    reference, ours, params = pair(tiny_checkpoints, "StableDiffusionXLPipeline", "xl")
    for output, negative, jit in (("np", None, True), ("latent", NEGATIVES, False)):
        expected = reference(
            PROMPTS,
            negative_prompt=negative,
            num_inference_steps=4,
            guidance_scale=5.0,
            latents=torch.tensor(noise()),
            output_type=output,
        ).images
        ids = ours.prepare_inputs(PROMPTS)
        assert ids.shape == (2, 2, 77)
        arrays = (ids, params, jax.random.PRNGKey(0), noise())
        if jit:
            arrays = jax.tree.map(lambda x: jnp.asarray(x)[None], arrays)
        actual = ours(
            *arrays[:3],
            4,
            5.0,
            latents=arrays[3],
            neg_prompt_ids=None if negative is None else ours.prepare_inputs(negative),
            output_type=output,
            jit=jit,
        )[0]
        check(np.asarray(expected), np.asarray(actual[0] if jit else actual))


def test_pipelines_of_one_architecture_share_programs(tiny_checkpoints):
    _, first, params = pair(tiny_checkpoints, "StableDiffusionPipeline", "sd")
    _, second, _ = pair(tiny_checkpoints, "StableDiffusionPipeline", "sd")
    given = (first.prepare_inputs(PROMPTS), params, jax.random.PRNGKey(0), 4)
    one = first(*given, latents=noise()).images
    with count_compilations() as compiled:
        same = second(*given, latents=noise()).images
    assert not compiled
    np.testing.assert_array_equal(one, same)


@pytest.mark.slow
def test_image_to_image_is_that_of_pytorch(tiny_checkpoints):
    reference, ours, params = pair(tiny_checkpoints, "StableDiffusionImg2ImgPipeline", "sd")
    ids, pixels = ours.prepare_inputs(PROMPTS, [smooth_picture(0), smooth_picture(1)])
    key, eps = jax.random.PRNGKey(1), torch.randn((2, 4, 16, 16), generator=generator())
    dist = ours.vae.apply({"params": params["vae"]}, pixels, method=ours.vae.encode).latent_dist
    clean = ours.vae.config.scaling_factor * dist.sample(key).transpose(0, 3, 1, 2)
    expected = reference(
        PROMPTS,
        image=torch.tensor(np.asarray(clean)),
        strength=0.6,
        num_inference_steps=5,
        generator=generator(),
        output_type="np",
    ).images
    given = {"num_inference_steps": 5, "noise": jnp.asarray(eps.numpy())}
    actual = ours(ids, pixels, params, key, 0.6, **given).images
    check(expected, actual)
    with pytest.raises(ValueError, match="image is 64 by 64, but `height` and `width` are 32"):
        ours(ids, pixels, params, key, height=32, width=64)


@pytest.mark.slow
def test_inpainting_is_that_of_pytorch(tiny_checkpoints):
    name = "StableDiffusionInpaintPipeline"
    reference, ours, params = pair(tiny_checkpoints, name, "sd-inpaint")
    images, key = [smooth_picture(0), smooth_picture(1)], jax.random.PRNGKey(1)
    # Whole latents are masked or not: PyTorch and JAX take another pixel of each as the nearest.
    small = np.random.default_rng(3).integers(0, 2, (16, 16)).astype(np.uint8) * 255
    white = Image.fromarray(small).resize((64, 64), Image.Resampling.NEAREST)
    ids, masked, mask = ours.prepare_inputs(PROMPTS, images, [white, white])
    dist = ours.vae.apply({"params": params["vae"]}, masked, method=ours.vae.encode).latent_dist
    latents = dist.sample(jax.random.split(key)[1]).transpose(0, 3, 1, 2)
    expected = reference(
        PROMPTS,
        image=images,
        mask_image=[white, white],
        masked_image_latents=torch.tensor(np.asarray(latents * 0.18215)),
        num_inference_steps=4,
        latents=torch.tensor(noise()),
        output_type="np",
    ).images
    actual = ours(ids, mask, masked, params, key, 4, latents=noise()).images
    check(expected, actual)


def test_inpainting_wants_a_unet_for_it(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    ours, params = flax.FlaxStableDiffusionInpaintPipeline.from_pretrained(folder, **NONE)
    ids, masked, mask = ours.prepare_inputs("a", smooth_picture(0), smooth_picture(1))
    with pytest.raises(ValueError, match="must have 9 in_channels for inpainting"):
        ours(ids, mask, masked, params, jax.random.PRNGKey(0), 4)


@pytest.mark.slow
def test_controlnet_is_that_of_pytorch(tiny_checkpoints):
    folder, controlnet = tiny_checkpoints.controlnet("sd")
    ours_net, net_params = flax.FlaxControlNetModel.from_pretrained(folder, from_pt=True)
    name, kind = "StableDiffusionControlNetPipeline", "sd"
    folder, saved = tiny_checkpoints.pipeline(kind)
    parts = {**saved.components, "scheduler": diffusers.DDIMScheduler(**DDIM)}
    reference = getattr(diffusers, name)(
        **parts, controlnet=controlnet, requires_safety_checker=False
    )
    reference.set_progress_bar_config(disable=True)
    scheduler = flax.FlaxDDIMScheduler(**DDIM)
    ours, params = flax.FlaxStableDiffusionControlNetPipeline.from_pretrained(
        folder, controlnet=ours_net, scheduler=scheduler, **NONE
    )
    params["controlnet"] = net_params
    images = [smooth_picture(0), smooth_picture(1)]
    expected = reference(
        PROMPTS,
        image=images,
        num_inference_steps=4,
        controlnet_conditioning_scale=0.6,
        latents=torch.tensor(noise()),
        output_type="np",
    ).images
    actual = ours(
        ours.prepare_text_inputs(PROMPTS),
        ours.prepare_image_inputs(images),
        params,
        jax.random.PRNGKey(0),
        4,
        latents=noise(),
        controlnet_conditioning_scale=0.6,
    ).images
    check(expected, actual)


@pytest.mark.slow
def test_instruct_pix2pix_is_that_of_pytorch(tiny_checkpoints):
    name = "StableDiffusionInstructPix2PixPipeline"
    reference, ours, params = pair(tiny_checkpoints, name, "sd-instruct")
    images = [smooth_picture(0), smooth_picture(1)]
    expected = reference(
        PROMPTS,
        image=images,
        num_inference_steps=4,
        guidance_scale=5.0,
        image_guidance_scale=1.7,
        negative_prompt=NEGATIVES,
        latents=torch.tensor(noise()),
        output_type="np",
    ).images
    ids, pixels = ours.prepare_inputs(PROMPTS, images)
    actual = ours(
        ids,
        pixels,
        params,
        jax.random.PRNGKey(0),
        4,
        5.0,
        1.7,
        latents=noise(),
        neg_prompt_ids=ours.prepare_inputs(NEGATIVES, images)[0],
    ).images
    check(expected, actual)


def test_pictures_are_cut_to_whole_blocks(tiny_checkpoints):
    _, ours, _ = pair(tiny_checkpoints, "StableDiffusionImg2ImgPipeline", "sd")
    wide = smooth_picture(0).resize((100, 70))
    _, pixels = ours.prepare_inputs("a", wide)
    expected = np.asarray(wide.resize((96, 64), Image.Resampling.LANCZOS), np.float32)
    np.testing.assert_allclose(pixels[0].transpose(1, 2, 0), expected / 127.5 - 1, atol=1e-5)
    drawn = ours.numpy_to_pil(expected / 255)
    np.testing.assert_array_equal(drawn[0], expected.astype(np.uint8))
    with pytest.raises(ValueError, match="image has to be of type"):
        ours.prepare_inputs("a", pixels)
    with pytest.raises(ValueError, match="`prompt` has to be of type `str` or `list`"):
        ours.prepare_inputs(("a",), wide)


@pytest.mark.slow
def test_pndm_runs_as_many_evaluations_as_steps(tiny_checkpoints):
    """PNDM has one evaluation more, which the Flax pipelines left out."""
    _, ours, params = pair(tiny_checkpoints, "StableDiffusionPipeline", "sd")
    ids, key = ours.prepare_inputs(PROMPTS), jax.random.PRNGKey(0)
    with_ddim = ours(ids, params, key, 4, latents=noise())[0]
    scheduler = flax.FlaxPNDMScheduler(**LEVELS, skip_prk_steps=True, steps_offset=1)
    ours.scheduler, params["scheduler"] = scheduler, scheduler.create_state()
    actual = ours(ids, params, key, 4, latents=noise())[0]
    assert np.abs(actual - with_ddim).max() > 0.01

    negative = ours.prepare_inputs(["", ""])
    texts = ours.text_encoder(np.concatenate([negative, ids]), params=params["text_encoder"])[0]
    state = scheduler.set_timesteps(params["scheduler"], 4, shape=noise().shape)
    assert len(state.timesteps) == 5
    latents = jnp.asarray(noise())
    unet = jax.jit(lambda x, t: ours.unet.apply({"params": params["unet"]}, x, t, texts).sample)
    for t in state.timesteps[:4]:
        without, with_text = jnp.split(unet(jnp.concatenate([latents] * 2), t), 2)
        guided = without + 7.5 * (with_text - without)
        latents, state = scheduler.step(state, guided, t, latents).to_tuple()
    latents = latents / ours.vae.config.scaling_factor
    decoded = ours.vae.apply({"params": params["vae"]}, latents, method=ours.vae.decode).sample
    check(np.clip(decoded / 2 + 0.5, 0, 1).transpose(0, 2, 3, 1), actual)


def test_components_and_checkpoints_go_round(tiny_checkpoints, tmp_path, caplog):
    folder, _ = tiny_checkpoints.pipeline("xl")
    ours, params = flax.FlaxDiffusionPipeline.from_pretrained(folder, dtype=jnp.bfloat16)
    assert type(ours) is flax.FlaxStableDiffusionXLPipeline
    assert ours.unet.dtype == jnp.bfloat16
    assert type(ours)(**ours.components).unet is ours.unet
    names = {"vae", "unet", "text_encoder", "text_encoder_2", "scheduler"}
    assert params.keys() == names
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params["scheduler"])} <= {
        "float32",
        "int32",
    }
    ours.save_pretrained(tmp_path, params)
    saved = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert type(saved) is diffusers.StableDiffusionXLPipeline
    assert type(saved.scheduler) is diffusers.EulerDiscreteScheduler
    assert diffusax.DiffusionPipeline.from_pretrained(tmp_path).scheduler == ours.scheduler.sampler
    _, again = flax.FlaxStableDiffusionXLPipeline.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again["unet"], params["unet"])


def test_a_pipeline_says_what_it_cannot_load(tiny_checkpoints, tmp_path, caplog):
    folder, _ = tiny_checkpoints.pipeline("sd")
    load = flax.FlaxStableDiffusionPipeline.from_pretrained
    with pytest.raises(ValueError, match="takes no safety_checkers; it takes vae, text_encoder"):
        load(folder, safety_checkers=None)
    with pytest.raises(ValueError, match="no safety checker; pass safety_checker=None"):
        load(folder, safety_checker=object())
    with pytest.raises(ValueError, match="has no controlnet; give controlnet="):
        flax.FlaxStableDiffusionControlNetPipeline.from_pretrained(folder)
    with pytest.raises(ValueError, match="asks for UniPCMultistepScheduler, which diffusers never"):
        base._load(folder / "scheduler", "UniPCMultistepScheduler", False, None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("", "sd"), ("Img2Img", "sd"), ("Inpaint", "sd-inpaint"), ("InstructPix2Pix", "sd-instruct")],
)
def test_half_precision_and_frozen_parameters_are_taken(tiny_checkpoints, name, kind):
    folder, _ = tiny_checkpoints.pipeline(kind)
    cls = getattr(flax, f"FlaxStableDiffusion{name}Pipeline")
    ours, params = cls.from_pretrained(folder, dtype=jnp.bfloat16, **NONE)
    state = params.pop("scheduler")
    params = freeze({**ours.unet.to_bf16(params), "scheduler": state})
    pictures = [smooth_picture(0)] * {"": 0, "Inpaint": 2}.get(name, 1)
    inputs = ours.prepare_inputs(*[["a"], *pictures]) if pictures else [ours.prepare_inputs("a")]
    ids, *images = inputs if name else (inputs[0],)
    images = images[::-1]
    rest = {"": (3, 64, 64), "Img2Img": (1, 3, 64, 64), "Inpaint": (3, 64, 64)}.get(name, (3,))
    drawn = jax.eval_shape(
        lambda params, key: ours._generate(ids, *images, params, key, *rest),
        params,
        jax.random.key(0),
    )
    assert (drawn.shape, drawn.dtype) == ((1, 64, 64, 3), jnp.float32)


def generator():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("name", sorted(json.loads(SIGNATURES.read_text())))
def test_arguments_are_those_of_diffusers_0_35_2(name):
    """Their names and order; ours may have more at the end or by keyword."""
    cls = getattr(flax, name)
    for method, expected in json.loads(SIGNATURES.read_text())[name].items():
        parameters = inspect.signature(getattr(cls, method)).parameters
        actual = [n for n, p in parameters.items() if n != "self"]
        flexible = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if flexible:
            positional = [n for n in expected if n in actual]
            assert positional == expected[: len(positional)], method
            continue
        assert actual[: len(expected)] == expected, method
