"""The modules of Wan in its authors' code (github.com/Wan-Video/Wan2.1, wan/modules), with UMT5's.

Upstream: diffusers loaders/single_file_utils.py, convert_wan_transformer_to_diffusers, and
loaders/lora_conversion_utils.py, _convert_non_diffusers_wan_lora_to_diffusers. The embeddings of
places of FLF2V are those of scripts/convert_wan_to_diffusers.py.
"""

import dataclasses
from typing import Any

from diffusax.checkpoints.original.layout import Original

_SELF = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_CROSS = {**_SELF, "k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
_EMBEDDER = "condition_embedder"
_IMAGES = f"{_EMBEDDER}.image_embedder"

WAN = Original(
    known_by=("patch_embedding.weight", "head.modulation", "blocks.0.self_attn.q.weight"),
    known_by_in_diffusers=(
        *("patch_embedding.weight", "scale_shift_table"),
        *("condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight"),
    ),
    modules={
        "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
        "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
        "time_projection.1": f"{_EMBEDDER}.time_proj",
        "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
        "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
        "img_emb.proj.0": f"{_IMAGES}.norm1",
        "img_emb.proj.1": f"{_IMAGES}.ff.net.0.proj",
        "img_emb.proj.3": f"{_IMAGES}.ff.net.2",
        "img_emb.proj.4": f"{_IMAGES}.norm2",
        **{f"self_attn.{theirs}": f"attn1.{ours}" for theirs, ours in _SELF.items()},
        **{f"cross_attn.{theirs}": f"attn2.{ours}" for theirs, ours in _CROSS.items()},
        **{f"self_attn.norm_{x}": f"attn1.norm_{x}" for x in "qk"},
        **{f"cross_attn.norm_{x}": f"attn2.norm_{x}" for x in "qk"},
        # The original code counts the norms without parameters, too, in another order.
        "norm3": "norm2",
        "ffn.0": "ffn.net.0.proj",
        "ffn.2": "ffn.net.2",
        "head.head": "proj_out",
    },
    tables={"modulation": "scale_shift_table"},
    parameters={
        "head.modulation": "scale_shift_table",
        "img_emb.emb_pos": f"{_IMAGES}.pos_embed",
    },
)
WAN_VACE = dataclasses.replace(
    WAN,
    known_by=(*WAN.known_by, "vace_blocks.0.after_proj.weight"),
    known_by_in_diffusers=(*WAN.known_by_in_diffusers, "vace_blocks.0.proj_out.weight"),
    modules={
        **WAN.modules,
        "vace_blocks.*.before_proj": "vace_blocks.*.proj_in",
        "vace_blocks.*.after_proj": "vace_blocks.*.proj_out",
    },
)

UMT5_KNOWN_BY = "blocks.0.pos_embedding.embedding.weight"
"""The tensor by which a file with UMT5 in the original layout is known (wan/modules/t5.py)."""
_OF_UMT5 = {
    **{f"attn.{x}": f"layer.0.SelfAttention.{x}" for x in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm1": "layer.0.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
    "norm2": "layer.1.layer_norm",
}


def umt5_names(config: Any) -> dict[str, str]:
    """Returns the path in transformers of each module of UMT5's encoder by its original path."""
    names = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
    for i in range(config.num_layers):
        names |= {f"blocks.{i}.{k}": f"encoder.block.{i}.{v}" for k, v in _OF_UMT5.items()}
    return names
