"""The conditional UNet of Stable Diffusion 1.x, 2.x and SDXL."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.boundary.config import EMA_OPTIONS, Channels, Size
from diffusax.models.adapters.freeu import of_level
from diffusax.models.caches.deep import deep_map
from diffusax.models.layers import resnet, transformer
from diffusax.models.layers.inputs import check_residuals
from diffusax.models.layers.layers import Conv2d, GroupNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.activations import silu
from diffusax.models.unet.unet_blocks import UpBlock
from diffusax.models.unet.unet_encoder import (
    Level,
    PerLayer,
    UNetEncoder,
    UNetEncoderConfig,
    make_level,
    ranges_by_level,
    resnet_options,
    skip_widths,
)

Kernel = Literal[1, 3, 5, 7]


@dataclasses.dataclass(frozen=True)
class UNet2DConditionConfig(UNetEncoderConfig):
    """The options of diffusers' UNet2DConditionModel that Stable Diffusion checkpoints use."""

    class_name: ClassVar[str] = "UNet2DConditionModel"
    fixed: ClassVar[dict[str, Any]] = {
        "act_fn": ("silu", "swish"),
        "addition_embed_type_num_heads": 64,
        "attention_type": "default",
        "cross_attention_norm": None,
        "dropout": 0.0,
        "dual_cross_attention": False,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "mid_block_only_cross_attention": (None, False),
        "num_attention_heads": None,
        "resnet_out_scale_factor": 1.0,
        "resnet_skip_time_act": False,
        "time_embedding_act_fn": None,
        "time_embedding_type": "positional",
        "timestep_post_act": None,
    }
    ignored: ClassVar[frozenset[str]] = EMA_OPTIONS

    sample_size: Size | None = None
    out_channels: Channels = 4
    center_input_sample: bool = False
    up_block_types: tuple[Literal["CrossAttnUpBlock2D", "UpBlock2D"], ...] = (
        "UpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
    )
    reverse_transformer_layers_per_block: tuple[PerLayer, ...] | None = None
    class_embeddings_concat: bool = False
    time_embedding_dim: Channels | None = None
    time_cond_proj_dim: Channels | None = None
    conv_in_kernel: Kernel = 3
    conv_out_kernel: Kernel = 3

    def count_blocks(self) -> int:
        """Counts like UNetEncoderConfig, and adds the blocks on the way up.

        Raises:
            ValueError: the way up does not have as many levels as the way down.
        """
        levels = len(self.block_out_channels)
        if len(self.up_block_types) != levels:
            raise ValueError(
                "up_block_types and block_out_channels must have one entry per level "
                f"(got {len(self.up_block_types)} and {levels})"
            )
        return super().count_blocks() + sum(
            len(level.resnets) + sum(o["layers"] for o in level.transformers)
            for level in up_levels(self)
        )


def up_levels(config: UNet2DConditionConfig) -> list[Level]:
    """Returns the levels on the way up, the smallest maps first."""
    widths, levels = config.block_out_channels, len(config.block_out_channels)
    counts = config.per_level("layers_per_block")
    if config.reverse_transformer_layers_per_block is None:
        depths = config.per_level("transformer_layers_per_block")[::-1]
    else:
        depths = config.per_level("reverse_transformer_layers_per_block")
    result, below = [], widths[-1]
    for i, block_type in enumerate(config.up_block_types):
        level = levels - 1 - i
        d, skip, count = widths[level], widths[max(level - 1, 0)], counts[level] + 1
        resnets = [
            ((below if j == 0 else d) + (skip if j == count - 1 else d), d) for j in range(count)
        ]
        attends = block_type == "CrossAttnUpBlock2D"
        result.append(make_level(config, level, resnets, depths[i], attends))
        below = d
    return result


