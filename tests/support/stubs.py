"""Writes the stubs of `diffusax` and of its pipelines, which type checkers read.

`diffusax` imports its names when they are asked for, and the calls of pipelines are declared by
the names of their arguments, whose types stand once in `pipelines/plan/arguments.py`: neither says
anything to a type checker. `python tests/support/stubs.py` writes what does, and
`tests/test_types.py` compares.
"""

import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import diffusax
from diffusax import import_paths
from diffusax.pipelines import classes
from diffusax.pipelines.families.family import NUMBERED_ROLES
from diffusax.pipelines.pipeline.diffusers_methods import DiffusersMethods
from diffusax.pipelines.plan.arguments import _HINTS, _OLDER
from support.repository import ROOT

PACKAGE = ROOT / "src" / "diffusax"
WRITTEN = "Written by tests/support/stubs.py: do not edit."
MODULES = (
    *("callbacks", "evaluation", "image_processor", "interop", "models", "networks", "offline"),
    *("optimization", "pipelines", "samplers", "serving", "torch", "training", "training_utils"),
    "utils",
)
"""The modules that `diffusax` has as attributes."""

PLACES = {
    "MODELS": "diffusax.models.table",
    "Params": "diffusax.models.network",
    "TENSOR_RULES": "diffusax.models.table",
    "__version__": "diffusax._version",
}
"""The modules of values that do not know theirs."""

# Written once here for the arguments that `Call` leaves to the functions that read them.
ARRAYS = """
class _Tensor(Protocol):
    def detach(self) -> Any: ...

class _Generator(Protocol):
    def initial_seed(self) -> int: ...

_Array = jax.Array | np.ndarray[Any, Any] | _Tensor
_Arrays = _Array | list[Any] | tuple[Any, ...]
_Images = Image.Image | str | Path | _Array | list[Any] | tuple[Any, ...]
_Numbers = Sequence[float] | _Array
_Seed = int | jax.Array | Sequence[int]
_Generators = int | jax.Array | _Generator | Sequence[int | _Generator]
_Adapters = Mapping[str, Any] | Sequence[Mapping[str, Any]]
_Callback = Callable[..., Any]
"""
NAMED = {
    "adapters": "_Adapters | None",
    "attention_kwargs": "Mapping[str, Any] | None",
    "callback": "_Callback | None",
    "callback_on_step_end": "_Callback | None",
    "callback_steps": "int | None",
    "cfg_normalization": "float",
    "control_image": "_Images | None",
    "cross_attention_kwargs": "Mapping[str, Any] | None",
    "generator": "_Generators | None",
    "guide": "Any",
    "image": "_Images | None",
    "image_reference": "_Images | None",
    "ip_adapter_image": "_Images | None",
    "joint_attention_kwargs": "Mapping[str, Any] | None",
    "lora_scale": "float | None",
    "last_image": "_Images | None",
    "mask_image": "_Images | None",
    "num_videos_per_prompt": "int | None",
    "reference_images": "_Images | None",
    "seed": "_Seed | None",
    "sigmas": "_Numbers | None",
    "timesteps": "_Numbers | None",
    "do_classifier_free_guidance": "bool",
    "is_main_process": "bool",
    "safe_serialization": "bool",
    "_auto_resize": "bool",
}
"""The types of arguments that are wider than in `Call`, or not in it."""
OPTIONS = {"adapters": None, "long_prompt": False, "prompt_weighting": False}
"""The further arguments of `encode_prompt` where texts are CLIP's."""
NETWORKS = {
    "Stable Diffusion": {"text_encoder": "CLIPTextModel"},
    "Stable Diffusion XL": {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
    },
    "unconditional diffusion": {"unet": "UNet2DModel"},
    "FLUX.1": {
        "transformer": "FluxTransformer2DModel",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
    },
    "FLUX.2": {"transformer": "Flux2Transformer2DModel", "vae": "AutoencoderKLFlux2"},
    "FLUX.3": {"transformer": "Flux3Transformer2DModel", "vae": "AutoencoderKLFlux2"},
    "Krea 2": {"transformer": "Krea2Transformer2DModel", "vae": "AutoencoderKLQwenImage"},
    "Qwen-Image": {"transformer": "QwenImageTransformer2DModel", "vae": "AutoencoderKLQwenImage"},
    "Qwen-Image 2.1": {
        "transformer": "QwenImage21Transformer2DModel",
        "vae": "AutoencoderKLQwenImage21",
    },
    "Wan": {
        "transformer": "WanTransformer3DModel",
        "transformer_2": "WanTransformer3DModel",
        "text_encoder": "UMT5EncoderModel",
        "vae": "AutoencoderKLWan",
    },
    "Z-Image": {"transformer": "ZImageTransformer2DModel"},
}
"""The classes of a family's networks by its name or the longest beginning of it."""
USUAL = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "image_encoder": "CLIPVisionModelWithProjection",
}
"""The classes of networks of the families that have no other."""


