"""Z-Image with its tokens split over eight devices, and on one.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python z_image_split_tokens.py FOLDER
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import diffusax
from diffusax.runtime import mesh as mesh_rules
from diffusax.runtime.mesh import in_mesh, make_mesh

mesh_rules.MIN_SHARDED_SIZE = 1
CALL = {
    "prompt": "a red apple",
    "seed": 0,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "height": 24,
    "width": 40,
    "output_type": "np",
}


def operations(network, params, mesh):
    """What each device computes of the transformer."""
    text = jnp.ones((2, 64, network.config.cap_feat_dim)), jnp.full(2, 50)
    given = jnp.ones((2, 12, 20, 16)), jnp.full(2, 0.5), *text
    with in_mesh(mesh):
        compiled = jax.jit(network.apply).lower(params, *given).compile()
    return compiled.cost_analysis()["flops"]


alone = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], device=jax.devices()[0])
alone.set_progress_bar_config(disable=True)
expected = alone(**CALL).images
network = alone.transformer.network
whole = operations(network, alone.params["transformer"], None)
for shape, most in (("data=1,context=8", 0.25), ("data=2,context=2,tensor=2", 0.4)):
    pipe = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], mesh=shape)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.mesh.shape["context"] == make_mesh(shape).shape["context"] > 1
    share = operations(network, pipe.params["transformer"], pipe.mesh) / whole
    assert share < most, share
    np.testing.assert_allclose(pipe(**CALL).images, expected, atol=1e-5)
    print(shape)
