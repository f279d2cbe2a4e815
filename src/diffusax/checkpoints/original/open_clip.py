"""The names of OpenCLIP's text encoders (Cherti et al. 2023), which SD 2 and SDXL files hold.

OpenCLIP keeps the three projections of attention in one tensor, queries, keys and values below each
other, and the projection of the pooled text as a matrix to multiply by from the right.
"""

from diffusax.models.encoders.configs import CLIPTextConfig

_FIXED = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_LAYER = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
TEXT_PROJECTION = "text_projection"


def open_clip_names(config: CLIPTextConfig) -> dict[str, tuple[str, ...]]:
    """Returns the names in transformers for each tensor's name in OpenCLIP.

    Three names are those of the three parts of a tensor along its first axis. The names are without
    a prefix, such as {"transformer.resblocks.0.ln_1.bias":
    ("text_model.encoder.layers.0.layer_norm1.bias",)}. `text_projection`, of which transformers has
    the transpose as `text_projection.weight`, is not among them.
    """
    names: dict[str, tuple[str, ...]] = {original: (name,) for original, name in _FIXED.items()}
    for i in range(config.num_hidden_layers):
        theirs, ours = f"transformer.resblocks.{i}", f"text_model.encoder.layers.{i}"
        for kind in ("weight", "bias"):
            for original, name in _LAYER.items():
                names[f"{theirs}.{original}.{kind}"] = (f"{ours}.{name}.{kind}",)
            parts = tuple(f"{ours}.self_attn.{name}.{kind}" for name in PROJECTIONS)
            names[f"{theirs}.attn.in_proj_{kind}"] = parts
    return names
