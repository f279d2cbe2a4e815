"""T5's encoder (Raffel et al. 2020), which FLUX.1 and Stable Diffusion 3 condition on, and UMT5's.

Upstream: transformers models/t5/modeling_t5.py and models/umt5/modeling_umt5.py.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.encoders.configs import T5Config, UMT5Config
from diffusax.models.encoders.hidden_states import LanguageModel, chosen_states
from diffusax.models.layers.layers import Embedding, Linear, RMSNorm
from diffusax.models.ops.activations import gated_approximate_gelu
from diffusax.models.ops.attention import attention
from diffusax.runtime.devices.mesh import Rule, Rules

TENSOR_RULES: Rules = (
    Rule(r"SelfAttention\.[qkv]\.kernel", -1, "heads"),
    Rule(r"SelfAttention\.o\.kernel", -2, "heads"),
    (r"DenseReluDense\.wi(_[01])?\.kernel", -1),
    (r"DenseReluDense\.wo\.kernel", -2),
)

_HEADROOM = 256.0
"""How much larger than float16's largest number T5's outputs may be in float16."""


def distance_buckets(length: int, buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of the distance from each query to each key, t t (section 2.1).

    Half of the buckets are for keys after the query. Of each half, the first half has a bucket for
    each distance, the rest logarithmically more. Logarithms are float32, as upstream's.
    """
    distances = np.arange(length) - np.arange(length)[:, None]
    half = buckets // 2
    exact = half // 2
    near = np.abs(distances)
    scale = np.float32(math.log(max_distance / exact))
    logarithms = np.log(np.maximum(near, exact).astype(np.float32) / np.float32(exact))
    far = exact + (logarithms / scale * np.float32(half - exact)).astype(np.int64)
    bucket = np.where(near < exact, near, np.minimum(far, half - 1))
    return bucket + np.where(distances > 0, half, 0)


class T5Attention(nnx.Module):
    """Self-attention with a bias by distance, without a scale, b t c -> b t c.

    biased: whether it has biases; those of T5's first layer are those of all later ones, too.
    """

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        c, inner = config.d_model, config.num_heads * config.d_kv
        self.heads, self.head_dim = config.num_heads, config.d_kv
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.q = Linear(c, inner, bias=False, rngs=rngs)
        self.k = Linear(c, inner, bias=False, rngs=rngs)
        self.v = Linear(c, inner, bias=False, rngs=rngs)
        self.o = Linear(inner, c, bias=False, rngs=rngs)
        self.relative_attention_bias = (
            Embedding(self.buckets, config.num_heads, rngs=rngs) if biased else None
        )

    def biases(self, length: int) -> jax.Array:
        """Returns what is added to the scores of `length` tokens: h t t, float32."""
        assert self.relative_attention_bias is not None
        ids = distance_buckets(length, self.buckets, self.max_distance)
        found = self.relative_attention_bias(jnp.asarray(ids))
        return found.astype(jnp.float32).transpose(2, 0, 1)

    def __call__(self, x: jax.Array, bias: jax.Array, key_lengths: jax.Array | None) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], -1, self.head_dim) for proj in (self.q, self.k, self.v)
        )
        y = attention(q, k, v, scale=1.0, key_lengths=key_lengths, bias=bias)
        return self.o(y.reshape(*x.shape[:2], -1))


class T5LayerSelfAttention(nnx.Module):
    """Attention after a norm, with its residual connection, b t c -> b t c."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        self.SelfAttention = T5Attention(config, biased=biased, rngs=rngs)
        self.layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, key_lengths: jax.Array | None) -> jax.Array:
        return x + self.SelfAttention(self.layer_norm(x), bias, key_lengths)


class T5Dense(nnx.Module):
    """Two linear layers with a ReLU between them, or a GELU gate (Shazeer 2020), b t c -> b t c."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        c, d = config.d_model, config.d_ff
        if config.feed_forward_proj == "relu":
            self.wi = Linear(c, d, bias=False, rngs=rngs)
        else:
            self.wi_0 = Linear(c, d, bias=False, rngs=rngs)
            self.wi_1 = Linear(c, d, bias=False, rngs=rngs)
        self.gated = config.feed_forward_proj != "relu"
        self.wo = Linear(d, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gated:
            h = gated_approximate_gelu(self.wi_0(x), self.wi_1(x))
        else:
            h = nnx.relu(self.wi(x))
        if h.dtype != jnp.float16:
            return self.wo(h)
        # T5-XXL's outputs exceed float16, for which upstream keeps these weights in float32. What
        # they are added to is float32 from here on.
        return self.wo(h / _HEADROOM).astype(jnp.float32) * _HEADROOM


class T5LayerFF(nnx.Module):
    """The feed-forward layer after a norm, with its residual connection, b t c -> b t c."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.DenseReluDense = T5Dense(config, rngs=rngs)
        self.layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nnx.Module):
    """Attention and feed-forward layer, b t c -> b t c."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        attends: Any = T5LayerSelfAttention(config, biased=biased, rngs=rngs)
        self.layer = nnx.List([attends, T5LayerFF(config, rngs=rngs)])

    def __call__(
        self, x: jax.Array, *, bias: jax.Array, key_lengths: jax.Array | None
    ) -> jax.Array:
        return self.layer[1](self.layer[0](x, bias, key_lengths))


class T5Stack(nnx.Module):
    """The blocks and the final norm. x: b t c -> the hidden states after chosen layers, b t c."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        own = [i == 0 or not config.layers_share_biases for i in range(config.num_layers)]
        self.block = nnx.List([T5Block(config, biased=biased, rngs=rngs) for biased in own])
        self.final_layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, rngs=rngs)

    def __call__(
        self, x: jax.Array, key_lengths: jax.Array | None, layers: Sequence[int] | None
    ) -> tuple[jax.Array, ...]:
        attentions = [block.layer[0].SelfAttention for block in self.block]
        biased = [own for own in attentions if own.relative_attention_bias is not None]
        biases = [own.biases(x.shape[1]) for own in biased] * (len(attentions) // len(biased))
        blocks = [
            partial(block, bias=bias, key_lengths=key_lengths)
            for block, bias in zip(self.block, biases, strict=True)
        ]
        return chosen_states(x, blocks, self.final_layer_norm, layers)


class T5EncoderModel(LanguageModel):
    """T5's encoder with its embeddings. input_ids: b t -> hidden states, b t c."""

    config_class = T5Config
    tensor_rules = TENSOR_RULES
    adapter_groups = (r".*\.SelfAttention\.[qkvo]", r".*\.block\..*")
    # Some files have the table twice.
    ignored_keys = ("encoder.embed_tokens.weight",)
    # Others hold the whole of T5.
    ignored_parts = ("decoder.", "lm_head.")

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.shared = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder = T5Stack(config, rngs=rngs)

    def run_layers(
        self, ids: jax.Array, key_lengths: jax.Array | None, layers: Sequence[int] | None
    ) -> tuple[jax.Array, ...]:
        return self.encoder(self.shared(ids), key_lengths, layers)


class UMT5EncoderModel(T5EncoderModel):
    """UMT5's encoder (Chung et al. 2023), each of whose layers has biases of its own."""

    config_class = UMT5Config
