"""Gives the tensors of a single file the names that they have in diffusers' layout."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from diffusax.checkpoints.original.autoencoder import autoencoder_names
from diffusax.checkpoints.original.open_clip import (
    PROJECTIONS,
    TEXT_PROJECTION,
    TRANSPOSED,
    open_clip_names,
)
from diffusax.checkpoints.original.transformers import ORIGINALS, transformer_names
from diffusax.checkpoints.original.unet import controlnet_names, unet_names
from diffusax.checkpoints.original.wan import umt5_names
from diffusax.checkpoints.single_file.contents import Part
from diffusax.checkpoints.tensors import Entry
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.models.network import Network

NAMES: dict[str, Callable[[Any], dict[str, str]]] = {
    "unet": unet_names,
    "controlnet": controlnet_names,
    "vae": autoencoder_names,
}
"""For each component, the function that gives the paths of its modules from its config."""
CLASSES = {
    "unet": ("UNet2DConditionModel",),
    "controlnet": ("ControlNetModel",),
    "vae": (
        *("AutoencoderKL", "AutoencoderKLFlux2"),
        *("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan"),
    ),
    "transformer": tuple(ORIGINALS),
    "text_encoder": (
        *("CLIPTextModel", "CLIPTextModelWithProjection"),
        *("Qwen3Model", "Qwen3ForCausalLM"),
        *("Qwen3VLModel", "Qwen3VLForConditionalGeneration", "UMT5EncoderModel"),
    ),
    "text_encoder_2": ("CLIPTextModelWithProjection", "T5EncoderModel"),
}
"""For each component, the classes of networks that single files hold."""
# What training leaves in files, and what no image depends on.
_LEFTOVERS: dict[str, tuple[str, ...]] = {
    "vae": ("loss.", "model_ema."),
    # ComfyUI has the vocabulary of UMT5 beside it.
    "text_encoder": ("logit_scale", "attn_mask", "text_projection", "spiece_model"),
    "text_encoder_2": ("logit_scale", "attn_mask"),
}


def named_entries(part: Part, network: Network) -> dict[str, Entry]:
    """Returns the tensors of a part by diffusers' or transformers' names; reads none.

    Names that the network does not have stay as they are, for the error that lists them.

    Args:
        part: the part of the file.
        network: the network to read from it.

    Raises:
        ValueError: the network is of another class than the part, or a tensor that holds several
            does not have the shape for it.
    """
    fitting = (part.class_name,) if part.class_name else CLASSES[part.name]
    if network.class_name not in fitting:
        raise ValueError(
            f"{part.path} holds a {fitting[0]} as {part.name}, but the config is that "
            f"of a {network.class_name}; pass the config that belongs to the file"
        )
    config, leftovers = network.config, _LEFTOVERS.get(part.name, ())
    if part.name == "transformer":
        original = ORIGINALS[part.class_name]
        leftovers = *original.leftovers, *original.flags
    own = {n: entry for n, entry in part.entries.items() if not n.startswith(leftovers)}
    if part.name == "transformer" and part.layout == "original":
        return _transformer(own, network)
    if part.layout == "original" and part.name == "text_encoder":
        return _by_module(own, umt5_names(config))
    if part.layout == "original":
        return _of_images(_by_module(own, NAMES[part.name](config)), network)
    if part.layout == "open_clip":
        return of_open_clip(own, config)
    if network.class_name in ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"):
        return {_of_qwen3_vl(name): entry for name, entry in own.items()}
    return _of_clip(own)


def _of_clip(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the tensors of a CLIP of which some are as in OpenCLIP, by transformers' names.

    stable-diffusion.cpp mixes the two in the files that it writes (its name_conversion.cpp).
    """
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        path, _, leaf = name.rpartition(".in_proj.")
        if path:
            parts = zip(PROJECTIONS, _split(name, entry, 3), strict=True)
            found |= {f"{path}.{own}.{leaf}": part for own, part in parts}
        elif name == f"text_model.{TEXT_PROJECTION}":
            found[f"{TEXT_PROJECTION}.weight"] = entry.transpose()
        else:
            found[name] = entry
    return found


