"""A pipeline with kernels of eight bits over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python quantized_on_mesh.py FOLDER NAME
"""

import sys

import jax
import numpy as np

import diffusax
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from support.many_devices import split_small_arrays

FOLDER, NAME = sys.argv[1:]
OWN = {
    "sd": {"guidance_scale": 3.0},
    "flux": {"height": 24, "width": 40, "max_sequence_length": 32},
    "z-image": {"height": 24, "width": 40, "guidance_scale": 2.0},
    "wan": {"height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 24},
}
CALL = {
    "prompt": ["a red apple", "a house on a hill", "a ship", "two dogs"],
    "seed": 0,
    "num_inference_steps": 2,
    "output_type": "np",
    **OWN[NAME],
}

alone = diffusax.DiffusionPipeline.from_pretrained(FOLDER, device=jax.devices()[0], weights="int8")
expected = np.asarray(alone(**CALL)[0])
with split_small_arrays():
    for mesh, weights in (("data=2,tensor=2", "int8"), ("fsdp=2,tensor=2", None)):
        pipe = diffusax.DiffusionPipeline.from_pretrained(FOLDER, mesh=mesh, weights=weights)
        pipe.quantize("int8")
        name = next(name for name in ("unet", "transformer") if name in pipe.params)
        kernels = [x for _, x in ordered_leaves(pipe.params[name]) if isinstance(x, Quantized)]
        assert sum(not x.values.sharding.is_fully_replicated for x in kernels) > 5
        np.testing.assert_allclose(pipe(**CALL)[0], expected, atol=1e-4)
        print(mesh)
