"""Runs PyTorch modules and diffusers pipelines in JAX, through torchax (extra `torch`).

`compile` makes a pipeline of diffusers run its modules, or its whole loop, as compiled programs.
"""

from diffusax.interop.torch.compiling import CompileOptions
from diffusax.interop.torch.explaining import NotTraceable
from diffusax.interop.torch.functional import to_jax
from diffusax.interop.torch.native import from_torch
from diffusax.interop.torch.pipelines import compile, restore

__all__ = ["CompileOptions", "NotTraceable", "compile", "from_torch", "restore", "to_jax"]
