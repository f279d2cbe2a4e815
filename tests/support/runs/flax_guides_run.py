"""The programs of diffusers' two guides to its Flax classes, but for the import, on eight devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python flax_guides_run.py sd|xl FOLDER

FOLDER is a checkpoint. What the guides say of shapes is asserted, and that each device's picture is
the one that its prompt and key give on one device.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from jax import pmap

from diffusax.interop.flax import FlaxStableDiffusionPipeline, FlaxStableDiffusionXLPipeline

TOLERANCE = 1e-5
PROMPTS = [
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Close-up photograph of young black woman against urban background, high quality, bokeh",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
]


def stable_diffusion(folder):
    """The guide "JAX/Flax" of diffusers' documentation."""
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        folder, revision="main", dtype=jnp.float32, safety_checker=None
    )
    ids = pipeline.prepare_inputs(PROMPTS)
    assert ids.shape == (8, 77)
    p_params = replicate(params)
    prompt_ids = shard(ids)
    assert prompt_ids.shape == (8, 1, 77)
    rng = jax.random.split(jax.random.PRNGKey(0), jax.device_count())
    images = pipeline(prompt_ids, p_params, rng, num_inference_steps=3, jit=True).images
    assert images.shape == (8, 1, 64, 64, 3)
    images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
    assert len(pipeline.numpy_to_pil(images)) == 8

    for i in (0, 7):
        alone = pipeline(ids[i : i + 1], params, rng[i], num_inference_steps=3)[0]
        np.testing.assert_allclose(images[i : i + 1], alone, atol=TOLERANCE)
    assert np.abs(images[0] - images[7]).max() > 0.1


def extra_large(folder):
    """The guide to SDXL on TPU (examples/research_projects/sdxl_flax/sdxl_single_aot.py)."""
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
        folder, revision="refs/pr/95", split_head_dim=True
    )
    scheduler_state = params.pop("scheduler")
    params = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    params["scheduler"] = scheduler_state
    assert scheduler_state.common.alphas_cumprod.dtype == jnp.float32
    p_params = replicate(params)

    def inputs(prompt, negative_prompt, seed):
        prompt_ids = replicate(pipeline.prepare_inputs(prompt))
        neg_prompt_ids = replicate(pipeline.prepare_inputs(negative_prompt))
        rng = jax.random.split(jax.random.PRNGKey(seed), jax.device_count())
        g = jnp.array([5.0] * prompt_ids.shape[0], dtype=jnp.float32)[:, None]
        return prompt_ids, neg_prompt_ids, rng, g

    prompt_ids, neg_prompt_ids, rng, g = inputs("a castle", "fog, grainy, purple", 33)
    p_generate = (
        pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
        .lower(prompt_ids, p_params, rng, 3, 64, 64, g, None, neg_prompt_ids, False)
        .compile()
    )
    prompt_ids, neg_prompt_ids, rng, g = inputs("a rhino at a bar", "cartoon", 34)
    images = p_generate(prompt_ids, p_params, rng, g, None, neg_prompt_ids)
    assert images.shape == (8, 1, 64, 64, 3)
    flat = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
    pictures = pipeline.numpy_to_pil(np.array(flat))
    assert len({picture.tobytes() for picture in pictures}) == 8

    other = p_generate(prompt_ids, p_params, rng, g, None, replicate(pipeline.prepare_inputs("")))
    assert np.abs(np.asarray(other) - np.asarray(images)).max() > 0.01


if __name__ == "__main__":
    assert jax.device_count() == 8
    {"sd": stable_diffusion, "xl": extra_large}[sys.argv[1]](sys.argv[2])
