"""The configs of text encoders in single files, as far as the shapes of their tensors say them."""

from typing import Any

from diffusax.checkpoints.single_file.contents import Part

Config = dict[str, Any]

_T5_XXL: Config = {
    "architectures": ["T5EncoderModel"],
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_UMT5_XXL = {**_T5_XXL, "architectures": ["UMT5EncoderModel"], "vocab_size": 256384}
_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
_QWEN3_INNER = {(2560,): 9728, (4096,): 12288}
"""The inner channels of the feed-forward layers of Qwen3-4B and 8B, by its width."""
_QWEN3_VL: Config = {**_QWEN3, "max_position_embeddings": 262144, "rope_theta": 5e6}
_DEEP = {24: [5, 11, 17], 27: [8, 16, 24]}
"""The blocks of Qwen3-VL's vision network, by how many there are, that the language model reads."""


def text_encoder_config(part: Part) -> Config | None:
    """Returns the config of T5-XXL or UMT5-XXL, or of Qwen3 or Qwen3-VL of 4 or 8 billion
    parameters; None for others.
    """
    words = part.shape("shared.weight") or part.shape("token_embedding.weight")
    if words in (known := {(own["vocab_size"], 4096): own for own in (_T5_XXL, _UMT5_XXL)}):
        return known[words]
    inner = "language_model." if part.shape("model.language_model.norm.weight") else ""
    width, size = (part.shape(f"model.{inner}{name}.weight") for name in ("embed_tokens", "norm"))
    if width != (151936, *(size or ())) or size not in _QWEN3_INNER:
        return None
    own = {
        "hidden_size": size[0],
        "intermediate_size": _QWEN3_INNER[size],
        "tie_word_embeddings": part.shape("lm_head.weight") is None,
    }
    vision = _qwen3_vision(part)
    if not inner and vision is None:
        return {**_QWEN3, **own}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {k: v for k, v in {**_QWEN3_VL, **own}.items() if k != "architectures"},
        "vision_config": vision,
        "tie_word_embeddings": own["tie_word_embeddings"],
    }


def _qwen3_vision(part: Part) -> Config | None:
    """Returns the config of Qwen3-VL's vision network; None where a file has none."""
    names = ("model.visual.", "visual.")
    start = next((name for name in names if part.shape(f"{name}pos_embed.weight")), None)
    if start is None:
        return None
    depth, places = part.count(f"{start}blocks."), part.shape(f"{start}pos_embed.weight")
    inner = part.shape(f"{start}blocks.0.mlp.linear_fc1.weight")
    out = part.shape(f"{start}merger.linear_fc2.weight")
    if not inner or not out or not places or depth not in _DEEP:
        return None
    return {
        "depth": depth,
        "hidden_size": inner[1],
        "intermediate_size": inner[0],
        "out_hidden_size": out[0],
        "num_position_embeddings": places[0],
        "deepstack_visual_indexes": _DEEP[depth],
    }
