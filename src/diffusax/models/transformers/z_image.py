"""Z-Image's transformer: image and caption tokens in one stream (Z-Image Team 2025).

Behind the image may stand others to look at, see `models.transformers.references`.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal

from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import Linear, RMSNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.matmul import apart
from diffusax.models.ops.modulation import add_gated, scaled_rms_norm
from diffusax.models.ops.norms import normalized
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    RotaryAttention,
    SwiGLU,
    rotary_positions,
)
from diffusax.models.transformers.configs import ZImageTransformer2DConfig
from diffusax.models.transformers.references import (
    JOINT,
    KeysValues,
    Timed,
    between,
    rows_of,
)
from diffusax.runtime.devices.splitting import split_tokens

_PATCH = 2
_NAME = f"{_PATCH}-1"
"""The checkpoint's name for layers that are for patches of 2x2 in one frame."""
_MODULATION = 256
_TIMES = 256
_TIME_HIDDEN = 1024
_MULTIPLE = 32
"""Both sequences are filled up to a multiple of this with learned tokens, which are attended to."""


class TimestepEmbedder(nnx.Module):
    """Sinusoids, linear, SiLU, linear. timesteps: b -> b d."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        # The checkpoint numbers the layers 0 and 2; 1 is the activation.
        hidden = Linear(_TIMES, _TIME_HIDDEN, rngs=rngs)
        self.mlp: Any = nnx.List([hidden, None, Linear(_TIME_HIDDEN, d, rngs=rngs)])

    def __call__(self, timesteps: jax.Array) -> jax.Array:
        return self.mlp[2](nnx.silu(self.mlp[0](timestep_embedding(timesteps, _TIMES))))


class ZImageTransformerBlock(nnx.Module):
    """Attention and feed-forward between RMS norms, scaled and gated by the time. x: b t c.

    Without `modulated` the time plays no part.
    """

    def __init__(self, config: ZImageTransformer2DConfig, *, modulated: bool, rngs: nnx.Rngs):
        c, eps = config.dim, config.norm_eps
        self.attention = RotaryAttention(
            c, heads=config.n_heads, qk_norm=config.qk_norm, eps=1e-5, rngs=rngs
        )
        self.feed_forward = SwiGLU(c, int(c / 3 * 8), rngs=rngs)
        self.attention_norm1 = RMSNorm(c, eps=eps, rngs=rngs)
        self.ffn_norm1 = RMSNorm(c, eps=eps, rngs=rngs)
        self.attention_norm2 = RMSNorm(c, eps=eps, rngs=rngs)
        self.ffn_norm2 = RMSNorm(c, eps=eps, rngs=rngs)
        self.adaLN_modulation = (
            nnx.List([Linear(min(c, _MODULATION), 4 * c, rngs=rngs)]) if modulated else None
        )

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        lengths: jax.Array | None,
        temb: Timed | None = None,
        before: KeysValues | None = None,
    ) -> jax.Array:
        """Returns the next layer's tokens, b t c.

        Args:
            x: b t c.
            rotation: the tokens' positions.
            lengths: the number of tokens that are attended to, b; None for all.
            temb: the embedded time, b d, for a block with modulation.
            before: the keys and values of images to look at that were read before.
        """
        return self.with_keys(x, rotation, lengths, temb, before)[0]

    def with_keys(
        self,
        x: jax.Array,
        rotation: Rotation,
        lengths: jax.Array | None,
        temb: Timed | None = None,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the next layer's tokens, and this one's keys and values; see a call."""
        scale1, gate1, scale2, gate2 = self._modulation(temb)
        given = scaled_rms_norm(self.attention_norm1, x, scale1)
        h, read = self.attention.with_keys(given, rotation, lengths, before)
        x = add_gated(x, gate1, self.attention_norm2(h))
        h = self.feed_forward(scaled_rms_norm(self.ffn_norm1, x, scale2))
        return add_gated(x, gate2, self.ffn_norm2(h)), read

    def _modulation(self, temb: Timed | None) -> Sequence[Any]:
        if self.adaLN_modulation is None or temb is None:
            return 1, 1, 1, 1
        linear = self.adaLN_modulation[0]

        def rows(one: jax.Array) -> Sequence[jax.Array]:
            parts = jnp.split(linear(one)[:, None], 4, axis=-1)
            return 1 + parts[0], jnp.tanh(parts[1]), 1 + parts[2], jnp.tanh(parts[3])

        return rows_of(temb, rows)


