"""FLUX.2 klein over four devices and over one, with an image to look at.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python klein_on_mesh.py FOLDER
"""

import sys

import jax
import numpy as np
from kleins import CALL
from pairs import picture

import diffusax
from diffusax.models.adapters import kernel_shapes
from diffusax.runtime import mesh as mesh_rules

mesh_rules.MIN_SHARDED_SIZE = 1
GIVEN = {
    "prompt": ["a red apple", "a house on a hill", "a ship", "two dogs"],
    "image": picture(1),
    "seed": 0,
    "num_inference_steps": 2,
    "output_type": "np",
    **CALL,
}


def adapted(**where):
    """The images of a checkpoint with an adapter of every layer."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], **where)
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(0)
    layers = {
        path: tuple(
            rng.standard_normal(size).astype(np.float32) / 4
            for size in ((shape[0], 2), (2, shape[1]))
        )
        for path, shape in kernel_shapes(pipe.transformer.network).items()
    }
    pipe.add_adapter("style", {"transformer": layers})
    return pipe, pipe(**GIVEN, adapters={"style": 1.0}).images, pipe(**GIVEN, adapters={}).images


_, *expected = adapted(device=jax.devices()[0])
assert np.abs(expected[0] - expected[1]).max() > 0.02
for mesh in ("data=2,tensor=2", "data=2,fsdp=2"):
    pipe, *found = adapted(mesh=mesh)
    params = pipe.params["transformer"]
    double, single = params["transformer_blocks"][0], params["single_transformer_blocks"][0]
    for layer in (double["attn"]["to_q"], double["ff"]["linear_in"], single["attn"]["to_out"]):
        assert len(layer["kernel"].sharding.device_set) == len(jax.devices())
        assert not layer["kernel"].is_fully_replicated
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    print(mesh)
