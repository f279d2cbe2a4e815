"""Converts live PyTorch pipelines of diffusers to pipelines of diffusax, without weight files."""

from typing import Any

from jax.sharding import Mesh

from diffusax.interop.torch.compat import progress_bar_options
from diffusax.interop.torch.models import to_model
from diffusax.interop.torch.networks import ALTERNATIVE
from diffusax.models.network import parse_dtype
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.components.foreign import CONVERTERS, own_component
from diffusax.pipelines.components.loading import CLASSES, fitting_class
from diffusax.pipelines.families import Component
from diffusax.pipelines.families.family import NUMBERED_ROLES
from diffusax.pipelines.families.placement import component_mesh
from diffusax.runtime.devices.mesh import devices_for


def from_torch(
    pipe: Any,
    cls: Any = DiffusionPipeline,
    *,
    dtype: Any = None,
    device: Any = None,
    mesh: Any = None,
) -> Any:
    """Converts a pipeline, see `DiffusionPipeline.from_torch`.

    cls: the class of the result, by default that of the same name.
    """
    return convert(cls, pipe, dtype=dtype, devices=devices_for(device, mesh))


def convert(cls: Any, pipe: Any, *, dtype: Any = None, devices: Any = None) -> Any:
    """Converts a pipeline as `from_torch` does, to a device or a mesh."""
    target = fitting_class(cls, _named_class(pipe), "the PyTorch pipeline")
    dtype = None if dtype is None else parse_dtype(dtype)
    components = {
        part.name: _component(pipe, part, value, dtype, devices)
        for part in target.all_components
        if (value := getattr(pipe, part.name, None)) is not None
    }
    found = {**dict(target.family.options), **vars(pipe), **pipe.config}
    options = {name: found[name] for name, _ in target.family.options}
    made = target(**components, **options)
    made.spread_over(devices if isinstance(devices, Mesh) else None)
    made.progress_bar_options = progress_bar_options(pipe)
    return made


def _named_class(pipe: Any) -> Any:
    """Returns diffusax's class for a pipeline, or for the class of diffusers that it inherits from.

    Raises:
        ValueError: diffusax has none.
    """
    upstream = (k for k in type(pipe).__mro__ if k.__module__.partition(".")[0] == "diffusers")
    name = next(upstream, type(pipe)).__name__
    if name not in CLASSES:
        raise ValueError(f"diffusax has no {name} of its own; {ALTERNATIVE}")
    return CLASSES[name]


def _component(pipe: Any, part: Component, value: Any, dtype: Any, devices: Any) -> Any:
    name, role = part.name, part.role
    if role in ("scheduler", "tokenizer", "image_processor"):
        return own_component(part, value)
    place = component_mesh(devices, role) if isinstance(devices, Mesh) else devices
    several = [value]
    if role in NUMBERED_ROLES:
        several = list(getattr(value, "nets", None) or getattr(value, "adapters", None) or several)
    options = {"dtype": dtype, "device": place, "factor": getattr(pipe, "vae_scale_factor", 8)}
    models = [to_model(name, module, **options) for module in several]
    return models if len(models) > 1 else models[0]


CONVERTERS["torch"] = convert