def names() -> str:
    """Returns the stub of `diffusax`: where each name is, and diffusers' names for some."""
    own = {name: _place(name, getattr(diffusax, name)) for name in diffusax.__all__}
    others = {name: place.split(":") for name, place in import_paths._NAMES.items()}
    modules = [f"from diffusax import {name} as {name}" for name in MODULES]
    return _imports("`diffusax`", {**others, **own}, modules)


def models() -> str:
    """Returns the stub of `diffusax.models`, which gives classes of a room above it, too."""
    found = {name: _place(name, getattr(diffusax.models, name)) for name in diffusax.models.__all__}
    return _imports("`diffusax.models`", found)


def _place(name: str, value: Any) -> tuple[str, str]:
    """Returns the module that has a value, and its name there."""
    if name in PLACES:
        return PLACES[name], name
    is_listed = value.__name__ in classes.__all__
    return (classes.__name__ if is_listed else value.__module__), value.__name__


def _imports(of: str, places: Mapping[str, Any], lines: Sequence[str] = ()) -> str:
    """Returns a stub that imports names from their places, which may have other names for them."""
    aliases = {name: own for name, (_, own) in sorted(places.items()) if own != name}
    found = sorted({(home, own) for home, own in places.values()})
    start = [f'"""The names of {of}. {WRITTEN}"""', "", *lines]
    imports = [f"from {home} import {own} as {own}" for home, own in found]
    return "\n".join([*start, *imports, "", *(f"{n} = {own}" for n, own in aliases.items()), ""])


def pipelines() -> str:
    """Returns the stub of the pipelines: their components, calls and methods, with types."""
    every: dict[type, None] = {}
    for name in classes.__all__:
        mro = reversed(getattr(classes, name).__mro__)
        every |= dict.fromkeys(cls for cls in mro if cls.__module__.startswith(classes.__name__))
    body = "\n\n".join("\n".join(_class(cls)) for cls in every)
    used = sorted({name for cls in every for _, name in _components(cls)} - {"Any"})
    of_networks = [name for name in used if hasattr(diffusax.networks, name)]
    rest = [name for name in used if name not in of_networks]
    lines = [
        f'"""The components and calls of pipelines, with types. {WRITTEN}"""',
        "",
        "from collections.abc import Callable, Mapping, Sequence",
        "from pathlib import Path",
        "from typing import Any, Literal, Protocol, Self",
        "",
        "import jax",
        "import numpy as np",
        "from PIL import Image",
        "",
        "from diffusax.images.image_processor import CLIPImageProcessor",
        "from diffusax.images.outputs import ImagePipelineOutput, VideoPipelineOutput",
        *_wrapped("from diffusax.networks import (", of_networks, ")", 4),
        "from diffusax.pipelines.components.attributes import ComponentAttribute",
        "from diffusax.pipelines.pipeline import diffusers_methods",
        "from diffusax.pipelines.pipeline.lora_methods import LoraMethods",
        "from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline",
        "from diffusax.samplers import Scheduler",
        *(f"from {_home(name)} import {name}" for name in rest if "Tokenizer" in name),
    ]
    listed = _wrapped("__all__ = [", [f'"{name}"' for name in classes.__all__], "]", 4)
    return "\n".join([*lines, "", *listed, ARRAYS, body, ""])


def _home(name: str) -> str:
    kinds = (c.kind for n in classes.__all__ for c in getattr(classes, n).all_components)
    return next(kind.__module__ for kind in kinds if kind.__name__ == name)


def _class(cls: Any) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {cls.__name__}({bases}):" if bases else f"class {cls.__name__}:"
    before = len(members := [*_members(cls)])
    yield from members
    if not before:
        yield "    ..."


