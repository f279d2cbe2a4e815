"""Live PyTorch pipelines of diffusers as pipelines of diffusax, without files of weights."""

import tempfile
from typing import Any

from jax.sharding import Mesh

from diffusax.interop.torch.compat import progress_bar_options
from diffusax.interop.torch.models import to_model
from diffusax.interop.torch.networks import ALTERNATIVE
from diffusax.models.network import parse_dtype
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.loading import fitting_class, known_classes
from diffusax.pipelines.placement import component_mesh
from diffusax.samplers import scheduler_from_config
from diffusax.text.tokenizer import CLIPTokenizer


def from_torch(pipe: Any, **options: Any) -> DiffusionPipeline:
    """See `DiffusionPipeline.from_torch`."""
    return DiffusionPipeline.from_torch(pipe, **options)


def convert(cls: Any, base: Any, pipe: Any, *, dtype: Any = None, devices: Any = None) -> Any:
    """As `DiffusionPipeline.from_torch`, for a class of pipelines, on a device or a mesh."""
    target = fitting_class(cls, _named_class(pipe, base), base, "the PyTorch pipeline")
    dtype = None if dtype is None else parse_dtype(dtype)
    components = {
        name: _component(pipe, name, value, dtype, devices)
        for name in target.component_names
        if (value := getattr(pipe, name, None)) is not None
    }
    found = {**dict(target.family.options), **vars(pipe), **pipe.config}
    options = {name: found[name] for name, _ in target.family.options}
    made = target(**components, **options)
    made.spread_over(devices if isinstance(devices, Mesh) else None)
    made.progress_bar_options = progress_bar_options(pipe)
    return made


def _named_class(pipe: Any, base: Any) -> Any:
    """The class here of a pipeline, or of the class of diffusers that it inherits from.

    Raises:
        ValueError: diffusax has none.
    """
    upstream = (k for k in type(pipe).__mro__ if k.__module__.partition(".")[0] == "diffusers")
    name = next(upstream, type(pipe)).__name__
    known = known_classes(base)
    if name not in known:
        raise ValueError(f"diffusax has no {name} of its own; {ALTERNATIVE}")
    return known[name]


def _component(pipe: Any, name: str, value: Any, dtype: Any, devices: Any) -> Any:
    if name == "scheduler":
        return scheduler_from_config({**value.config, "_class_name": type(value).__name__})
    if name.startswith("tokenizer"):
        return _tokenizer(name, value)
    place = component_mesh(devices, name) if isinstance(devices, Mesh) else devices
    several = list(value.nets) if name == "controlnet" and hasattr(value, "nets") else [value]
    options = {"dtype": dtype, "device": place, "factor": getattr(pipe, "vae_scale_factor", 8)}
    models = [to_model(name, module, **options) for module in several]
    return models if len(models) > 1 else models[0]


def _tokenizer(name: str, tokenizer: Any) -> CLIPTokenizer:
    """A tokenizer by way of its files, which are small.

    Raises:
        ValueError: it is not CLIP's.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        try:
            return CLIPTokenizer.from_folder(folder)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
