"""The names of OpenCLIP's models (Cherti et al. 2023), which SD 2 and SDXL files hold in part.

OpenCLIP keeps the three projections of attention in one tensor, queries, keys and values below each
other, and the projection of the pooled text as a matrix to multiply by from the right.
"""

from diffusax.models.encoders.configs import CLIPConfig, CLIPTextConfig

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
TRANSPOSED = {
    TEXT_PROJECTION: f"{TEXT_PROJECTION}.weight",
    "visual.proj": "visual_projection.weight",
}
"""The tensors of which transformers has the transpose, and its names."""
_VISION = {
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "ln_pre.weight": "pre_layrnorm.weight",
    "ln_pre.bias": "pre_layrnorm.bias",
    "ln_post.weight": "post_layernorm.weight",
    "ln_post.bias": "post_layernorm.bias",
}


def open_clip_names(config: CLIPTextConfig | CLIPConfig) -> dict[str, tuple[str, ...]]:
    """Returns the names in transformers for each tensor's name in OpenCLIP.

    Three names are those of the three parts of a tensor along its first axis. The names are without
    a prefix, such as {"transformer.resblocks.0.ln_1.bias":
    ("text_model.encoder.layers.0.layer_norm1.bias",)}. Those in `TRANSPOSED` are not among them. Of
    a whole CLIP, the vision network's names are there, too.
    """
    text = config.text_config if isinstance(config, CLIPConfig) else config
    names: dict[str, tuple[str, ...]] = {original: (name,) for original, name in _FIXED.items()}
    names |= _layer_names("", "text_model", text.num_hidden_layers)
    if isinstance(config, CLIPConfig):
        names |= {f"visual.{k}": (f"vision_model.{name}",) for k, name in _VISION.items()}
        names |= _layer_names("visual.", "vision_model", config.vision_config.num_hidden_layers)
    return names


def _layer_names(prefix: str, tower: str, layers: int) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for i in range(layers):
        theirs, ours = f"{prefix}transformer.resblocks.{i}", f"{tower}.encoder.layers.{i}"
        for kind in ("weight", "bias"):
            for original, name in _LAYER.items():
                names[f"{theirs}.{original}.{kind}"] = (f"{ours}.{name}.{kind}",)
            parts = tuple(f"{ours}.self_attn.{name}.{kind}" for name in PROJECTIONS)
            names[f"{theirs}.attn.in_proj_{kind}"] = parts
    return names
