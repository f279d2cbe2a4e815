"""Single files of tiny checkpoints, and of full-size models without their numbers."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.checkpoints.converting import pack_single_file
from diffusax.checkpoints.networks import network_of
from diffusax.checkpoints.original.autoencoder import autoencoder_names, is_projection
from diffusax.checkpoints.original.open_clip import open_clip_names
from diffusax.checkpoints.original.unet import controlnet_names, unet_names
from diffusax.checkpoints.single_file import configs
from diffusax.checkpoints.tree import torch_shapes

Shapes = dict[str, tuple[int, ...]]

NAMES = {
    "UNet2DConditionModel": unet_names,
    "ControlNetModel": controlnet_names,
    "AutoencoderKL": autoencoder_names,
}
TEXTS = {
    "sd1": ("cond_stage_model.transformer.",),
    "sd2": ("cond_stage_model.model.",),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
    "refiner": ("conditioner.embedders.0.model.",),
}
_WAN_RESNET = {"norm1": "0", "conv1": "2", "norm2": "3", "conv2": "6"}


def prefixed(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """PyTorch's tensors under names with a prefix, each by itself in memory."""
    return {prefix + key: tensor.clone().contiguous() for key, tensor in tensors.items()}


def packed(folder: Path, path: Path, **options: Any) -> Path:
    """A checkpoint's folder as a single file, made once."""
    if not path.exists():
        pack_single_file(folder, path, **options)
    return path


def original_shapes(config: dict[str, Any], prefix: str = "") -> Shapes:
    """The shapes of a network's tensors by their names in the original code."""
    network = network_of(_class_name(config), config, source="a test")
    shapes = torch_shapes(network.shapes)
    if network.class_name not in NAMES:
        return _text_shapes(network.config, shapes, prefix)
    modules = {ours: theirs for theirs, ours in NAMES[network.class_name](network.config).items()}
    found = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if network.class_name == "AutoencoderKL" and leaf == "weight" and is_projection(module):
            shape = (*shape, 1, 1)
        found[f"{prefix}{modules[module]}.{leaf}"] = shape
    return found


def model_shapes(family: str, in_channels: int = 4) -> Shapes:
    """The shapes of the tensors of a whole full-size model."""
    unet = {**configs.UNETS[family], "in_channels": in_channels}
    shapes = original_shapes(unet, "model.diffusion_model.")
    shapes |= original_shapes(configs.AUTOENCODER, "first_stage_model.")
    for prefix, config in zip(TEXTS[family], configs.TEXT_ENCODERS[family].values(), strict=True):
        shapes |= original_shapes(config, prefix)
    return shapes


def hollow(path: Path, shapes: Mapping[str, tuple[int, ...]], **metadata: str) -> Path:
    """A whole safetensors file of such tensors, float16, which takes no room: all are zero."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def wan22_name(name: str) -> str:
    """The name of a tensor of an autoencoder in Wan 2.2's code."""
    path, _, leaf = name.rpartition(".")
    parts = path.split(".")
    if parts[0] in ("quant_conv", "post_quant_conv"):
        return f"{'conv1' if parts[0] == 'quant_conv' else 'conv2'}.{leaf}"
    side, kind, *rest = parts
    ends = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
    if kind in ends:
        return f"{side}.{ends[kind]}.{leaf}"
    if kind == "mid_block":
        place = "middle.1" if rest[0] == "attentions" else f"middle.{2 * int(rest[1])}"
        inner = rest[2:]
    else:
        row = {"down_blocks": "downsamples", "up_blocks": "upsamples"}[kind]
        level, part, *inner = rest
        # The decoder has three residual blocks on each level, the encoder two.
        index = {"downsampler": "2", "upsampler": "3"}.get(part) or inner.pop(0)
        place = f"{row}.{level}.{row}.{index}"
    if inner[0] in _WAN_RESNET:
        inner = ["residual", _WAN_RESNET[inner[0]]]
    end = ".".join("shortcut" if part == "conv_shortcut" else part for part in inner)
    return f"{side}.{place}.{end}.{leaf}"


def _text_shapes(config: Any, shapes: Shapes, prefix: str) -> Shapes:
    if config.hidden_act == "quick_gelu":
        return {prefix + name: shape for name, shape in shapes.items()}
    found = {}
    for name, parts in open_clip_names(config).items():
        first, *rest = shapes[parts[0]]
        found[prefix + name] = (len(parts) * first, *rest)
    if "text_projection.weight" in shapes:
        found[prefix + "text_projection"] = shapes["text_projection.weight"][::-1]
    return found


def _class_name(config: dict[str, Any]) -> str:
    return config.get("_class_name") or config["architectures"][0]
