"""Krea 2's transformer: a text and an image in one stream (Krea AI 2026).

Upstream: diffusers models/transformers/transformer_krea2.py. The image's tokens come first here,
and those of the text after them, so that padding stands at the end of all. Between them may stand
those of images to look at, see `models.transformers.references`.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import zeros

from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import CentredRMSNorm, Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.activations import approximate_gelu
from diffusax.models.ops.modulation import add_gated, shifted
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import TRANSFORMER_CACHES, rotation_at
from diffusax.models.transformers.configs import Krea2Transformer2DConfig
from diffusax.models.transformers.krea2_text import (
    Krea2Attention,
    Krea2TextFusion,
    Krea2TextProjection,
    SwiGLU,
)
from diffusax.models.transformers.references import (
    JOINT,
    KeysValues,
    Timed,
    between,
    rows_of,
)
from diffusax.runtime.devices.mesh import Rule, Rules
from diffusax.runtime.devices.splitting import gather_channels, split_tokens

PATCH = 2
KREA2_RULES: Rules = (
    Rule(r"to_(q|gate)\.kernel", -1, "heads"),
    Rule(r"to_[kv]\.kernel", -1, "key_heads"),
    Rule(r"to_out\.0\.kernel", -2, "heads"),
    (r"ff\.(gate|up)\.kernel", -1),
    (r"ff\.down\.kernel", -2),
    (r"time_mod_proj\.(kernel|bias)", -1),
)
"""The tensor axis splits the heads, the feed-forward's inner channels, and the modulations'."""


class Krea2TimestepEmbedding(nnx.Module):
    """Sinusoids, linear, approximate GELU, linear. timesteps: b, from 1 to 0 -> b c."""

    def __init__(self, width: int, c: int, *, rngs: nnx.Rngs):
        self.width = width
        self.linear_1 = Linear(width, c, rngs=rngs)
        self.linear_2 = Linear(c, c, rngs=rngs)

    def __call__(self, timesteps: jax.Array) -> jax.Array:
        sinusoids = timestep_embedding(timesteps.astype(jnp.float32) * 1000, self.width)
        return self.linear_2(approximate_gelu(self.linear_1(sinusoids)))


class Krea2TransformerBlock(nnx.Module):
    """Attention and feed-forward, shifted, scaled and gated as in all blocks but for a table."""

    def __init__(self, config: Krea2Transformer2DConfig, *, rngs: nnx.Rngs):
        c, eps = config.width, config.norm_eps
        self.scale_shift_table = _table(6, c, rngs)
        self.norm1 = CentredRMSNorm(c, eps=eps, rngs=rngs)
        self.norm2 = CentredRMSNorm(c, eps=eps, rngs=rngs)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.attn = Krea2Attention(c, heads=heads, key_heads=key_heads, eps=eps, rngs=rngs)
        self.ff = SwiGLU(c, config.intermediate_size, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        modulation: Timed,
        lengths: jax.Array | None,
        rotation: Rotation,
        before: KeysValues | None = None,
    ) -> jax.Array:
        """Returns the next block's tokens, b t c.

        Args:
            x: b t c.
            modulation: what all blocks have in common, b 6 c.
            lengths: how many of the first tokens are attended to, b; None for all.
            rotation: the tokens' positions.
            before: the keys and values of images to look at that were read before.
        """
        return self.with_keys(x, modulation, lengths, rotation, before)[0]

    def with_keys(
        self,
        x: jax.Array,
        modulation: Timed,
        lengths: jax.Array | None,
        rotation: Rotation,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the next block's tokens, and this one's keys and values; see a call."""
        rows = rows_of(modulation, lambda one: _rows(one, self.scale_shift_table))
        scale1, shift1, gate1, scale2, shift2, gate2 = rows
        h, read = self.attn.with_keys(
            shifted(self.norm1(x), shift1, scale1), lengths, rotation, before=before
        )
        x = add_gated(x, gate1, h)
        return add_gated(x, gate2, self.ff(shifted(self.norm2(x), shift2, scale2))), read


