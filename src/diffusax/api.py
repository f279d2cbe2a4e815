"""All that `diffusax` offers under its own name; importing this imports JAX."""

from diffusax._version import __version__
from diffusax.checkpoints import load_network, named, save_network
from diffusax.checkpoints.named import *  # noqa: F403
from diffusax.images.pictures import load_image
from diffusax.images.sheets import make_image_grid
from diffusax.pipelines import *  # noqa: F403
from diffusax.pipelines import __all__ as _pipelines
from diffusax.runtime.mesh import initialize, make_mesh
from diffusax.samplers import *  # noqa: F403
from diffusax.samplers import SCHEDULERS

__all__ = [
    *named.__all__,
    *_pipelines,
    *SCHEDULERS,
    "__version__",
    "initialize",
    "load_image",
    "load_network",
    "make_image_grid",
    "make_mesh",
    "save_network",
]