class FinalLayer(nnx.Module):
    """A layer norm scaled by the time, and a linear layer. x: b t c, temb: b d -> b t e."""

    def __init__(self, c: int, e: int, *, rngs: nnx.Rngs):
        self.linear = Linear(c, e, rngs=rngs)
        # The checkpoint has the layer after an activation, which is number 0.
        self.adaLN_modulation: Any = nnx.List([None, Linear(min(c, _MODULATION), c, rngs=rngs)])

    def __call__(self, x: jax.Array, temb: jax.Array) -> jax.Array:
        scale = 1 + self.adaLN_modulation[1](nnx.silu(temb))
        return self.linear(normalized(x, eps=1e-6) * scale[:, None])


class ZImageTransformer2DModel(nnx.Module):
    """Predicts the flow from noise to images in latents, for captions of any length.

    Two stacks refine the image's and the caption's tokens by themselves, then one attends to both.
    Upstream: diffusers models/transformers/transformer_z_image.py.
    """

    config_class = ZImageTransformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = TENSOR_RULES
    adapter_groups = (
        r".*\.attention\.to_(q|k|v|out\.0)",
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attention|feed_forward)\..*",
    )

    def __init__(self, config: ZImageTransformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, channels = config.dim, config.in_channels * _PATCH**2

        def blocks(count: int, modulated: bool = True) -> nnx.List[ZImageTransformerBlock]:
            made = (
                ZImageTransformerBlock(config, modulated=modulated, rngs=rngs) for _ in range(count)
            )
            return nnx.List(list(made))

        def token() -> nnx.Param[jax.Array]:
            return nnx.Param(shaped(normal(0.02))(rngs.params(), (1, c), jnp.float32))

        self.all_x_embedder = nnx.Dict({_NAME: Linear(channels, c, rngs=rngs)})
        self.all_final_layer = nnx.Dict({_NAME: FinalLayer(c, channels, rngs=rngs)})
        self.noise_refiner = blocks(config.n_refiner_layers)
        self.context_refiner = blocks(config.n_refiner_layers, modulated=False)
        self.t_embedder = TimestepEmbedder(min(c, _MODULATION), rngs=rngs)
        self.cap_embedder: Any = nnx.List(
            [
                RMSNorm(config.cap_feat_dim, eps=config.norm_eps, rngs=rngs),
                Linear(config.cap_feat_dim, c, rngs=rngs),
            ]
        )
        self.x_pad_token, self.cap_pad_token = token(), token()
        self.layers = blocks(config.n_layers)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        caption: jax.Array,
        lengths: jax.Array,
        *,
        refined: bool = False,
        references: Sequence[jax.Array] = (),
        prefix: tuple[KeysValues, ...] | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c.
            timestep: b, from 0 for noise to 1 for an image.
            caption: the text encoder's hidden states, b s cap_feat_dim, or with `refined` the
                result of `refine_caption`, b s dim.
            lengths: the number of the caption's tokens that are not padding, b.
            refined: see caption.
            references: the latents of images to look at, b h' w' c each.
            prefix: what `prefix` returned for images to look at, which are left out then.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, or needs more positions than there are.
        """
        check_map("x", x, self.config.in_channels)
        check_rows(x, caption=caption, lengths=lengths)
        remat = gradient_checkpointing != "none"
        if not refined:
            caption = self.refine_caption(caption, lengths, remat=remat)
        joint = list(references) if self.config.references_layout == JOINT else []
        if references and not joint and prefix is None:
            prefix = self.prefix(references, lengths, caption.shape[1], remat=remat)
        final_layer: Any = self.all_final_layer[_NAME]
        temb = self.t_embedder(timestep * self.config.t_scale)
        known, s = filled_lengths(lengths), caption.shape[1]
        maps = [x, *(y.astype(x.dtype) for y in joint)]
        image, image_rotation = self._images(maps, known, s, 0)
        n = (x.shape[1] // _PATCH) * (x.shape[2] // _PATCH)
        tembs = iter(self._times(temb, _up(n), image.shape[1] - _up(n), s))
        before = iter(prefix or itertools.repeat(None))
        for block in self.noise_refiner:
            given = image, image_rotation, None, next(tembs), next(before)
            image = rematerialized(block, remat)(*given)

        joined = split_tokens(jnp.concatenate([image, caption], axis=1))
        rotations = image_rotation, self._caption_rotation(*caption.shape[:2])
        rotation = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *rotations)

        def attended() -> jax.Array:
            return image.shape[1] + known

        def call(block: Any, temb: Any, before: Any, joined: jax.Array) -> tuple[jax.Array]:
            given = joined, rotation, attended(), temb, before
            return (rematerialized(block, remat)(*given),)

        steps = [functools.partial(call, *own) for own in zip(self.layers, tembs, before)]
        joined = through_blocks(self, (joined,), steps, lambda joined: joined, attended)
        y = final_layer(joined[:, :n], temb)
        return unpatchify(y, _PATCH, *x.shape[1:3])

    def prefix(
        self,
        references: Sequence[jax.Array],
        lengths: jax.Array,
        length: int,
        *,
        remat: bool = False,
    ) -> tuple[KeysValues, ...]:
        """Returns the keys and values, in each block that images go through, of images to look at
        that see each other alone, at time one.

        Args:
            references: the latents of at least one image, b h w c each.
            lengths: the number of the caption's tokens that are not padding, b: images stand after
                their caption.
            length: the most of them, for which there must be positions.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: one has another number of channels, or needs more positions than there are.
        """
        blocks = *self.noise_refiner, *self.layers
        x, rotation = self._images(references, filled_lengths(lengths), _up(length), 1)
        read = list[KeysValues]()
        for block, temb in zip(blocks, self._still(len(blocks), x.shape[0])):
            x, own = rematerialized(block.with_keys, remat)(x, rotation, None, temb)
            read.append(own)
        return tuple(read)

    def _images(
        self, maps: Sequence[jax.Array], known: jax.Array, s: int, frame: int
    ) -> tuple[jax.Array, Rotation]:
        """Returns the tokens of latents, each filled up to a multiple of 32, and their positions.

        Args:
            maps: b h w c each.
            known: the caption's tokens, b.
            s: the most of them.
            frame: the number of the first image: the one that is generated stands after its
                caption, and those to look at one, two and so on after it. No other code has images
                to look at in a plain Z-Image; in diffusers' Omni each follows a caption.
        """
        embedder: Any = self.all_x_embedder[_NAME]
        parts, rotations = list[jax.Array](), list[Rotation]()
        for i, y in enumerate(maps, frame):
            check_map("references" if i else "x", y, self.config.in_channels)
            rows, columns = y.shape[1] // _PATCH, y.shape[2] // _PATCH
            self._check_positions(s + i, rows, columns)
            tokens = embedder(patchify(y, _PATCH))
            full = jnp.full(y.shape[0], tokens.shape[1])
            parts.append(_filled(tokens, full, self.x_pad_token[...]))
            rotations.append(self._image_rotation(known + i, rows, columns, s + i))
        if len(parts) == 1:
            return split_tokens(parts[0]), rotations[0]
        rotation = jax.tree.map(lambda *own: jnp.concatenate(own, axis=1), *rotations)
        return split_tokens(jnp.concatenate(parts, axis=1)), rotation

    def _times(self, temb: jax.Array, image: int, clean: int, text: int) -> Sequence[Timed]:
        """Returns the embedded time for each block that images go through.

        Args:
            temb: that of the image that is generated and of its caption, b d.
            image: the tokens of this image.
            clean: those after them that are of images to look at.
            text: those of the caption.
        """
        refiners, layers = len(self.noise_refiner), len(self.layers)
        moving = apart(temb, refiners + layers)
        if not clean:
            return moving
        still = self._still(refiners + layers, temb.shape[0])
        after = [0] * refiners + [text] * layers
        return [between(a, b, image, clean, n) for a, b, n in zip(moving, still, after)]

    def _still(self, count: int, b: int) -> Sequence[jax.Array]:
        """Returns the embedded time of a clean image for so many blocks, b d each.

        It has a row for each image, as adapters have weights of their own for each.
        """
        return apart(self.t_embedder(jnp.full(b, self.config.t_scale, jnp.float32)), count)

    def refine_caption(
        self, caption: jax.Array, lengths: jax.Array, *, remat: bool = False
    ) -> jax.Array:
        """Embeds a caption, which does not depend on the image or the time.

        Args:
            caption: the text encoder's hidden states, b s cap_feat_dim.
            lengths: the number of them that are not padding, b.
            remat: whether gradients compute the activations of blocks again.

        Returns:
            b s' dim, where s' is s filled up to a multiple of 32.
        """
        check_tokens("caption", caption, {self.config.cap_feat_dim})
        norm, linear = self.cap_embedder[0], self.cap_embedder[1]
        # What stands in padding is never attended to, but must be finite.
        seen = jnp.arange(caption.shape[1]) < lengths[:, None]
        tokens = linear(norm(jnp.where(seen[..., None], caption, 0)))
        tokens = _filled(tokens, lengths, self.cap_pad_token[...])
        rotation = self._caption_rotation(*tokens.shape[:2])
        for block in self.context_refiner:
            tokens = rematerialized(block, remat)(tokens, rotation, filled_lengths(lengths))
        return tokens

    def _caption_rotation(self, b: int, s: int) -> Rotation:
        """Returns the rotations of a caption's tokens, whose positions count from 1, b s d/2."""
        ids = jnp.broadcast_to(1 + jnp.arange(s), (b, s))
        return self._rotation((ids, jnp.zeros_like(ids), jnp.zeros_like(ids)), (s + 1, 1, 1))

    def _image_rotation(self, known: jax.Array, rows: int, columns: int, s: int) -> Rotation:
        """Returns the rotations of an image's tokens, and of those that fill it up, b t d/2.

        The image stands after its caption of `known` tokens, b; what fills it up stands at zero.
        """
        index = jnp.arange(_up(rows * columns))
        ids = known[:, None] + 1, index // columns, index % columns
        shape = known.shape[0], len(index)
        placed = [jnp.broadcast_to(jnp.where(index < rows * columns, i, 0), shape) for i in ids]
        return self._rotation(placed, (s + 2, rows, columns))

    def _rotation(self, ids: Any, lengths: tuple[int, int, int]) -> Rotation:
        return rotary_positions(ids, lengths, self.config.axes_dims, self.config.rope_theta)

    def _check_positions(self, s: int, rows: int, columns: int) -> None:
        names = ("tokens of the caption", "rows of patches", "columns of patches")
        sizes = zip(names, (s + 2, rows, columns), self.config.axes_lens)
        for name, size, limit in sizes:
            if size > limit:
                raise ValueError(
                    f"{size} {name} are more than axes_lens={self.config.axes_lens} allows; use a "
                    "shorter prompt or a smaller image"
                )


def filled_lengths(lengths: jax.Array) -> jax.Array:
    """Returns the lengths of captions with the learned tokens that fill them up to 32s."""
    return jnp.maximum(_MULTIPLE, _up(lengths))


def _up(n: Any) -> Any:
    return -(-n // _MULTIPLE) * _MULTIPLE


def _filled(x: jax.Array, lengths: jax.Array, token: jax.Array) -> jax.Array:
    """Puts a learned token after the first `lengths` tokens, b, up to a multiple of 32."""
    s = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, _up(s) - s), (0, 0)))
    known = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(known[..., None], x, token.astype(x.dtype))
