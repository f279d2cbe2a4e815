"""A PyTorch pipeline over four devices against itself in PyTorch.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python torch_mesh_run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
import torch

import diffusax.torch
from diffusax.interop.torch.compiling import CompiledMethod
from diffusax.interop.torch.functional import Kernel
from diffusax.runtime.devices.mesh import param_sharding, turned_sharding
from support.torch_families import REGISTRY


def main() -> None:
    """Draws two pictures each way."""
    assert jax.device_count() == 4
    pipe, inputs = REGISTRY["StableDiffusionPipeline"]()

    def draw() -> np.ndarray:
        generator = torch.Generator().manual_seed(0)
        return pipe(**inputs, num_images_per_prompt=2, generator=generator).images

    expected = draw()
    for fuse_loop in (False, True):
        diffusax.torch.compile(pipe, mesh="data=2,fsdp=2", fuse_loop=fuse_loop)
        np.testing.assert_allclose(draw(), expected, atol=1e-4)
        methods = [m for m in vars(pipe.unet).values() if isinstance(m, CompiledMethod)]
        state = methods[0].component.state
        kernels = {name: x.array for name, x in state.items() if isinstance(x, Kernel)}
        others = {name: x for name, x in state.items() if name not in kernels}
        for arrays in (kernels, others):
            assert any(not x.sharding.is_fully_replicated for x in arrays.values())
        for name, array in kernels.items():
            weight = param_sharding(array.sharding.mesh, name, Kernel(array).weight().shape)
            assert array.sharding == turned_sharding(weight, Kernel.AXES)
        assert hasattr(type(pipe), "_fused_loop") == fuse_loop
    assert len(type(pipe)._fused_loop.programs) == 1


if __name__ == "__main__":
    main()
