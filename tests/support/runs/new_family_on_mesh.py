"""A new family over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python new_family_on_mesh.py
"""

import jax
import numpy as np

from support.many_devices import split_small_arrays
from support.toy_family import ToyPipeline, toy_pipeline

CALL = {"prompt": ["a red apple", "a house", "a ship", "two dogs"], "seed": 0}

alone = toy_pipeline()
expected = alone(**CALL).images
with split_small_arrays():
    for mesh in ("data=2,tensor=2", "data=2,fsdp=2"):
        pipe = ToyPipeline.from_pipe(alone).spread_over(mesh)
        pipe.set_progress_bar_config(disable=True)
        kernel = pipe.params["transformer"]["up"]["kernel"]
        assert len(kernel.sharding.device_set) == len(jax.devices())
        assert not kernel.is_fully_replicated
        np.testing.assert_allclose(pipe(**CALL).images, expected, atol=1e-4)
        print(mesh)
