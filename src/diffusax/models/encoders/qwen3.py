"""Qwen3 (Yang et al. 2025), a decoder language model that Z-Image and FLUX.2 klein condition on.

Upstream: transformers models/qwen3/modeling_qwen3.py.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.encoders.configs import Qwen3Config
from diffusax.models.encoders.hidden_states import LanguageModel, LanguageOutput, chosen_states
from diffusax.models.layers.layers import Embedding, Linear, RMSNorm
from diffusax.models.ops.activations import gated_silu
from diffusax.models.ops.attention import attention
from diffusax.models.ops.matmul import matmul
from diffusax.runtime.devices.mesh import Rule, Rules

TENSOR_RULES: Rules = (
    Rule(r"q_proj\.(kernel|bias)", -1, "heads"),
    Rule(r"[kv]_proj\.(kernel|bias)", -1, "key_heads"),
    Rule(r"o_proj\.kernel", -2, "heads"),
    (r"(gate|up)_proj\.kernel", -1),
    (r"down_proj\.kernel", -2),
)
ADAPTER_GROUPS = (r".*\.self_attn\.(q|k|v|o)_proj", r".*layers\..*_proj")
"""The products of attention; those of all layers."""

Rotary = tuple[np.ndarray, np.ndarray]
"""The cosines and sines of rotary positions, t d/2 each."""


def rotary_table(length: int, dim: int, theta: float) -> Rotary:
    """Computes cosines and sines of rotary positions (Su et al. 2021) 0 to length - 1: t dim/2.

    Powers, frequencies and angles are rounded to float32 as upstream's, which moves the angles of
    far positions by more than the rest of the network's rounding.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (np.float64(theta) ** exponents).astype(np.float32)
    frequencies = np.float32(1) / powers
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates the pairs of x's first and second half by their positions' angles. x: b t h d."""
    cos, sin = (table[:, None] for table in rotary)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Qwen3Attention(nnx.Module):
    """Causal self-attention with normalised queries and keys, b t c -> b t c."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        c, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = d
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.heads * d, self.key_heads * d
        self.q_proj = Linear(c, queries, bias=bias, rngs=rngs)
        self.k_proj = Linear(c, keys, bias=bias, rngs=rngs)
        self.v_proj = Linear(c, keys, bias=bias, rngs=rngs)
        self.o_proj = Linear(queries, c, bias=bias, rngs=rngs)
        self.q_norm = RMSNorm(d, eps=config.rms_norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(d, eps=config.rms_norm_eps, rngs=rngs)

    def __call__(self, x: jax.Array, rotary: Rotary, key_lengths: jax.Array | None) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary)
        y = attention(q, k, v, causal=True, key_lengths=key_lengths)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class Qwen3MLP(nnx.Module):
    """A feed-forward layer with a SiLU gate (SwiGLU, Shazeer 2020), b t c -> b t c."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        c, d = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(c, d, bias=False, rngs=rngs)
        self.up_proj = Linear(c, d, bias=False, rngs=rngs)
        self.down_proj = Linear(d, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


class Qwen3DecoderLayer(nnx.Module):
    """Attention and feed-forward layer, each after a norm, b t c -> b t c."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        c, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(c, eps=eps, rngs=rngs)
        self.self_attn = Qwen3Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(c, eps=eps, rngs=rngs)
        self.mlp = Qwen3MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, *, rotary: Rotary, key_lengths: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), rotary, key_lengths)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(LanguageModel):
    """Qwen3 without its head. input_ids: b t -> hidden states, b t c."""

    config_class = Qwen3Config
    tensor_rules = TENSOR_RULES
    adapter_groups = ADAPTER_GROUPS
    # The files of checkpoints mostly have the names of the model with its head.
    legacy_names = (("model.", ""),)
    ignored_keys = ("lm_head.weight",)

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        count = config.num_hidden_layers
        self.layers = nnx.List([Qwen3DecoderLayer(config, rngs=rngs) for _ in range(count)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)

    def run_layers(
        self, ids: jax.Array, key_lengths: jax.Array | None, layers: Sequence[int] | None
    ) -> tuple[jax.Array, ...]:
        config = self.config
        rotary = rotary_table(ids.shape[1], config.head_dim, config.rope_theta)
        blocks = [partial(b, rotary=rotary, key_lengths=key_lengths) for b in self.layers]
        return chosen_states(self.embed_tokens(ids), blocks, self.norm, layers)


class Qwen3ForCausalLM(LanguageModel):
    """Qwen3 with its head, which is the table of embeddings where tie_word_embeddings is set."""

    config_class = Qwen3Config
    tensor_rules = TENSOR_RULES
    adapter_groups = ADAPTER_GROUPS
    key_prefix = "model."
    ignored_keys = ("lm_head.weight",)

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        self.config = config
        self.model = Qwen3Model(config, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, rngs=rngs)
        )

    def __call__(
        self, input_ids: jax.Array, key_lengths: jax.Array | None = None
    ) -> LanguageOutput:
        """Computes the hidden states after every layer and the logits; see `hidden_states`."""
        states = self.hidden_states(input_ids, key_lengths)
        return LanguageOutput(states[-1], states, self._logits(states[-1]))

    def run_layers(
        self, ids: jax.Array, key_lengths: jax.Array | None, layers: Sequence[int] | None
    ) -> tuple[jax.Array, ...]:
        return self.model.run_layers(ids, key_lengths, layers)

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.lm_head is None:
            return matmul(x, self.model.embed_tokens.embedding[...].T)
        return self.lm_head(x)
