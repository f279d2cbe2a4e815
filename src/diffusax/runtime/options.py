"""The options with which XLA compiles all programs for a platform."""

import os

import jax
from jax.sharding import Mesh

OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""XLA's options by JAX's name of a platform.

On GPUs products are cuBLAS's, which add a bias and a residual. XLA's own kernels of products do
not inside a sampler's loop, where each such sum is a kernel of its own; and XLA compiles tens of
tilings for each of them, to time them on the device.
"""


def compiler_options(mesh: Mesh | None = None) -> dict[str, str | bool]:
    """Returns XLA's options for the devices of a mesh, by default those of this process.

    An option that the variable XLA_FLAGS has is the user's.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: on for name, on in OPTIONS.get(platform, {}).items() if name not in flags}
