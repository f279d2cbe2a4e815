"""ControlNets of FLUX.1: an image steers the transformer between its blocks (Zhang et al. 2023).

Upstream: diffusers models/controlnets/controlnet_flux.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.autoencoders.latents import patchify
from diffusax.models.layers.inputs import check_map, check_tokens
from diffusax.models.layers.layers import Embedding, Linear
from diffusax.models.ops.rotation import Rotation
from diffusax.models.streaming import streamed
from diffusax.models.transformers.blocks import activations
from diffusax.models.transformers.configs import FluxControlNetConfig
from diffusax.models.transformers.flux import FluxBlocks
from diffusax.models.unet.controlnet import ConditioningEmbedding

Residuals = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
"""Residuals b t c for the transformer's blocks of either kind."""


class FluxControlNetModel(FluxBlocks):
    """Computes residuals for FLUX.1's transformer from its inputs and an image.

    Call `embed_condition` once for an image, and the model for every evaluation.
    """

    config_class = FluxControlNetConfig

    def __init__(self, config: FluxControlNetConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        c = config.width

        def outputs(count: int) -> nnx.List[Linear]:
            return nnx.List([Linear(c, c, rngs=rngs) for _ in range(count)])

        self.controlnet_blocks = outputs(config.num_layers)
        self.controlnet_single_blocks = outputs(config.num_single_layers)
        self.controlnet_mode_embedder = (
            None if config.num_mode is None else Embedding(config.num_mode, c, rngs=rngs)
        )
        width = config.conditioning_embedding_channels
        self.input_hint_block = (
            None if width is None else ConditioningEmbedding(3, (16,) * 4, width, rngs=rngs)
        )
        self.controlnet_x_embedder = Linear(config.in_channels, c, rngs=rngs)

    def embed_condition(self, cond: jax.Array) -> jax.Array:
        """Embeds control images: tokens of latents b t in_channels, or pixels b H W 3 -> b t c.

        Pixels are in [-1, 1].

        Raises:
            ValueError: cond has another shape.
        """
        if self.input_hint_block is not None:
            check_map("cond", cond, 3)
            maps = self.input_hint_block(cond)
            cond = patchify(maps, self.config.patch_size, channels_first=True)
        check_tokens("cond", cond, {self.config.in_channels})
        return self.controlnet_x_embedder(cond)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        pooled: jax.Array,
        rotation: Rotation,
        guidance: jax.Array | None = None,
        *,
        cond_embedding: jax.Array,
        mode: jax.Array | None = None,
    ) -> Residuals:
        """Returns the residuals before any scale, for blocks of either kind.

        Args:
            x: see `FluxTransformer2DModel`, as for the arguments up to guidance.
            timestep: b.
            context: b s joint_attention_dim.
            pooled: b pooled_projection_dim.
            rotation: (b or 1) (s + t) d/2.
            guidance: b, or None.
            cond_embedding: b t c, from `embed_condition`.
            mode: the kind of the image, b integers below num_mode.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        check_tokens("x", x, {self.config.in_channels})
        check_tokens("context", context, {self.config.joint_attention_dim})
        temb = self.time_text_embed(timestep, guidance, pooled)
        x = self.x_embedder(x) + cond_embedding
        context = self.context_embedder(context)
        if self.controlnet_mode_embedder is not None:
            if mode is None:
                raise ValueError("controlnet_mode must be given to a ControlNet with num_mode")
            kind = self.controlnet_mode_embedder(mode)[:, None]
            context = jnp.concatenate([kind, context], axis=1)
            # It stands where the text's tokens do.
            rotation = jax.tree.map(lambda r: jnp.concatenate([r[:, :1], r], axis=1), rotation)
        found, single, s = [], [], context.shape[1]
        blocks, singles = len(self.transformer_blocks), len(self.single_transformer_blocks)
        of_x, of_context, of_both = activations(temb, blocks, blocks, singles)
        each = zip(self.transformer_blocks, self.controlnet_blocks, zip(of_x, of_context))
        for block, output, pair in each:
            x, context = streamed(block)(x, context, pair, rotation)
            found.append(output(x))
        joined = jnp.concatenate([context, x], axis=1)
        rest = zip(self.single_transformer_blocks, self.controlnet_single_blocks, of_both)
        for one, output, active in rest:
            joined = streamed(one)(joined, active, rotation)
            single.append(output(joined[:, s:]))
        return tuple(found), tuple(single)

    def scaled_residuals(
        self, given: tuple[Any, ...], cond: jax.Array, mode: jax.Array | None, scale: jax.Array
    ) -> Residuals:
        """Returns the residuals for control images, see `embed_condition`, times a scale.

        given: the arguments of a call up to guidance.
        """
        embedding = self.embed_condition(cond)
        found = self(*given, cond_embedding=embedding, mode=mode)
        return jax.tree.map(lambda r: r * scale.astype(r.dtype), found)
