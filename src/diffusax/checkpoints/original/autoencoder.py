"""The names of autoencoders in the original code (ldm/modules/diffusionmodules/model.py).

Those of Qwen-Image are Wan's: diffusers loaders/single_file_utils.py,
convert_wan_vae_to_diffusers.
"""

from typing import Any

from diffusax.checkpoints.tree import checkpoint_name
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from diffusax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from diffusax.models.autoencoders.qwen_image import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImageConfig,
)
from diffusax.models.autoencoders.qwen_image21 import (
    AutoencoderKLQwenImage21,
    AutoencoderKLQwenImage21Config,
)
from diffusax.models.autoencoders.wan import AutoencoderKLWan, AutoencoderKLWanConfig
from diffusax.models.network import Network
from diffusax.models.parameter_tree import ordered_leaves

_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


# FLUX.2's, which has them in the two halves (github.com/black-forest-labs/flux2, autoencoder.py).
_QUANT = {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv"}


_QWEN_IMAGE = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
}
_QWEN_IMAGE_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def autoencoder_names(
    config: (
        AutoencoderKLConfig
        | AutoencoderKLFlux2Config
        | AutoencoderKLQwenImageConfig
        | AutoencoderKLQwenImage21Config
        | AutoencoderKLWanConfig
    ),
) -> dict[str, str]:
    """Returns the module path in diffusers for each module path in the original code.

    Only modules that have parameters are there, without the prefix `first_stage_model.`, such as
    {"decoder.up.3.block.0.conv1": "decoder.up_blocks.0.resnets.0.conv1"}. The original code numbers
    the decoder's levels from the largest maps on.
    """
    if isinstance(config, AutoencoderKLQwenImageConfig):
        paths = _paths(AutoencoderKLQwenImage, config)
        return {_of_qwen_image(path, config.num_res_blocks + 2): path for path in paths}
    if isinstance(config, AutoencoderKLQwenImage21Config):
        paths = _paths(AutoencoderKLQwenImage21, config)
        return {_of_qwen_image21(path, config.num_res_blocks): path for path in paths}
    if isinstance(config, AutoencoderKLWanConfig):
        paths, layers = _paths(AutoencoderKLWan, config), config.num_res_blocks
        if config.is_residual:
            return {_of_qwen_image21(path, layers): path for path in paths}
        return {_of_qwen_image(path, layers + 2): path for path in paths}
    flux2 = isinstance(config, AutoencoderKLFlux2Config)
    paths = _paths(AutoencoderKLFlux2 if flux2 else AutoencoderKL, config)
    names = {_original(path, len(config.block_out_channels)): path for path in paths}
    return {_QUANT.get(name, name): path for name, path in names.items()} if flux2 else names


def _paths(module_class: Any, config: Any) -> list[str]:
    """Returns the paths of an autoencoder's modules that have parameters."""
    leaves = ordered_leaves(Network(module_class, config).shapes)
    return list(dict.fromkeys(checkpoint_name(path).rpartition(".")[0] for path, _ in leaves))


def _of_qwen_image(path: str, layers: int) -> str:
    """Returns the original path of a module of Qwen-Image's autoencoder.

    layers: how many layers a level of the decoder has, with its enlargement; all are in one row.
    """
    side, _, rest = path.partition(".")
    kind, _, inner = rest.partition(".")
    if kind == "down_blocks":
        index, _, inner = inner.partition(".")
        place = f"downsamples.{index}"
    elif kind == "up_blocks":
        level, part, index, inner = inner.split(".", 3)
        own = int(index) if part == "resnets" else layers - 1
        place = f"upsamples.{int(level) * layers + own}"
    else:
        return _beside_levels(path)
    return f"{side}.{place}.{_QWEN_IMAGE_RESNET.get(inner, inner)}"


def _of_qwen_image21(path: str, layers: int) -> str:
    """Returns the original path of a module of Qwen-Image 2.1's autoencoder, which is Wan 2.2's.

    layers: the residual blocks of a level of the encoder, of which the decoder has one more.
    """
    side, _, rest = path.partition(".")
    kind, _, inner = rest.partition(".")
    if kind not in ("down_blocks", "up_blocks"):
        return _beside_levels(path)
    level, part, inner = inner.split(".", 2)
    index = str(layers + (kind == "up_blocks"))
    if part == "resnets":
        index, _, inner = inner.partition(".")
    row = "downsamples" if kind == "down_blocks" else "upsamples"
    return f"{side}.{row}.{level}.{row}.{index}.{_QWEN_IMAGE_RESNET.get(inner, inner)}"


def _beside_levels(path: str) -> str:
    """Returns the original path of a module that is no part of a level."""
    side, _, rest = path.partition(".")
    if not rest:
        return _QWEN_IMAGE[side]
    kind, _, inner = rest.partition(".")
    if kind != "mid_block":
        return f"{side}.{_QWEN_IMAGE[kind]}"
    part, index, inner = inner.split(".", 2)
    place = "middle.1" if part == "attentions" else f"middle.{2 * int(index)}"
    return f"{side}.{place}.{_QWEN_IMAGE_RESNET.get(inner, inner)}"


def is_projection(path: str) -> bool:
    """Returns whether a module is one of attention's, in the original code 1x1 convolutions."""
    return ".attentions." in path and not path.endswith(".group_norm")


def _original(path: str, levels: int) -> str:
    side, _, rest = path.partition(".")
    kind, _, rest = rest.partition(".")
    if kind == "conv_norm_out":
        return f"{side}.norm_out"
    if kind == "mid_block":
        part, index, inner = rest.split(".", 2)
        if part == "attentions":
            return f"{side}.mid.attn_1.{_ATTENTION[inner]}"
        return f"{side}.mid.block_{int(index) + 1}.{_resnet(inner)}"
    if kind not in ("down_blocks", "up_blocks"):
        return path
    level, part, index, inner = rest.split(".", 3)
    place = f"down.{level}" if kind == "down_blocks" else f"up.{levels - 1 - int(level)}"
    if part != "resnets":
        return f"{side}.{place}.{part.removesuffix('rs')}.{inner}"
    return f"{side}.{place}.block.{index}.{_resnet(inner)}"


def _resnet(layer: str) -> str:
    return "nin_shortcut" if layer == "conv_shortcut" else layer
