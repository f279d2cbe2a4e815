"""Qwen3 (Yang et al. 2025), a decoder language model that Z-Image and FLUX.2 klein condition on.

Upstream: transformers models/qwen3/modeling_qwen3.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.encoders.configs import DecoderConfig, Qwen3Config
from diffusax.models.encoders.hidden_states import (
    ImageTokens,
    LanguageModel,
    LanguageOutput,
    chosen_states,
)
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

Positions = np.ndarray | jax.Array
Rotary = tuple[Positions, Positions]
"""The cosines and sines of rotary positions, b t d/2 or 1 t d/2 each."""


def rotary_table(positions: Positions, dim: int, theta: float) -> Rotary:
    """Computes cosines and sines of rotary positions (Su et al. 2021), b t dim/2 each.

    Powers, frequencies and angles are rounded to float32 as upstream's, which moves the angles of
    far positions by more than the rest of the network's rounding.

    positions: b t 1, or b t dim/2 with a position for each frequency. Tables of NumPy's positions
    are computed here and now.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (np.float64(theta) ** exponents).astype(np.float32)
    angles = positions.astype(np.float32) * (np.float32(1) / powers)
    if isinstance(angles, np.ndarray):
        return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates the pairs of x's first and second half by their positions' angles. x: b t h d."""
    cos, sin = (table[:, :, None] for table in rotary)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Qwen3Attention(nnx.Module):
    """Causal self-attention, mostly with normalised queries and keys, b t c -> b t c."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = d
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.heads * d, self.key_heads * d
        self.q_proj = Linear(c, queries, bias=bias, rngs=rngs)
        self.k_proj = Linear(c, keys, bias=bias, rngs=rngs)
        self.v_proj = Linear(c, keys, bias=bias, rngs=rngs)
        self.o_proj = Linear(queries, c, bias=config.output_bias, rngs=rngs)
        self.q_norm, self.k_norm = (
            RMSNorm(d, eps=config.rms_norm_eps, rngs=rngs) if config.qk_norm else None
            for _ in range(2)
        )

    def __call__(self, x: jax.Array, rotary: Rotary, key_lengths: jax.Array | None) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = attention(q, k, v, causal=True, key_lengths=key_lengths)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class Qwen3MLP(nnx.Module):
    """A feed-forward layer with a SiLU gate (SwiGLU, Shazeer 2020), b t c -> b t c."""

    def __init__(self, config: Any, *, bias: bool = False, rngs: nnx.Rngs):
        c, d = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(c, d, bias=bias, rngs=rngs)
        self.up_proj = Linear(c, d, bias=bias, rngs=rngs)
        self.down_proj = Linear(d, c, bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


class Qwen3DecoderLayer(nnx.Module):
    """Attention and feed-forward layer, each after a norm, b t c -> b t c."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(c, eps=eps, rngs=rngs)
        self.self_attn = Qwen3Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(c, eps=eps, rngs=rngs)
        self.mlp = Qwen3MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, *, rotary: Rotary, key_lengths: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), rotary, key_lengths)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderModel(LanguageModel):
    """A language model whose tokens read those before them. input_ids: b t -> states, b t c."""

    config: Any
    decoder: Any
    """The part without a head, with the embeddings, the layers and the final norm."""

    def __call__(
        self,
        input_ids: jax.Array,
        key_lengths: jax.Array | None = None,
        *,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        images: ImageTokens | None = None,
    ) -> LanguageOutput:
        """Computes the hidden states after every layer; see `hidden_states`."""
        options: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        options |= {"images": images, "final_norm": False}
        *states, last = self.hidden_states(input_ids, key_lengths, **options)
        normed = self.decoder.norm(last)
        states.append(normed if self.decoder.config.tie_last_hidden_states else last)
        return LanguageOutput(normed, tuple(states), self.logits(normed))

    def hidden_states(
        self,
        input_ids: jax.Array,
        key_lengths: jax.Array | None = None,
        *,
        layers: Sequence[int] | None = None,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        images: ImageTokens | None = None,
        final_norm: bool | None = None,
    ) -> tuple[jax.Array, ...]:
        """Computes the hidden states after chosen layers, b t c each, and no layer after those.

        Args:
            input_ids: the tokens, b t.
            key_lengths: b, int32: the tokens of each text that are read, at least one; pads follow.
            layers: see `LanguageModel.hidden_states`.
            attention_mask: b t, in the place of key_lengths, for pads that may be anywhere: whether
                a token is read. The states of pads have no meaning then.
            position_ids: b t, or for models that see also 3 b t (frame, row, column), integers: the
                positions of the tokens. By default 0 to t - 1, pads counted.
            images: what models that see read in the place of the tokens that stand for images.
            final_norm: whether the state after the last layer goes through the final norm; by
                default as the config's tie_last_hidden_states says.

        Raises:
            ValueError: those of `LanguageModel.hidden_states`; or both key_lengths and
                attention_mask are given.
        """
        self.check_tokens(input_ids)
        if attention_mask is not None and key_lengths is not None:
            raise ValueError("attention_mask must be left out where key_lengths is given")
        tied = self.decoder.config.tie_last_hidden_states
        options = {"images": images, "final_norm": tied if final_norm is None else final_norm}
        run = partial(self.decoder.run_layers, layers=layers, **options)
        if attention_mask is None:
            return run(input_ids, key_lengths, position_ids=position_ids)
        return _without_gaps(run, input_ids, attention_mask, position_ids, images)

    def logits(self, x: jax.Array) -> jax.Array | None:
        """Computes the logits of the next token, b t n, of the normed last state; None without a
        head.
        """
        return None


def _without_gaps(
    run: Callable[..., tuple[jax.Array, ...]],
    ids: jax.Array,
    mask: jax.Array,
    positions: jax.Array | None,
    images: ImageTokens | None,
) -> tuple[jax.Array, ...]:
    """Runs the layers on each text's tokens in a row, pads at the end, and puts the states back.

    Tokens read only those before them, which are no pads then, and keep their positions.
    """
    order = jnp.argsort(mask == 0, axis=1, stable=True)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    if images is not None:
        images = images._replace(mask=jnp.take_along_axis(images.mask, order, 1))
    states = run(
        jnp.take_along_axis(ids, order, 1),
        None,
        # Positions may have three axes before: frame, row and column.
        position_ids=jnp.take_along_axis(positions, order[(None,) * (positions.ndim - 2)], -1),
        images=images,
    )
    back = jnp.argsort(order, axis=1)[..., None]
    return tuple(jnp.take_along_axis(x, back, 1) for x in states)


class Qwen3Model(DecoderModel):
    """Qwen3 without its head. input_ids: b t -> hidden states, b t c."""

    config_class: ClassVar[Any] = Qwen3Config
    tensor_rules = TENSOR_RULES
    adapter_groups = ADAPTER_GROUPS
    # The files of checkpoints mostly have the names of the model with its head.
    legacy_names: ClassVar[tuple[tuple[str, str], ...]] = (("model.", ""),)
    ignored_keys = ("lm_head.weight",)

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        count = config.num_hidden_layers
        self.layers = nnx.List([Qwen3DecoderLayer(config, rngs=rngs) for _ in range(count)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)

    @property
    def decoder(self) -> "Qwen3Model":
        """The model itself."""
        return self

    def run_layers(
        self,
        ids: jax.Array,
        key_lengths: jax.Array | None,
        layers: Sequence[int] | None,
        *,
        position_ids: Positions | None = None,
        images: ImageTokens | None = None,
        final_norm: bool = True,
    ) -> tuple[jax.Array, ...]:
        config, x = self.config, self.embed_tokens(ids)
        positions = np.arange(ids.shape[1])[None] if position_ids is None else position_ids
        rotary = rotary_table(self.spread(positions), config.head_dim, config.rope_theta)
        steps: list[Any] = [partial(b, rotary=rotary, key_lengths=key_lengths) for b in self.layers]
        steps.append(self.norm if final_norm else lambda x: x)
        if images is not None:
            x, steps = images.put_into(x, steps)
        *blocks, norm = steps
        return chosen_states(x, blocks, norm, layers)

    def spread(self, positions: Positions) -> Positions:
        """Returns the positions of tokens, b t, for frequencies: b t 1, or b t d/2.

        Raises:
            ValueError: the positions have more axes.
        """
        if positions.ndim != 2:
            raise ValueError(f"position_ids must be b t (got shape {positions.shape})")
        return positions[..., None]


class Qwen3ForCausalLM(DecoderModel):
    """Qwen3 with its head, which is the table of embeddings where tie_word_embeddings is set."""

    config_class: ClassVar[Any] = Qwen3Config
    model_class: ClassVar[Any] = Qwen3Model
    tensor_rules = TENSOR_RULES
    adapter_groups = ADAPTER_GROUPS
    key_prefix = "model."
    ignored_keys = ("lm_head.weight",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.config = config
        self.model = self.model_class(config, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, rngs=rngs)
        )

    @property
    def decoder(self) -> Qwen3Model:
        """The part without a head, with the embeddings, the layers and the final norm."""
        found: Qwen3Model = self.model.decoder
        return found

    def logits(self, x: jax.Array) -> jax.Array:
        """Computes the logits of the next token, b t n, of the normed last state, b t c."""
        if self.lm_head is None:
            return matmul(x, self.decoder.embed_tokens.embedding[...].T)
        return self.lm_head(x)
