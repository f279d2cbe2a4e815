"""FLUX.1 over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python flux_on_mesh.py FOLDER
"""

import sys

import jax
import numpy as np

import diffusax
from diffusax.runtime import mesh as mesh_rules

mesh_rules.MIN_SHARDED_SIZE = 1
CALL = {
    "prompt": ["a red apple", "a house on a hill", "a ship", "two dogs"],
    "negative_prompt": "a hat",
    "true_cfg_scale": 2.0,
    "seed": 0,
    "num_inference_steps": 2,
    "height": 24,
    "width": 40,
    "max_sequence_length": 32,
    "output_type": "np",
}

alone = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], device=jax.devices()[0])
alone.set_progress_bar_config(disable=True)
expected = alone(**CALL).images
for mesh in ("data=2,tensor=2", "data=2,fsdp=2"):
    pipe = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], mesh=mesh)
    pipe.set_progress_bar_config(disable=True)
    params = pipe.params["transformer"]
    double, single = params["transformer_blocks"][0], params["single_transformer_blocks"][0]
    attention, inner = double["attn"], double["ff_context"]["net"][2]
    layers = attention["to_q"], attention["to_add_out"], inner, single["proj_out"]
    for layer in (*layers, double["norm1"]["linear"], single["norm"]["linear"]):
        assert len(layer["kernel"].sharding.device_set) == len(jax.devices())
        assert not layer["kernel"].is_fully_replicated
    np.testing.assert_allclose(pipe(**CALL).images, expected, atol=1e-4)
    print(mesh)
