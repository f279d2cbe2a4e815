"""Any PyTorch diffusers pipeline on JAX; see `diffusax.interop.torch`."""

from diffusax.interop.torch import *  # noqa: F403
from diffusax.interop.torch import __all__ as __all__