def _of_qwen3_vl(name: str) -> str:
    """Returns a name in Qwen3-VL with its head; ComfyUI has its language model as if by itself."""
    own = name.removeprefix("model.")
    if own.startswith("lm_head."):
        return own
    beside = own.startswith(("visual.", "language_model."))
    return f"model.{own}" if beside else f"model.language_model.{own}"


def _by_module(entries: Mapping[str, Entry], names: Mapping[str, str]) -> dict[str, Entry]:
    found = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        found[f"{names[module]}.{leaf}" if module in names else name] = entry
    return found


def _of_images(entries: Mapping[str, Entry], network: Network) -> dict[str, Entry]:
    """Returns the entries, of which kernels over one frame have no axis for it."""
    shapes = torch_shapes(network.shapes)
    return {
        name: entry._replace(shape=shapes[name])
        if len(entry.shape) == 5 and entry.shape[:2] + entry.shape[3:] == shapes.get(name)
        else entry
        for name, entry in entries.items()
    }


def _transformer(entries: Mapping[str, Entry], network: Network) -> dict[str, Entry]:
    names, kernels = transformer_names(network), kernel_shapes(network)
    original, shapes = ORIGINALS[network.class_name], torch_shapes(network.shapes)
    tables, found = original.tables, {}
    for name, entry in entries.items():
        if name in original.parameters:
            found[original.parameters[name]] = entry
            continue
        module, _, leaf = name.rpartition(".")
        if module not in names:
            found[name] = entry
            continue
        paths, swapped = names[module]
        leaf = "weight" if leaf == "scale" else leaf
        if leaf in tables:
            name = f"{paths[0]}.{tables[leaf]}"
            shape = shapes.get(name, entry.shape)
            # One of another size stays as it is, for the error that tells of it.
            same = math.prod(shape) == math.prod(entry.shape)
            found[name] = entry._replace(shape=shape) if same else entry
            continue
        if swapped:
            _check_parts(name, entry, 2)
            entry = entry.swap()
        if len(paths) == 1:
            found[f"{paths[0]}.{leaf}"] = entry
            continue
        lengths = [kernels[path][-1] for path in paths]
        if entry.shape[:1] != (sum(lengths),):
            raise ValueError(_unsplit(name, entry, len(paths)))
        parts = zip(paths, entry.cut(lengths), strict=True)
        found |= {f"{path}.{leaf}": part for path, part in parts}
    return found


def of_open_clip(entries: Mapping[str, Entry], config: Any) -> dict[str, Entry]:
    """Returns the tensors of one of OpenCLIP's models by transformers' names.

    config: a CLIPTextConfig for its text encoder, a CLIPConfig for all of it.

    Raises:
        ValueError: a tensor that holds several does not have the shape for it.
    """
    names = open_clip_names(config)
    # SD 2 uses the output of the layer before the last, which is therefore not in its config.
    layers = getattr(config, "text_config", config).num_hidden_layers
    beyond = f"transformer.resblocks.{layers}."
    found = {}
    for name, entry in entries.items():
        if name.startswith(beyond):
            continue
        if name in TRANSPOSED:
            found[TRANSPOSED[name]] = entry.transpose()
            continue
        targets = names.get(name, (name,))
        parts = [entry] if len(targets) == 1 else _split(name, entry, len(targets))
        found.update(zip(targets, parts, strict=True))
    return found


def _split(name: str, entry: Entry, count: int) -> list[Entry]:
    _check_parts(name, entry, count)
    return entry.split(count)


def _check_parts(name: str, entry: Entry, count: int) -> None:
    if not entry.shape or entry.shape[0] % count:
        raise ValueError(_unsplit(name, entry, count))


def _unsplit(name: str, entry: Entry, count: int) -> str:
    return (
        f"{entry.path}: {name} holds {count} tensors below each other, but has the shape "
        f"{entry.shape}; download the file again"
    )
