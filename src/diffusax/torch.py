"""Any PyTorch diffusers pipeline on JAX; see `diffusax.interop.torch`."""

from diffusax.extras import require_extra

for _name in ("torch", "torchax"):
    require_extra(_name, "torch")

from diffusax.interop.torch import *  # noqa: E402, F403
from diffusax.interop.torch import __all__ as __all__  # noqa: E402
