"""Calls of a pipeline inside a mesh of the user's with explicit axes, and without.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python users_mesh_run.py CHECKPOINT
"""

import sys

import jax
import numpy as np

import diffusax

pipe = diffusax.StableDiffusionPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
call = {"num_inference_steps": 2, "seed": 0, "height": 16, "width": 16}
call |= {"num_images_per_prompt": 4, "output_type": "np"}
x, context = np.ones((4, 4, 8, 8), np.float32), np.ones((4, 5, 32), np.float32)


def found(x):
    images = pipe("a cat", **call).images
    prediction = pipe.unet(x, 5, encoder_hidden_states=context).sample
    # A user's own operation, which JAX refuses for arrays of another mesh.
    return images, np.asarray(prediction[1:] + x[1:])


assert jax.device_count() == 4
plain = found(x)
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(mesh):
    whole = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P()))
    for a, b in zip(plain, found(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
print("equal")
