"""Z-Image over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python z_image_on_mesh.py FOLDER
"""

import sys

import jax
import numpy as np

import diffusax
from diffusax.runtime import mesh as mesh_rules

mesh_rules.MIN_SHARDED_SIZE = 1
CALL = {
    "prompt": ["a red apple", "a house on a hill", "a ship", "two dogs"],
    "seed": 0,
    "num_inference_steps": 2,
    "height": 24,
    "width": 40,
    "output_type": "np",
}

alone = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], device=jax.devices()[0])
alone.set_progress_bar_config(disable=True)
expected = alone(**CALL).images
for mesh in ("data=2,tensor=2", "data=2,fsdp=2"):
    pipe = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], mesh=mesh)
    pipe.set_progress_bar_config(disable=True)
    block = pipe.params["transformer"]["layers"][0]
    for layer in (block["attention"]["to_q"], block["feed_forward"]["w2"]):
        assert len(layer["kernel"].sharding.device_set) == len(jax.devices())
        assert not layer["kernel"].is_fully_replicated
    np.testing.assert_allclose(pipe(**CALL).images, expected, atol=1e-4)
    print(mesh)
