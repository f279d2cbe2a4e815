"""Caches of steps over four devices and over one: the same latents, in one piece and in several.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python step_caches_on_mesh.py FOLDER
"""

import functools
import sys

import jax
import numpy as np

import diffusax
from diffusax.pipelines.run import programs
from diffusax.runtime.programs.compilations import count_compilations
from support.tiny_transformers import FLUX_SIZE

CALL = {
    "prompt": ["a red apple", "a house on a hill", "a ship"],
    "negative_prompt": "blurry",
    "true_cfg_scale": 2.0,
    "num_inference_steps": 6,
    "output_type": "latent",
    "seed": 0,
    **FLUX_SIZE,
}
TaylorSeer = functools.partial(diffusax.TaylorSeerCacheConfig, taylor_factors_dtype="float32")
CACHES = [
    (diffusax.FirstBlockCacheConfig(0.6), diffusax.FirstBlockCacheConfig(0.9)),
    (TaylorSeer(3, 2), TaylorSeer(2, 3)),
]


def drawn(mesh) -> list[np.ndarray]:
    """The latents of each cache, and of a running batch with the last."""
    where = {"device": jax.devices()[0]} if mesh is None else {"mesh": mesh}
    pipe = diffusax.FluxPipeline.from_pretrained(sys.argv[1], **where)
    pipe.set_progress_bar_config(disable=True)
    found = []
    for first, second in CACHES:
        pipe.transformer.enable_cache(first)
        found.append(np.asarray(pipe(**CALL).images))
        # In pieces of one row, which are other calls of the same programs.
        shapes = programs.denoise.compiled_shapes
        pieces = pipe(**CALL, callback_on_step_end=lambda pipe, i, t, tensors: tensors).images
        np.testing.assert_allclose(pieces, found[-1], atol=1e-4)
        assert programs.denoise.compiled_shapes == shapes
        pipe.transformer.disable_cache()
        pipe.transformer.enable_cache(second)
        with count_compilations() as compiled:
            found.append(np.asarray(pipe(**CALL).images))
        assert compiled == []
        if first is not CACHES[-1][0]:
            pipe.transformer.disable_cache()
    with diffusax.RunningBatch(pipe, lanes=16) as batch:
        found.append(np.asarray(batch.submit(**CALL).result().images))
    return found


expected = drawn(None)
np.testing.assert_allclose(expected[-1], expected[-2], atol=1e-4)
for mesh in ("data=4", "data=2,tensor=2"):
    for ours, own in zip(drawn(mesh), expected, strict=True):
        np.testing.assert_allclose(ours, own, atol=1e-3)
    print(mesh)
