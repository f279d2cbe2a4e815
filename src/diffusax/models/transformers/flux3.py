"""FLUX.3's transformer: image, text and references, first apart, then in one stream (BFL 2026).

Upstream: diffusers models/transformers/transformer_flux3.py.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.modulation import add_gated, modulate
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import (
    TRANSFORMER_CACHES,
    Modulation,
    RotaryAttention,
    activations,
    rotation_at,
)
from diffusax.models.transformers.configs import Flux3Transformer2DConfig
from diffusax.models.transformers.flux2 import (
    FLUX2_RULES,
    Flux2FeedForward,
    image_ids,
    text_ids,
)
from diffusax.runtime.devices.mesh import Rules
from diffusax.runtime.devices.splitting import split_tokens

_EPS = 1e-6
_SCALE = np.array([1, 0.5, 0.5, 1])
"""How far neighbours are apart: rows and columns of an image by half of what words are."""

FLUX3_RULES: Rules = (*FLUX2_RULES, (r"(early|single)_stream_modulations\.\w+\.linear\.kernel", -1))
"""The tensor axis splits the heads, and the feed-forwards' inner channels."""


class Stream(NamedTuple):
    """Tokens b t c with the rotations of their positions, 1 t d/2 or b t d/2."""

    tokens: jax.Array
    rotation: Rotation


