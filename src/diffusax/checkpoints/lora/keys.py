"""The keys of LoRA files: the layer that a tensor belongs to, and what it is there."""

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusax.checkpoints.lora.files import LoraFile
from diffusax.checkpoints.original.unet import unet_names
from diffusax.models.unet import UNet2DConditionModel
from diffusax.runtime.mesh import tree_name

log = logging.getLogger(__name__)

Parts = dict[str, np.ndarray]
"""The tensors of a layer by what they are: down, up, mid, alpha, dora_scale, hada_w1_a, ..."""
Layers = dict[tuple[str, str], Parts]
"""The tensors by component and by the layer's path in the parameter tree, joined by dots."""

KOHYA = {
    "unet": ("lora_unet_", "lycoris_"),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("lora_te2_",),
}
"""The prefixes of a component's layers in kohya's files, whose dots are underscores."""
_SAME = (
    *("alpha", "scale", "dora_scale", "diff", "diff_b", "w_norm", "b_norm", "weight", "on_input"),
    *(f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2")),
)
_PARTS = (
    (r"lora_down\.weight|lora_A(\.\w+)?\.weight|lora(_linear_layer)?\.down\.weight", "down"),
    (r"lora_up\.weight|lora_B(\.\w+)?\.weight|lora(_linear_layer)?\.up\.weight", "up"),
    (r"lora_mid\.weight", "mid"),
    (r"lora_magnitude_vector(\.\w+)?(\.weight)?", "magnitude"),
    *((name, name) for name in _SAME),
)
# Keys of diffusers before it used PEFT: `attn1.processor.to_q_lora.down.weight`.
_PROCESSOR = re.compile(r"(.*?)\.(?:processor\.)?to_(q|k|v|out)_lora\.(down|up)\.weight")
_IGNORED = ("base_model.model.", "module.")
_OF_TRANSFORMERS = ("transformer.", "lora_transformer_", "double_blocks", "single_blocks")
_WIDTHS = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    2048: "Stable Diffusion XL",
    1280: "the Stable Diffusion XL refiner",
}


class _Names(NamedTuple):
    """The names that files have for the layers of a network, with the layers' paths."""

    own: dict[str, str]
    original: dict[str, str]
    """Those of kohya's files in the original code's layout."""


def find_layers(
    file: LoraFile, networks: Mapping[str, Any], *, strict: bool = True, others: Iterable[str] = ()
) -> Layers:
    """Returns the tensors of a LoRA by layer.

    Where a file has the names of both diffusers' layout and the original one, as some of SDXL
    have, the latter are left out.

    Args:
        file: the LoRA.
        networks: the networks by component.
        strict: whether a key that fits no layer is an error; else it is left out.
        others: components that the pipeline's family has and this pipeline lacks, whose layers are
            left out.

    Raises:
        ValueError: keys fit no layer; names one, and the model that the LoRA seems to be for.
    """
    found: Layers = {}
    original: Layers = {}
    unknown, absent = [], 0
    known = {name: _names(name, network) for name, network in networks.items()}
    own_names = {name: names.own for name, names in known.items()}
    original_names = {name: names.original for name, names in known.items()}
    for key, tensor in file.tensors.items():
        layer, part = split_key(key)
        place, older = _place(layer, own_names), _place(layer, original_names)
        if part and (place or older):
            layers = found if place else original
            layers.setdefault(place or older, {})[part] = tensor  # type: ignore[arg-type]
        elif any(layer.startswith(prefix) for name in others for prefix in _prefixes(name)):
            absent += 1
        else:
            unknown.append(key)
    if absent:
        log.warning("%s: %d tensors are of components that the pipeline lacks", file.name, absent)
    if not {component for component, _ in original} & {component for component, _ in found}:
        found |= original
    if unknown and strict:
        raise ValueError(
            f"{file.name}: the key {unknown[0]!r}{_and_more(unknown)} fits no layer of "
            f"{', '.join(networks)}{_seems(file.tensors)}; strict=False leaves out what does not "
            "fit"
        )
    if unknown:
        log.warning("%s: %d tensors fit no layer; %s", file.name, len(unknown), unknown[0])
    if not found:
        raise ValueError(f"{file.name} has no layer of {', '.join(networks)}{_seems(file.tensors)}")
    return found


def split_key(key: str) -> tuple[str, str | None]:
    """Returns the layer's name and what the tensor is of it; None where that is not known."""
    for prefix in _IGNORED:
        key = key.replace(prefix, "")
    if old := _PROCESSOR.fullmatch(key):
        layer, kind, part = old.groups()
        if ".self_attn" in layer or layer.startswith("text_encoder"):
            return f"{layer}.{kind}_proj", part
        return f"{layer}.to_{'out.0' if kind == 'out' else kind}", part
    for pattern, part in _PARTS:
        if match := re.fullmatch(rf"(.+?)\.(?:{pattern})", key):
            return match[1], part
    return key, None


def kohya_name(component: str, path: str, encoders: int) -> str:
    """Returns the name of a layer in kohya's files, in diffusers' layout.

    encoders: the text encoders of the model; the only one is not numbered.

    Raises:
        ValueError: kohya's files have no such component.
    """
    if component not in KOHYA:
        raise ValueError(f"kohya's files have no layers of {component}")
    numbered = component == "text_encoder" and encoders > 1
    return KOHYA[component][numbered] + path.replace(".", "_")


def seems_to_be_for(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Returns the model that a LoRA seems to be for, by its keys and its widths."""
    if any(word in key for key in tensors for word in _OF_TRANSFORMERS):
        return "a transformer such as FLUX"
    for key, tensor in tensors.items():
        layer, part = split_key(key)
        if part == "down" and layer.endswith(("attn2.to_k", "attn2_to_k")) and tensor.ndim > 1:
            return _WIDTHS.get(tensor.shape[1])
    return None


def _seems(tensors: Mapping[str, np.ndarray]) -> str:
    guess = seems_to_be_for(tensors)
    return f"; it seems to be a LoRA for {guess}" if guess else ""


def _and_more(keys: list[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def _prefixes(component: str) -> tuple[str, ...]:
    return (f"{component}.", *KOHYA.get(component, ()))


def _place(layer: str, names: Mapping[str, Mapping[str, str]]) -> tuple[str, str] | None:
    return next(((name, own[layer]) for name, own in names.items() if layer in own), None)


@functools.lru_cache(64)
def _names(component: str, network: Any) -> _Names:
    """Returns the names in files for the layers of a component's network."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(network.shapes)
    paths = dict.fromkeys(tree_name(path[:-1]) for path, _ in leaves if len(path) > 1)
    kohya = KOHYA.get(component, ())
    own: dict[str, str] = {}
    shorter = getattr(getattr(network, "module_class", None), "key_prefix", "")
    for path in paths:
        aliases = [path, path.removeprefix(shorter)] if shorter else [path]
        for alias in aliases:
            own[f"{component}.{alias}"] = path
            own |= {prefix + alias.replace(".", "_"): path for prefix in kohya}
        if component == "unet":
            own[path] = path
    return _Names(own, _original_names(network) if component == "unet" else {})


def _original_names(network: Any) -> dict[str, str]:
    if getattr(network, "module_class", None) is not UNet2DConditionModel:
        return {}
    try:
        found = unet_names(network.config)
    except ValueError:
        return {}
    return {
        prefix + name.replace(".", "_"): path
        for name, path in found.items()
        for prefix in KOHYA["unet"]
    }