class Krea2FinalLayer(nnx.Module):
    """A norm, shifted and scaled by the time, and a linear layer. x: b t c, temb: b c -> b t e."""

    def __init__(self, c: int, e: int, *, eps: float, rngs: nnx.Rngs):
        self.scale_shift_table = _table(2, c, rngs)
        self.norm = CentredRMSNorm(c, eps=eps, rngs=rngs)
        self.linear = Linear(c, e, rngs=rngs)

    def __call__(self, x: jax.Array, temb: jax.Array) -> jax.Array:
        scale, shift = _rows(temb[:, None], self.scale_shift_table)
        return self.linear(shifted(self.norm(x), shift, scale))


class Krea2Transformer2DModel(nnx.Module):
    """Predicts the flow from images to noise in latents, for texts of any length."""

    config_class = Krea2Transformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = KREA2_RULES
    adapter_groups = (
        r"transformer_blocks\.\d+\.attn\.to_(q|k|v|out\.0)",
        r"transformer_blocks\..*",
    )

    def __init__(self, config: Krea2Transformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, eps = config.width, config.norm_eps
        self.img_in = Linear(config.in_channels, c, rngs=rngs)
        self.time_embed = Krea2TimestepEmbedding(config.timestep_embed_dim, c, rngs=rngs)
        self.time_mod_proj = Linear(c, 6 * c, rngs=rngs)
        self.text_fusion = Krea2TextFusion(config, rngs=rngs)
        self.txt_in = Krea2TextProjection(config.text_hidden_dim, c, eps=eps, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [Krea2TransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_layer = Krea2FinalLayer(c, config.in_channels, eps=eps, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        text: jax.Array,
        lengths: jax.Array,
        *,
        fused: bool = False,
        references: Sequence[jax.Array] = (),
        prefix: tuple[KeysValues, ...] | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c.
            timestep: b, from 1 for noise to 0 for an image.
            text: the text encoder's hidden states, b s l d, l of each token, or with `fused` the
                result of `fuse_text`, b s c.
            lengths: the number of the text's tokens that are not padding, b.
            fused: see text.
            references: the latents of images to look at, b h' w' c each.
            prefix: what `prefix` returned for images to look at, which are left out then.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape.
        """
        check_map("x", x, self.config.in_channels // PATCH**2)
        check_rows(x, timestep=timestep, text=text, lengths=lengths)
        remat = gradient_checkpointing != "none"
        if not fused:
            text = self.fuse_text(text, lengths, remat=remat)
        joint = list(references) if self.config.references_layout == JOINT else []
        if references and not joint and prefix is None:
            prefix = self.prefix(references, remat=remat)
        tokens, ids = self._tokens([x, *(y.astype(x.dtype) for y in joint)], 0)
        ids = np.concatenate([ids, np.zeros((text.shape[1], 3), np.int32)])
        rotation = self._rotation(ids)
        count = (x.shape[1] // PATCH) * (x.shape[2] // PATCH)
        y = self.predict_tokens(
            tokens,
            timestep,
            text,
            lengths,
            rotation,
            clean=tokens.shape[1] - count,
            prefix=prefix,
            remat=remat,
        )
        return unpatchify(y, PATCH, *x.shape[1:3], channels_first=True)

    def prefix(
        self, references: Sequence[jax.Array], *, remat: bool = False
    ) -> tuple[KeysValues, ...]:
        """Returns the keys and values, in each block, of images to look at that see each other
        alone, at time zero.

        Args:
            references: the latents of at least one image, b h w c each.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: one has another number of channels.
        """
        tokens, ids = self._tokens(references, 1)
        rotation, read = self._rotation(ids), list[KeysValues]()
        x = split_tokens(self.img_in(tokens))
        # A row for each image, as adapters have weights of their own for each.
        _, modulation = self._modulation(jnp.zeros(x.shape[0], jnp.float32))
        for block in self.transformer_blocks:
            x, own = rematerialized(block.with_keys, remat)(x, modulation, None, rotation)
            read.append(own)
        return tuple(read)

    def _tokens(self, maps: Sequence[jax.Array], frame: int) -> tuple[jax.Array, np.ndarray]:
        """Returns the tokens of latents, b t c, and their positions, t 3, from a frame on.

        The image that is generated is frame 0, and those to look at are 1, 2 and so on, as in
        ai-toolkit (krea2/src/pipeline.py, pack_ref_latents).
        """
        tokens, ids = list[jax.Array](), list[np.ndarray]()
        for i, y in enumerate(maps, frame):
            check_map("references" if i else "x", y, self.config.in_channels // PATCH**2)
            tokens.append(patchify(y, PATCH, channels_first=True))
            ids.append(image_ids(y.shape[1] // PATCH, y.shape[2] // PATCH, i))
        if len(tokens) == 1:
            return tokens[0], ids[0]
        return jnp.concatenate(tokens, axis=1), np.concatenate(ids)

    def _rotation(self, ids: np.ndarray) -> Rotation:
        return rotation_at(ids, self.config.axes_dims_rope, self.config.rope_theta)

    def _modulation(self, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the embedded time, b c, and what all blocks have in common, b 6 c."""
        temb = self.time_embed(timestep)
        # A row for each image is little to gather.
        modulation = gather_channels(self.time_mod_proj(approximate_gelu(temb)))
        return temb, modulation.reshape(timestep.shape[0], 6, -1)

    def fuse_text(self, text: jax.Array, lengths: jax.Array, *, remat: bool = False) -> jax.Array:
        """Returns what the blocks read of a text, which does not depend on the image or the time.

        Args:
            text: the text encoder's hidden states, b s l d, l of each token.
            lengths: the number of tokens that are not padding, b.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: the text has another shape.
        """
        wanted = self.config.num_text_layers, self.config.text_hidden_dim
        if text.ndim != 4 or text.shape[2:] != wanted:
            raise ValueError(
                f"text must have shape (batch, tokens, {wanted[0]}, {wanted[1]}) (got {text.dtype} "
                f"of shape {text.shape})"
            )
        # What stands in padding is never attended to, but must be finite.
        seen = jnp.arange(text.shape[1]) < lengths[:, None]
        text = jnp.where(seen[..., None, None], text, 0)
        return self.txt_in(self.text_fusion(text, lengths, remat=remat))

    def predict_tokens(
        self,
        x: jax.Array,
        timestep: jax.Array,
        text: jax.Array,
        lengths: jax.Array,
        rotation: Rotation,
        *,
        clean: int = 0,
        prefix: tuple[KeysValues, ...] | None = None,
        remat: bool = False,
    ) -> jax.Array:
        """Returns the prediction for latents at any positions, b t c, but not for clean ones.

        Args:
            x: b t c.
            timestep: see a call.
            text: the result of `fuse_text`, b s d.
            lengths: see a call.
            rotation: the positions of x's tokens, then of the text's, b (t + s) d/2, or
                1 (t + s) d/2.
            clean: the number of x's last tokens that are of images to look at.
            prefix: see a call.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: an input has another shape.
        """
        check_tokens("x", x, {self.config.in_channels})
        t = x.shape[1]
        temb, modulation = self._modulation(timestep)
        timed: Timed = modulation
        if clean:
            still = self._modulation(jnp.zeros_like(timestep))[1]
            timed = between(modulation, still, t - clean, clean, text.shape[1])
        image = split_tokens(self.img_in(x))
        text = split_tokens(text.astype(image.dtype))
        joined = split_tokens(jnp.concatenate([image, text], axis=1))

        def call(block: Any, before: Any, joined: jax.Array) -> tuple[jax.Array]:
            given = joined, timed, t + lengths, rotation, before
            return (rematerialized(block, remat)(*given),)

        def seen() -> jax.Array:
            return t + lengths

        pairs = zip(self.transformer_blocks, prefix or itertools.repeat(None))
        steps = [functools.partial(call, *pair) for pair in pairs]
        joined = through_blocks(self, (joined,), steps, lambda joined: joined, seen)
        return self.final_layer(joined[:, : t - clean], temb)


def image_ids(rows: int, columns: int, frame: int = 0) -> np.ndarray:
    """Returns the positions of an image's tokens on the three axes, (rows columns) 3.

    frame: zero for the image that is generated, and 1, 2 and so on for those that it looks at.
    """
    index = np.arange(rows * columns)
    return np.stack([0 * index + frame, index // columns, index % columns], axis=1)


def _table(count: int, c: int, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    return nnx.Param(shaped(zeros)(rngs.params(), (count, c), jnp.float32))


def _rows(modulation: jax.Array, table: Any) -> list[jax.Array]:
    """Returns the rows of a modulation with its table added to it, b 1 c each."""
    rows = modulation + table[...]
    return [rows[:, i, None] for i in range(rows.shape[1])]