def _members(cls: Any) -> Iterator[str]:
    components = dict(_components(cls))
    of_videos = hasattr(cls, "family") and cls.family.draws_videos
    output = "VideoPipelineOutput" if of_videos else "ImagePipelineOutput"
    for name, kind in components.items():
        # The name may be that of another thing in pipelines of images.
        other = "  # type: ignore[assignment]" if hasattr(DiffusersMethods, name) else ""
        yield f"    {name}: ComponentAttribute[{kind}]{other}"
    for name, value in vars(cls).items():
        is_plain = not isinstance(value, staticmethod)
        function = inspect.unwrap(getattr(value, "__func__", value)) if is_plain else None
        if isinstance(value, property) and value.fget.__module__.startswith(classes.__name__):
            yield from _property(name, value)
        elif name in components or (name.startswith("_") and name not in ("__init__", "__call__")):
            continue
        elif inspect.isfunction(function) and function.__module__.startswith(classes.__name__):
            yield from _method(name, function, output, is_class=isinstance(value, classmethod))
        elif inspect.isfunction(value) or (value is not None and name.endswith("_processor")):
            yield f"    {name} = diffusers_methods.{name}"


def _property(name: str, value: property) -> Iterator[str]:
    kind = "dict[str, Any]" if name == "own_defaults" else "str"
    yield from ("    @property", f"    def {name}(self) -> {kind}: ...")
    if value.fset is not None:
        yield from (f"    @{name}.setter", f"    def {name}(self, layout: {kind}) -> None: ...")


def _components(cls: Any) -> Iterator[tuple[str, str]]:
    """Yields the components that a class has and its bases do not, with their classes."""
    if "all_components" not in vars(cls):
        return
    above = [c for base in cls.__bases__ for c in getattr(base, "all_components", ())]
    same = any(getattr(base, "family", None) is cls.family for base in cls.__bases__)
    starts = [name for name in NETWORKS if cls.family.name.startswith(name)]
    own = {**USUAL, **NETWORKS[max(starts, key=len)]}
    for component in cls.all_components:
        if same and component in above:
            continue
        if component.role in NUMBERED_ROLES:
            yield component.name, "Any"
        else:
            usual = component.kind.__name__
            kind = own.get(component.name, usual)
            yield component.name, "Any" if kind == "Model" else kind


def _method(
    name: str, function: Callable[..., Any], output: str, *, is_class: bool
) -> Iterator[str]:
    arguments, star = [], False
    parameters = list(inspect.signature(function).parameters.values())
    known = [parameter.name for parameter in parameters]
    more = _OLDER if name == "__call__" else {}
    if name == "encode_prompt":
        # What they take as `**options`.
        parameters = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        more = OPTIONS if "clip_skip" in known else {"adapters": None}
    parameters += [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=default)
        for one, default in more.items()
        if one not in known
    ]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            arguments, star = [*arguments, "*"], True
        arguments.append(_argument(parameter))
    result = {"__call__": output, "__init__": "None", "from_pipe": "Self"}
    returned = result.get(name, "None" if name.startswith("save_") else "Any")
    if is_class:
        yield "    @classmethod"
    # diffusers' classes have other arguments here than their bases, too.
    start = f"    def {name}(" + "  # type: ignore[override]" * (name == "save_lora_weights")
    yield from _wrapped(start, arguments, f") -> {returned}: ...", 8)


def _argument(parameter: inspect.Parameter) -> str:
    name, default = parameter.name, parameter.default
    if name in ("self", "cls"):
        return name
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{name}: Any"
    kind = NAMED.get(name) or _text(_HINTS.get(name, Any), name)
    if default is parameter.empty:
        return f"{name}: {kind}"
    if default is None and "None" not in kind and kind != "Any":
        kind += " | None"
    return f"{name}: {kind} = {default!r}"


def _text(hint: Any, name: str = "") -> str:
    """Returns a type of `Call` as text, with sequences where it has lists, and no ranges."""
    if hint is Any:
        return "_Arrays | None" if "embeds" in name or "latents" in name else "Any"
    if hint is type(None):
        return "None"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _text(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_text, args))
    if origin in (list, tuple):
        return f"Sequence[{_text(args[0])}]"
    return str(hint).removeprefix("typing.") if origin is Literal else hint.__name__


def _wrapped(start: str, entries: list[str], end: str, indent: int) -> list[str]:
    filled = textwrap.fill(
        ", ".join(entry.replace(" ", "\0") for entry in entries) + ",", 100 - indent
    )
    lines = textwrap.indent(filled.replace("\0", " "), " " * indent).split("\n")
    return [start, *lines, " " * (indent - 4) + end]


STUBS = {
    "__init__.pyi": names,
    "models/__init__.pyi": models,
    "pipelines/classes/__init__.pyi": pipelines,
}
"""The functions that give the stubs' texts, by the stubs' paths in the package."""


if __name__ == "__main__":
    for path, text in STUBS.items():
        (PACKAGE / path).write_text(text(), encoding="utf-8")
