"""The names of autoencoders in the original code (ldm/modules/diffusionmodules/model.py)."""

from diffusax.checkpoints.tree import checkpoint_name
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from diffusax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
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


def autoencoder_names(config: AutoencoderKLConfig | AutoencoderKLFlux2Config) -> dict[str, str]:
    """Returns the module path in diffusers for each module path in the original code.

    Only modules that have parameters are there, without the prefix `first_stage_model.`, such as
    {"decoder.up.3.block.0.conv1": "decoder.up_blocks.0.resnets.0.conv1"}. The original code numbers
    the decoder's levels from the largest maps on.
    """
    flux2 = isinstance(config, AutoencoderKLFlux2Config)
    network = Network(AutoencoderKLFlux2 if flux2 else AutoencoderKL, config)
    leaves = ordered_leaves(network.shapes)
    paths = dict.fromkeys(checkpoint_name(path).rpartition(".")[0] for path, _ in leaves)
    names = {_original(path, len(config.block_out_channels)): path for path in paths}
    return {_QUANT.get(name, name): path for name, path in names.items()} if flux2 else names


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
