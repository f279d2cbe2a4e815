"""Run, edit with and train Hugging Face diffusion models in JAX."""

from diffusax._version import __version__
from diffusax.checkpoints import load_network, models, save_network
from diffusax.checkpoints.models import *  # noqa: F403
from diffusax.pictures import load_image
from diffusax.pipelines import *  # noqa: F403
from diffusax.pipelines import __all__ as _pipelines
from diffusax.samplers import *  # noqa: F403
from diffusax.samplers import SCHEDULERS

__all__ = [
    *models.__all__,
    *_pipelines,
    *SCHEDULERS,
    "__version__",
    "load_image",
    "load_network",
    "save_network",
]
