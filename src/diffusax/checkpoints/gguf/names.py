"""The names of text encoders in llama.cpp, which are alike for all of its models.

Source: github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py.
"""

from collections.abc import Mapping

from diffusax.checkpoints.entries import Entry

_T5 = {
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
    "ffn_norm": "layer.1.layer_norm",
}
_QWEN3 = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_LANGUAGE_MODELS = (
    (
        "enc.blk.",
        "encoder.block.",
        _T5,
        {"token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"},
    ),
    (
        "blk.",
        "model.layers.",
        _QWEN3,
        {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    ),
)
"""For T5's encoder and for Qwen3, llama.cpp's beginning of the blocks' names, that of transformers,
the modules of a block, and the others."""
_KNOWN_BY = ("enc.blk.0.attn_rel_b.weight", "blk.0.attn_q_norm.weight")


def as_in_transformers(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns a text encoder's tensors by their names in transformers; others as they are."""
    for known, rules in zip(_KNOWN_BY, _LANGUAGE_MODELS, strict=True):
        if known in entries:
            return {_renamed(name, *rules): entry for name, entry in entries.items()}
    return dict(entries)


def _renamed(
    name: str, theirs: str, ours: str, block: Mapping[str, str], rest: Mapping[str, str]
) -> str:
    path, _, leaf = name.rpartition(".")
    if path in rest:
        return f"{rest[path]}.{leaf}"
    number, _, module = path.removeprefix(theirs).partition(".")
    if not path.startswith(theirs) or module not in block:
        return name
    return f"{ours}{number}.{block[module]}.{leaf}"
