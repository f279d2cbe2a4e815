"""Any PyTorch diffusers pipeline on JAX; see `diffusax.interop.torch`."""

from diffusax.boundary.messages import require_extra

# torchax is imported by interop.torch.importing alone, which mends what newer torch lacks for it.
require_extra("torch", "torch")

from diffusax.interop.torch import *  # noqa: E402, F403
from diffusax.interop.torch import __all__ as __all__  # noqa: E402
