"""Programs as they were written for diffusers' Flax classes, for whichever module has these.

Runs in an environment with diffusers 0.35.2 as well as in diffusax's own, so it imports neither.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from PIL import Image

PROMPTS = ["a red apple", "two dogs running", "a green hat", "the sea at night"]
NEGATIVE = ["blurry", "ugly", "a hat", "grey"]
SCHEDULERS = {
    "FlaxDDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1},
    "FlaxPNDMScheduler": {"skip_prk_steps": True, "steps_offset": 1},
    "FlaxDPMSolverMultistepScheduler": {},
    "FlaxEulerDiscreteScheduler": {"timestep_spacing": "leading"},
}
UNCHECKED = {"safety_checker": None, "feature_extractor": None}
LEVELS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def draw(flax, root):
    """The pictures of all programs, by name: arrays in [0, 1].

    flax: a module that has diffusers' Flax classes. root: the folder of the tiny checkpoints.
    """
    return {
        **text_to_image(flax, root / "sd"),
        **extra_large(flax, root / "xl"),
        **from_pictures(flax, root / "sd", root / "inpaint"),
        **controlled(flax, root / "sd", root / "controlnet"),
        **steps(flax),
    }


def keys(seed=0):
    """A key for each device."""
    return jax.random.split(jax.random.PRNGKey(seed), jax.device_count())


def picture(seed, side=64):
    """A smooth random picture, RGB."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def load(flax, class_name, folder, **options):
    """A pipeline and its parameters."""
    return getattr(flax, class_name).from_pretrained(folder, **options)


def text_to_image(flax, folder):
    """Every scheduler, one device and several."""
    drawn = {}
    for name, options in SCHEDULERS.items():
        scheduler = getattr(flax, name)(**LEVELS, **options)
        pipeline, params = load(
            flax, "FlaxStableDiffusionPipeline", folder, **UNCHECKED, scheduler=scheduler
        )
        params["scheduler"] = scheduler.create_state()
        ids = shard(pipeline.prepare_inputs(PROMPTS))
        negative = shard(pipeline.prepare_inputs(NEGATIVE))
        drawn[f"sd {name}"] = pipeline(
            ids, replicate(params), keys(), 6, neg_prompt_ids=negative, jit=True
        ).images
    ids = pipeline.prepare_inputs(PROMPTS[:1])
    drawn["sd one device"] = pipeline(ids, params, jax.random.PRNGKey(3), 4, 64, 64, 4.0).images
    latents = jax.random.normal(jax.random.PRNGKey(9), (1, 4, 8, 8))
    drawn["sd latents"] = pipeline(
        ids, params, jax.random.PRNGKey(3), num_inference_steps=4, latents=latents
    )[0]
    return drawn


def extra_large(flax, folder):
    """As in the SDXL guide, with and without negative prompts; latents; a compiled program."""
    drawn = {}
    pipeline, params = load(flax, "FlaxStableDiffusionXLPipeline", folder, split_head_dim=True)
    replicated = replicate(params)
    ids = shard(pipeline.prepare_inputs(PROMPTS))
    negative = shard(pipeline.prepare_inputs(NEGATIVE))
    drawn["xl"] = pipeline(ids, replicated, keys(), 5, jit=True).images
    drawn["xl negative"] = pipeline(
        ids, replicated, keys(), 5, neg_prompt_ids=negative, guidance_scale=5.0, jit=True
    ).images
    drawn["xl latent"] = pipeline(ids, replicated, keys(), 3, output_type="latent", jit=True).images
    scale = jnp.full((jax.device_count(), 1), 5.0)
    compiled = (
        jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
        .lower(ids, replicated, keys(), 5, 64, 64, scale, None, negative, False)
        .compile()
    )
    drawn["xl compiled"] = compiled(ids, replicated, keys(), scale, None, negative)
    return drawn


def from_pictures(flax, folder, inpainting):
    """Image to image and inpainting."""
    drawn = {}
    images = [picture(i) for i in range(4)]
    for name, options in SCHEDULERS.items():
        if "Euler" in name:
            continue
        scheduler = getattr(flax, name)(**LEVELS, **options)
        pipeline, params = load(
            flax,
            "FlaxStableDiffusionImg2ImgPipeline",
            folder,
            **UNCHECKED,
            scheduler=scheduler,
        )
        params["scheduler"] = scheduler.create_state()
        ids, processed = pipeline.prepare_inputs(PROMPTS, images)
        drawn[f"img2img {name}"] = pipeline(
            shard(ids), shard(processed), replicate(params), keys(), 0.7, 8, 64, 64, jit=True
        ).images
    pipeline, params = load(flax, "FlaxStableDiffusionInpaintPipeline", inpainting, **UNCHECKED)
    masks = [picture(i + 9).convert("L") for i in range(4)]
    ids, masked, mask = pipeline.prepare_inputs(PROMPTS, images, masks)
    drawn["inpaint"] = pipeline(
        shard(ids), shard(mask), shard(masked), replicate(params), keys(), 5, jit=True
    ).images
    return drawn


def controlled(flax, folder, controlnet_folder):
    """ControlNet."""
    controlnet, controlnet_params = load(flax, "FlaxControlNetModel", controlnet_folder)
    pipeline, params = load(
        flax,
        "FlaxStableDiffusionControlNetPipeline",
        folder,
        controlnet=controlnet,
        **UNCHECKED,
    )
    params["controlnet"] = controlnet_params
    ids = pipeline.prepare_text_inputs(PROMPTS)
    images = pipeline.prepare_image_inputs([picture(i) for i in range(4)])
    drawn = pipeline(
        shard(ids),
        shard(images),
        replicate(params),
        keys(),
        5,
        controlnet_conditioning_scale=0.7,
        jit=True,
    ).images
    return {"controlnet": drawn}


def steps(flax):
    """Each scheduler's samples in a loop of one's own, from the start and from the middle."""
    drawn = {}
    prediction = jax.random.normal(jax.random.PRNGKey(0), (12, 1, 3, 8, 8))
    options = {**SCHEDULERS, "third order": {"solver_order": 3}}
    for name, extra in options.items():
        class_name = "FlaxDPMSolverMultistepScheduler" if " " in name else name
        scheduler = getattr(flax, class_name)(**LEVELS, **extra)
        for begin in (0, 4):
            state = scheduler.create_state()
            state = scheduler.set_timesteps(state, 10, shape=prediction.shape[1:])
            sample, samples = prediction[-1], []
            for i, t in enumerate(np.asarray(state.timesteps)[begin:]):
                sample = scheduler.scale_model_input(state, sample, t)
                sample, state = scheduler.step(state, prediction[i], t, sample, return_dict=False)
                samples.append(sample)
            drawn[f"steps {name} from {begin}"] = np.stack(samples)
    return drawn