class UNet2DConditionModel(UNetEncoder):
    """Predicts the noise (or v, or the sample) in latents (Rombach et al. 2022).

    Upstream: diffusers models/unets/unet_2d_condition.py.
    """

    config_class = UNet2DConditionConfig
    step_caches = ("DeepCacheConfig",)
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = (*transformer.TENSOR_RULES, *resnet.TENSOR_RULES)
    adapter_groups = transformer.ADAPTER_GROUPS

    def __init__(self, config: UNet2DConditionConfig, *, rngs: nnx.Rngs):
        width = config.block_out_channels[0]
        time_dim = config.time_embedding_dim or 4 * width
        super().__init__(
            config,
            time_dim=time_dim,
            cond_dim=config.time_cond_proj_dim,
            concat_class=config.class_embeddings_concat,
            conv_in_kernel=config.conv_in_kernel,
            rngs=rngs,
        )
        resnet = resnet_options(config, time_dim * 2 if self.concat_class else time_dim)
        levels = up_levels(config)
        self.up_blocks = nnx.List(
            [
                UpBlock(
                    level.resnets,
                    level.transformers,
                    resnet,
                    upsample=i < len(levels) - 1,
                    rngs=rngs,
                )
                for i, level in enumerate(levels)
            ]
        )
        self.conv_norm_out = GroupNorm(
            width, config.norm_num_groups, eps=config.norm_eps, rngs=rngs
        )
        self.conv_out = Conv2d(width, config.out_channels, config.conv_out_kernel, rngs=rngs)

    def __call__(
        self,
        sample: jax.Array,
        timestep: jax.Array,
        encoder_hidden_states: jax.Array,
        *,
        class_labels: jax.Array | None = None,
        timestep_cond: jax.Array | None = None,
        added_cond: dict[str, jax.Array] | None = None,
        down_block_additional_residuals: Sequence[jax.Array] | None = None,
        mid_block_additional_residual: jax.Array | None = None,
        down_intrablock_additional_residuals: Sequence[jax.Array] | None = None,
        freeu: jax.Array | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w out_channels, in the dtype of the parameters.

        Args:
            sample: b h w in_channels.
            timestep: a scalar or b.
            encoder_hidden_states: b s cross_attention_dim.
            class_labels: b (or b c, for the projection types), where the config has them.
            timestep_cond: b time_cond_proj_dim, the embedded guidance scale of distilled models.
            added_cond: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            down_block_additional_residuals: a ControlNet's residual for each skip connection.
            mid_block_additional_residual: a ControlNet's residual after the middle block.
            down_intrablock_additional_residuals: a T2I-Adapter's map for each level, b h w c.
            freeu: FreeU's s1, s2, b1 and b2, 4 or b 4; None for the network as it was trained.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", "blocks" (each resnet and transformer), or "full" (each level as a
                whole, and in it each resnet and transformer; the least memory).

        Raises:
            ValueError: a condition that the config asks for is missing, or an input has another
                shape.
        """
        self.check_inputs(sample, timestep, encoder_hidden_states)
        dtype = self.conv_in.kernel.dtype
        sample, context = sample.astype(dtype), encoder_hidden_states.astype(dtype)
        if self.config.center_input_sample:
            sample = 2 * sample - 1
        timestep = jnp.broadcast_to(timestep, sample.shape[:1])
        temb = self.embed(timestep, class_labels, timestep_cond, added_cond).astype(dtype)

        down = temb, context, down_intrablock_additional_residuals or (), gradient_checkpointing
        up = temb, context, freeu, gradient_checkpointing
        steering = down_block_additional_residuals, mid_block_additional_residual
        x = self.conv_in(sample)
        if self.step_cache is None:
            skips = [x, *self.down_maps(x, *down)]
            x, skips = _steered(self.middle(skips[-1], *down), skips, *steering)
            x = self.up_map(x, skips, *up)
        else:
            x = self._with_deep_cache(x, down, up, *steering)
        return self.conv_out(silu(self.conv_norm_out(x)))

    def up_map(
        self,
        x: jax.Array,
        skips: Sequence[jax.Array],
        temb: jax.Array,
        context: jax.Array,
        freeu: jax.Array | None = None,
        gradient_checkpointing: str = "none",
        layers: range | None = None,
    ) -> jax.Array:
        """Runs layers on the way up, and returns the map after them, b h w c.

        Args:
            x: the map before them, b h w c.
            skips: skip connections, of which each layer reads the last one that is left.
            temb: the embedded time, b t.
            context: see a call.
            freeu: see a call.
            gradient_checkpointing: see a call.
            layers: those to run, counted from 0 over all levels; None for all.
        """
        inner, whole = gradient_checkpointing != "none", gradient_checkpointing == "full"
        counts, left = [len(up.resnets) for up in self.up_blocks], list(skips)
        for level, own in enumerate(ranges_by_level(counts, layers)):
            if not own:
                continue
            taken = [left.pop() for _ in own]
            size = (left[-1].shape[1], left[-1].shape[2]) if left else None
            run_up = functools.partial(self.up_blocks[level], size=size, layers=own, remat=inner)
            numbers = None if freeu is None else of_level(freeu, level)
            x = rematerialized(run_up, whole)(x, taken, temb, context, numbers)
        return x

    def _with_deep_cache(
        self,
        x: jax.Array,
        down: tuple[Any, Any, Any, Any],
        up: tuple[Any, Any, Any, Any],
        residuals: Sequence[jax.Array] | None,
        mid_residual: jax.Array | None,
    ) -> jax.Array:
        """Returns the map before the last layers, whose deep part a cache may know, b h w c.

        Args:
            x: the map after the first layer, b h w c.
            down: the further arguments of `down_maps`.
            up: the further arguments of `up_map`.
            residuals: a ControlNet's, for each skip connection.
            mid_residual: a ControlNet's, for the middle.
        """
        cut, last = self.step_cache.cache.branch, self.last_skip(self.config)
        shallow = [x, *self.down_maps(x, *down, layers=range(cut))]
        of_shallow, of_deep = (
            None if residuals is None else residuals[own]
            for own in (slice(cut + 1), slice(cut + 1, None))
        )

        def deep() -> jax.Array:
            skips = self.down_maps(shallow[-1], *down, layers=range(cut, last))
            y = self.middle((skips or shallow)[-1], *down)
            y, skips = _steered(y, skips, of_deep, mid_residual)
            return self.up_map(y, [*shallow, *skips], *up, layers=range(last - cut))

        y = deep_map(self.step_cache, deep)
        y, skips = _steered(y, shallow, of_shallow, None)
        return self.up_map(y, skips, *up, layers=range(last - cut, last + 1))

    @staticmethod
    def last_skip(config: UNet2DConditionConfig) -> int:
        """Returns the number of the last skip connection, counted from 0."""
        return len(skip_widths(config)) - 1


def _steered(
    x: jax.Array,
    skips: list[jax.Array],
    residuals: Sequence[jax.Array] | None,
    mid_residual: jax.Array | None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the middle's map and skip connections with a ControlNet's residuals added."""
    if residuals is not None:
        check_residuals("down_block_additional_residuals", residuals, skips)
        skips = [s + r for s, r in zip(skips, residuals, strict=True)]
    if mid_residual is not None:
        check_residuals("mid_block_additional_residual", [mid_residual], [x])
        x = x + mid_residual
    return x, skips
