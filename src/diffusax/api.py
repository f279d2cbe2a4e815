"""All that `diffusax` offers under its own name; importing this imports JAX."""

from typing import TYPE_CHECKING, Any

from diffusax._version import __version__
from diffusax.checkpoints import processors, resolve, save_network
from diffusax.checkpoints.converting import pack_single_file
from diffusax.checkpoints.processors import *  # noqa: F403
from diffusax.images.reading import load_image
from diffusax.images.sheets import make_image_grid
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.models.caches.configs import (
    DeepCacheConfig,
    FirstBlockCacheConfig,
    TaylorSeerCacheConfig,
)
from diffusax.networks import *  # noqa: F403
from diffusax.networks import __all__ as _networks
from diffusax.pipelines import *  # noqa: F403
from diffusax.pipelines import __all__ as _pipelines
from diffusax.pipelines.components.foreign import CONVERTERS
from diffusax.runtime.devices.lowering import int8_activations
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.devices.processes import initialize
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.samplers import *  # noqa: F403
from diffusax.samplers import SCHEDULERS

if TYPE_CHECKING:
    from diffusax.batch.running_batch import RunningBatch


def __getattr__(name: str) -> Any:
    """Imports the running batch when it is asked for: most programs have none."""
    if name == "RunningBatch":
        from diffusax.batch.running_batch import RunningBatch

        return RunningBatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _from_torch(cls: Any, pipe: Any, **options: Any) -> Any:
    """`DiffusionPipeline.from_torch`; PyTorch is imported by the first call."""
    from diffusax.interop.torch.native import convert

    return convert(cls, pipe, **options)


def _module_from_torch(name: str, module: Any) -> Any:
    """A module of PyTorch as a model; PyTorch is imported by the first call."""
    from diffusax.interop.torch.models import to_model

    return to_model(name, module)


CONVERTERS.setdefault("torch", _from_torch)
CONVERTERS.setdefault("torch_module", _module_from_torch)

__all__ = [
    *processors.__all__,
    *_networks,
    *_pipelines,
    *SCHEDULERS,
    "DeepCacheConfig",
    "FirstBlockCacheConfig",
    "RunningBatch",
    "TaylorSeerCacheConfig",
    "__version__",
    "count_compilations",
    "initialize",
    "int8_activations",
    "kernel_shapes",
    "load_image",
    "make_image_grid",
    "make_mesh",
    "pack_single_file",
    "resolve",
    "save_network",
]
