"""The names of transformers in their authors' code, which ComfyUI and kohya's scripts keep."""

from typing import Any

from diffusax.checkpoints.original.flux import FLUX, FLUX2, FLUX3
from diffusax.checkpoints.original.krea2 import KREA2
from diffusax.checkpoints.original.layout import Module, Names, Original, named, original_modules
from diffusax.checkpoints.original.wan import WAN, WAN_VACE
from diffusax.checkpoints.tree import checkpoint_name
from diffusax.models.parameter_tree import ordered_leaves

_QWEN_IMAGE = ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")
"""ComfyUI has diffusers' names for Qwen-Image."""
ORIGINALS: dict[str, Original] = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX2,
    "Krea2Transformer2DModel": KREA2,
    "Flux3Transformer2DModel": FLUX3,
    # ComfyUI has the two halves of gated layers in one, and all other names are diffusers'.
    "QwenImage21Transformer2DModel": Original(
        known_by=("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_up.weight"),
        known_by_in_diffusers=(
            "txt_in.text_norm.weight",
            "transformer_blocks.0.img_mlp.gate_layer.weight",
        ),
        modules={"img_mlp.gate_up": ("img_mlp.gate_layer", "img_mlp.proj")},
    ),
    "QwenImageTransformer2DModel": Original(
        known_by=_QWEN_IMAGE,
        known_by_in_diffusers=_QWEN_IMAGE,
        modules={},
        flags={"__index_timestep_zero__": "zero_cond_t"},
    ),
    "ZImageTransformer2DModel": Original(
        known_by=("layers.0.adaLN_modulation.0.weight", "layers.0.attention.qkv.weight"),
        known_by_in_diffusers=(
            "layers.0.adaLN_modulation.0.weight",
            "layers.0.attention.to_q.weight",
        ),
        modules={
            "x_embedder": "all_x_embedder.2-1",
            "final_layer": "all_final_layer.2-1",
            "attention.q_norm": "attention.norm_q",
            "attention.k_norm": "attention.norm_k",
            "attention.out": "attention.to_out.0",
            "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
        },
        leftovers=("norm_final.",),
    ),
    # VACE's has all that Wan's has.
    "WanVACETransformer3DModel": WAN_VACE,
    "WanTransformer3DModel": WAN,
}
"""The transformers by the name of their class; enter one here, and its files can be read."""


def transformer_names(network: Any) -> Names:
    """Returns the original modules of a network; none for one that is not in `ORIGINALS`."""
    original = ORIGINALS.get(getattr(network, "class_name", ""))
    return {} if original is None else original_modules(original, _paths(network))


def adapter_names(network: Any) -> Names:
    """Returns the original modules of a network by all names that LoRAs have for them."""
    original = ORIGINALS.get(getattr(network, "class_name", ""))
    more = {} if original is None else named(original.adapters, _paths(network))
    return transformer_names(network) | {name: Module(own) for name, own in more.items()}


def _paths(network: Any) -> list[str]:
    """Returns the paths of a network's modules that have parameters."""
    leaves = ordered_leaves(network.shapes)
    paths = (checkpoint_name(path).rpartition(".")[0] for path, _ in leaves)
    return list(dict.fromkeys(path for path in paths if path))
