"""The names of UNets and ControlNets in the original code (ldm/modules/diffusionmodules)."""

from typing import Any

from diffusax.checkpoints.tree import checkpoint_name
from diffusax.models.network import Network
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.unet.controlnet import ControlNetConfig, ControlNetModel
from diffusax.models.unet.unet import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.models.unet.unet_encoder import UNetEncoderConfig

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_FIXED = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "time_embedding.cond_proj": "time_embed.cond_proj",
    "class_embedding": "label_emb",
    "class_embedding.linear_1": "label_emb.0.0",
    "class_embedding.linear_2": "label_emb.0.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "controlnet_mid_block": "middle_block_out.0",
    "controlnet_cond_embedding.conv_in": "input_hint_block.0",
}
_UPSTREAM = "the original code has no such network"


def unet_names(config: UNet2DConditionConfig) -> dict[str, str]:
    """Returns the module path in diffusers for each module path in the original code.

    Only modules that have parameters are there, without the prefix `model.diffusion_model.`, such
    as {"input_blocks.1.0.in_layers.2": "down_blocks.0.resnets.0.conv1"}. The original code counts
    the resnets of all levels through, and each downsampler is a block of its own.

    Raises:
        ValueError: the original code has no UNet of this config.
    """
    return _names(UNet2DConditionModel, config)


def controlnet_names(config: ControlNetConfig) -> dict[str, str]:
    """Returns names like `unet_names`, for a ControlNet (prefix `control_model.`).

    Raises:
        ValueError: the original code has no ControlNet of this config.
    """
    return _names(ControlNetModel, config)


def _names(module_class: Any, config: Any) -> dict[str, str]:
    leaves = ordered_leaves(Network(module_class, config).shapes)
    paths = dict.fromkeys(checkpoint_name(path).rpartition(".")[0] for path, _ in leaves)
    names = {_original(config, path): path for path in paths}
    if len(names) < len(paths):
        raise ValueError(f"class_embed_type and addition_embed_type are both given; {_UPSTREAM}")
    return names


def _original(config: UNetEncoderConfig, path: str) -> str:
    """Returns the original path of a module's path in diffusers."""
    if path in _FIXED:
        return _FIXED[path]
    kind, *rest = path.split(".")
    if kind == "down_blocks":
        return _down(config, *rest)
    if kind == "mid_block":
        return _middle(*rest)
    if kind == "up_blocks":
        return _up(config, *rest)
    if kind == "controlnet_down_blocks":
        return f"zero_convs.{rest[0]}.0"
    return _hint(config, *rest)


def _down(config: UNetEncoderConfig, level: str, kind: str, index: str, *inner: str) -> str:
    counts = config.per_level("layers_per_block")
    first = 1 + sum(n + 1 for n in counts[: int(level)])
    if kind == "downsamplers":
        return f"input_blocks.{first + counts[int(level)]}.0.op"
    return f"input_blocks.{first + int(index)}.{_layer(kind, inner)}"


def _middle(kind: str, index: str, *inner: str) -> str:
    place, layer = _layer(kind, inner).split(".", 1)
    return f"middle_block.{2 * int(index) + int(place)}.{layer}"


def _up(config: UNet2DConditionConfig | Any, level: str, kind: str, index: str, *inner: str) -> str:
    counts = config.per_level("layers_per_block")[::-1]
    first = sum(n + 1 for n in counts[: int(level)])
    if kind == "upsamplers":
        attends = config.up_block_types[int(level)] == "CrossAttnUpBlock2D"
        return f"output_blocks.{first + counts[int(level)]}.{2 if attends else 1}.conv"
    return f"output_blocks.{first + int(index)}.{_layer(kind, inner)}"


def _hint(config: ControlNetConfig | Any, kind: str, index: str = "") -> str:
    """Returns the place of a convolution of the control image; activations have the odd numbers."""
    if kind == "blocks":
        return f"input_hint_block.{2 * int(index) + 2}"
    return f"input_hint_block.{4 * len(config.conditioning_embedding_out_channels) - 2}"


def _layer(kind: str, inner: tuple[str, ...]) -> str:
    """Returns the place of a resnet's or a transformer's layer in its block."""
    if kind == "attentions":
        return f"1.{'.'.join(inner)}"
    return f"0.{_RESNET[inner[0]]}"