class Flux3Block(nnx.Module):
    """Attention and a feed-forward layer side by side, both of the same modulated tokens."""

    def __init__(self, config: Flux3Transformer2DConfig, *, rngs: nnx.Rngs):
        c, heads = config.width, config.num_attention_heads
        self.attn = RotaryAttention(c, heads=heads, qk_norm=True, eps=_EPS, rngs=rngs)
        self.ff = Flux2FeedForward(c, config.mlp_dim, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        modulation: Sequence[jax.Array],
        rotation: Rotation,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the next block's tokens, b t c.

        Args:
            x: b t c.
            modulation: shift, scale and gate, b 1 c or b t c each.
            rotation: the tokens' positions.
            lengths: the number of first tokens that all attend to, b; None for all of them.
        """
        shift, scale, gate = modulation
        y = modulate(x, shift, scale)
        return add_gated(x, gate, self.attn(y, rotation, lengths) + self.ff(y))


class Flux3Transformer2DModel(nnx.Module):
    """Predicts the flow from images to noise in latents, for a text and images to look at.

    The text and the images to look at stand at time zero. What the first blocks make of them is
    therefore the same at all times, except in a network with flow_map, see `read_conditions`.
    """

    config_class = Flux3Transformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = FLUX3_RULES
    adapter_groups = (
        r".*\.attn\.to_(q|k|v|out\.0)",
        r"(mode_blocks\.\w+|txt_mode_blocks|single_transformer_blocks)\.\d+\..*",
    )

    def __init__(self, config: Flux3Transformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, options = config.width, dict[str, Any](bias=False, rngs=rngs)
        widths = {"image": config.in_channels, "image_cond": config.cond_in_channels}

        def modulations() -> nnx.Dict[Modulation]:
            return nnx.Dict({name: Modulation(c, 3, **options) for name in (*widths, "txt")})

        def blocks(count: int) -> nnx.List[Flux3Block]:
            return nnx.List([Flux3Block(config, rngs=rngs) for _ in range(count)])

        channels = config.timestep_channels
        self.timestep_embedder = TimestepEmbedding(channels, c, **options)
        self.target_timestep_embedder = (
            TimestepEmbedding(channels, c, **options) if config.flow_map else None
        )
        self.early_stream_modulations = modulations()
        self.single_stream_modulations = modulations()
        self.x_embedders = nnx.Dict({k: Linear(n, c, **options) for k, n in widths.items()})
        self.context_embedder = Linear(config.joint_attention_dim, c, **options)
        self.mode_blocks = nnx.Dict({name: blocks(config.num_layers) for name in widths})
        self.txt_mode_blocks = blocks(config.num_layers)
        self.single_transformer_blocks = blocks(config.num_single_layers)
        self.norm_out = Modulation(c, 2, **options)
        self.proj_out = Linear(c, config.in_channels, **options)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        *,
        lengths: jax.Array | None = None,
        references: Sequence[jax.Array] = (),
        target: jax.Array | None = None,
        read: tuple[jax.Array, ...] | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c, each of which is a token.
            timestep: b, from 1 for noise to 0 for an image.
            context: the text's hidden states, b s joint_attention_dim.
            lengths: the number of them that are attended to, b; None for all.
            references: the latents of images to look at, b h' w' c each.
            target: b, the time that the step leads to, for a network with flow_map.
            read: the result of `read_conditions` for these arguments, which is computed without.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, is missing, or is one that the network lacks.
        """
        check_map("x", x, self.config.in_channels)
        check_rows(x, timestep=timestep, context=context)
        b, h, w, c = x.shape
        remat = gradient_checkpointing != "none"
        image = Stream(x.reshape(b, -1, c), self._rotation([image_ids(h, w)]))
        given = self._conditions(context, references)
        y = self.predict_tokens(image, timestep, given, lengths, target, read, remat=remat)
        return y.reshape(b, h, w, -1)

    def read_conditions(
        self,
        context: jax.Array,
        lengths: jax.Array | None = None,
        references: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, ...]:
        """Returns the tokens of a text and of images to look at after the blocks that read each.

        They are the same at all times in a network without flow_map: b s c, and b r c if there are
        images. Arguments as those of a call.

        Raises:
            ValueError: an input has another shape, or the network has flow_map.
        """
        return self._read(self._conditions(context, references), lengths, None)

    def predict_tokens(
        self,
        image: Stream,
        timestep: jax.Array,
        conditions: Sequence[Stream],
        lengths: jax.Array | None = None,
        target: jax.Array | None = None,
        read: tuple[jax.Array, ...] | None = None,
        *,
        remat: bool = False,
    ) -> jax.Array:
        """Returns the prediction for latents at any positions, b t c.

        Args:
            image: the latents, b t c.
            timestep: see a call.
            conditions: the text's hidden states, b s d, and the latents of all images to look at,
                b r c, if there are any.
            lengths: see a call.
            target: see a call.
            read: see a call.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: an input has another shape, is missing, or is one that the network lacks.
        """
        check_tokens("x", image.tokens, {self.config.in_channels})
        if read is None:
            read = self._read(conditions, lengths, target, remat=remat)
        ((early, single, last),) = activations(self._time(timestep, target), 3)
        x = split_tokens(self.x_embedders["image"](image.tokens))
        blocks: Any = self.mode_blocks["image"]
        x = self._early("image", blocks, x, early, image.rotation, None, remat=remat)

        # The text stands last, so that its padding is what no token attends to.
        text, *seen = read
        names = "image", *["image_cond"] * len(seen), "txt"
        parts = x, *seen, text
        rotations = image.rotation, *(s.rotation for s in reversed(conditions))
        rotation = jax.tree.map(lambda *one: jnp.concatenate(one, axis=1), *rotations)
        n, counts = x.shape[1], [part.shape[1] for part in parts]
        # One row of the time for each stream after the image's, as activations of one array.
        (zero,) = activations(self._time(jnp.zeros_like(timestep), target), len(seen) + 1)
        modulations: Any = self.single_stream_modulations
        each = [modulations[name](row) for name, row in zip(names, (single, *zero))]
        modulation = [by_stream(one, counts) for one in zip(*each)]
        attended = None if lengths is None else sum(counts[:-1]) + lengths
        joined = split_tokens(jnp.concatenate(parts, axis=1))

        def call(block: Any, joined: jax.Array) -> tuple[jax.Array]:
            return (rematerialized(block, remat)(joined, modulation, rotation, attended),)

        def content() -> jax.Array:
            return jnp.full(x.shape[0], sum(counts[:-1]))

        steps = [functools.partial(call, block) for block in self.single_transformer_blocks]
        joined = through_blocks(self, (joined,), steps, lambda joined: joined, content)
        scale, shift = self.norm_out(last)
        return self.proj_out(modulate(joined[:, :n], shift, scale))

    def _read(
        self,
        conditions: Sequence[Stream],
        lengths: jax.Array | None,
        target: jax.Array | None,
        *,
        remat: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Returns what the first blocks make of the text and of images to look at."""
        text, *images = conditions
        check_tokens("context", text.tokens, {self.config.joint_attention_dim})
        time = jnp.zeros(text.tokens.shape[0], jnp.float32)
        (active,) = activations(self._time(time, target), len(conditions))
        x = split_tokens(self.context_embedder(text.tokens))
        blocks: Any = self.txt_mode_blocks
        found = [
            self._early("txt", blocks, x, active[0], text.rotation, lengths, remat=remat),
        ]
        for seen in images:
            check_tokens("references", seen.tokens, {self.config.cond_in_channels})
            x = split_tokens(self.x_embedders["image_cond"](seen.tokens))
            blocks = self.mode_blocks["image_cond"]
            options = {"remat": remat}
            found.append(
                self._early("image_cond", blocks, x, active[1], seen.rotation, None, **options)
            )
        return tuple(found)

    def _early(
        self,
        name: str,
        blocks: Sequence[Flux3Block],
        x: jax.Array,
        active: jax.Array,
        rotation: Rotation,
        lengths: jax.Array | None,
        *,
        remat: bool,
    ) -> jax.Array:
        """Returns the tokens of one stream, b t c, after the blocks of its own."""
        modulation = self.early_stream_modulations[name](active)
        for block in blocks:
            x = rematerialized(block, remat)(x, modulation, rotation, lengths)
        return x

    def _time(self, timestep: jax.Array, target: jax.Array | None) -> jax.Array:
        """Returns the embedded time, b c. timestep, target: b."""
        channels, second = self.config.timestep_channels, self.target_timestep_embedder
        if (target is None) != (second is None):
            raise ValueError(
                "target, the time that a step leads to, must be given to a transformer with "
                f"flow_map=True and to no other (flow_map is {self.config.flow_map})"
            )
        temb = self.timestep_embedder(timestep_embedding(1000 * timestep, channels))
        if second is None or target is None:
            return temb
        return temb + second(timestep_embedding(1000 * target, channels))

    def _conditions(self, context: jax.Array, references: Sequence[jax.Array]) -> list[Stream]:
        """Returns the text and the images to look at, if any, with their positions."""
        found = [Stream(context, self._rotation([text_ids(context.shape[1])]))]
        if references:
            tokens = [y.reshape(y.shape[0], -1, y.shape[-1]) for y in references]
            ids = [
                image_ids(*y.shape[1:3]) - [0, 0, 0, i] for i, y in enumerate(references, start=1)
            ]
            found.append(Stream(jnp.concatenate(tokens, axis=1), self._rotation(ids)))
        return found

    def _rotation(self, ids: Sequence[np.ndarray]) -> Rotation:
        """Returns the rotations of tokens at integer positions, 1 t d/2. ids: t 4 each."""
        places = np.concatenate(ids) * _SCALE
        return rotation_at(places, self.config.axes_dims_rope, self.config.rope_theta)


def by_stream(parts: Sequence[jax.Array], counts: Sequence[int]) -> jax.Array:
    """Returns b t c with each part, b 1 c, for so many tokens that follow each other.

    It is a choice by the token's index, which fuses with what reads it, and no array in memory.
    """
    index = jnp.arange(sum(counts))[:, None]
    ends = list(itertools.accumulate(counts))
    y = parts[-1]
    for part, end in reversed(list(zip(parts[:-1], ends))):
        y = jnp.where(index < end, part, y)
    return y
