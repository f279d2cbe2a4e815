"""The conditional UNet of Stable Diffusion 1.x, 2.x and SDXL."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.config import per_level
from diffusax.models.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers import Conv2d, Embedding, GroupNorm, Linear
from diffusax.models.unet_blocks import DownBlock, MidBlock, UpBlock, rematerialized


@dataclasses.dataclass(frozen=True)
class UNet2DConditionConfig:
    """The options of diffusers' UNet2DConditionModel that Stable Diffusion checkpoints use.

    `attention_head_dim` is, for historical reasons, the *number* of heads of a level (diffusers
    issue 2011). Options with one value per level accept a single value for all. Attention's softmax
    is in float32 whether `upcast_attention` asks for it or not.
    """

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
    ignored: ClassVar[frozenset[str]] = frozenset()

    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 4
    out_channels: int = 4
    center_input_sample: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: float = 0
    down_block_types: tuple[str, ...] = (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D")
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[str, ...] = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    only_cross_attention: bool | tuple[bool, ...] = False
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    downsample_padding: int = 1
    mid_block_scale_factor: float = 1
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int | tuple[int, ...] = 1280
    transformer_layers_per_block: int | tuple[Any, ...] = 1
    reverse_transformer_layers_per_block: tuple[Any, ...] | None = None
    attention_head_dim: int | tuple[int, ...] = 8
    use_linear_projection: bool = False
    upcast_attention: bool = False
    class_embed_type: str | None = None
    num_class_embeds: int | None = None
    class_embeddings_concat: bool = False
    projection_class_embeddings_input_dim: int | None = None
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    resnet_time_scale_shift: str = "default"
    time_embedding_dim: int | None = None
    time_cond_proj_dim: int | None = None
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        if len(self.down_block_types) != levels or len(self.up_block_types) != levels:
            raise ValueError(
                "down_block_types, up_block_types and block_out_channels must have one entry per "
                f"level (got {len(self.down_block_types)}, {len(self.up_block_types)}, {levels})"
            )
        for name, allowed in _CHOICES.items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value not in allowed:
                    raise ValueError(
                        f"{name}={value!r} is not supported by diffusax's UNet2DConditionModel "
                        f"(only {', '.join(map(repr, allowed))})"
                    )
        if self.class_embed_type in ("projection", "simple_projection") or self.addition_embed_type:
            _require(self, "projection_class_embeddings_input_dim")
        if self.addition_embed_type:
            _require(self, "addition_time_embed_dim")


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "class_embed_type": (None, "timestep", "identity", "projection", "simple_projection"),
    "addition_embed_type": (None, "text_time"),
}


def _require(config: UNet2DConditionConfig, name: str) -> None:
    if getattr(config, name) is None:
        raise ValueError(f"{name} must be given with this class_embed_type or addition_embed_type")


class UNet2DConditionModel(nnx.Module):
    """Predicts the noise (or v, or the sample) in latents (Rombach et al. 2022).

    Upstream: diffusers models/unets/unet_2d_condition.py.
    """

    config_class = UNet2DConditionConfig

    def __init__(self, config: UNet2DConditionConfig, *, rngs: nnx.Rngs):
        self.config = config
        widths = config.block_out_channels
        time_dim = config.time_embedding_dim or 4 * widths[0]
        self.conv_in = Conv2d(config.in_channels, widths[0], config.conv_in_kernel, rngs=rngs)
        self.time_embedding = TimestepEmbedding(
            widths[0], time_dim, cond_dim=config.time_cond_proj_dim, rngs=rngs
        )
        self.class_embedding = _class_embedding(config, time_dim, rngs)
        self.add_embedding = (
            TimestepEmbedding(
                config.projection_class_embeddings_input_dim or 0, time_dim, rngs=rngs
            )
            if config.addition_embed_type == "text_time"
            else None
        )
        temb_dim = time_dim * 2 if config.class_embeddings_concat else time_dim
        self.down_blocks = nnx.List(_down_blocks(config, temb_dim, rngs))
        self.mid_block = _mid_block(config, temb_dim, rngs)
        self.up_blocks = nnx.List(_up_blocks(config, temb_dim, rngs))
        self.conv_norm_out = GroupNorm(
            widths[0], config.norm_num_groups, eps=config.norm_eps, rngs=rngs
        )
        self.conv_out = Conv2d(widths[0], config.out_channels, config.conv_out_kernel, rngs=rngs)

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
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """The prediction, b h w out_channels, in the dtype of the parameters.

        Args:
            sample: b h w in_channels.
            timestep: a scalar or b.
            encoder_hidden_states: b s cross_attention_dim.
            class_labels: b (or b c, for the projection types), where the config has them.
            timestep_cond: b time_cond_proj_dim, the embedded guidance scale of distilled models.
            added_cond: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            down_block_additional_residuals: a ControlNet's, one for each skip connection.
            mid_block_additional_residual: a ControlNet's, added after the middle block.
            gradient_checkpointing: what the gradient computes again instead of keeping: "none",
                "blocks" (each resnet and transformer), or "full" (each level as a whole, and in it
                each resnet and transformer; the least memory).

        Raises:
            ValueError: a condition that the config asks for is missing.
        """
        dtype = self.conv_in.kernel.dtype
        sample, context = sample.astype(dtype), encoder_hidden_states.astype(dtype)
        if self.config.center_input_sample:
            sample = 2 * sample - 1
        timestep = jnp.broadcast_to(timestep, sample.shape[:1])
        temb = self._embed(timestep, class_labels, timestep_cond, added_cond).astype(dtype)

        x = self.conv_in(sample)
        skips = [x]
        inner, whole = gradient_checkpointing != "none", gradient_checkpointing == "full"
        for down in self.down_blocks:
            run_down = functools.partial(down, remat=inner)
            x, outputs = rematerialized(run_down, whole)(x, temb, context)
            skips += outputs
        if down_block_additional_residuals is not None:
            skips = [s + r for s, r in zip(skips, down_block_additional_residuals, strict=True)]

        if self.mid_block is not None:
            run_mid = functools.partial(self.mid_block, remat=inner)
            x = rematerialized(run_mid, whole)(x, temb, context)
        if mid_block_additional_residual is not None:
            x = x + mid_block_additional_residual

        for up in self.up_blocks:
            taken = [skips.pop() for _ in up.resnets]
            size = (skips[-1].shape[1], skips[-1].shape[2]) if skips else None
            run_up = functools.partial(up, size=size, remat=inner)
            x = rematerialized(run_up, whole)(x, taken, temb, context)
        return self.conv_out(nnx.silu(self.conv_norm_out(x)))

    def _embed(
        self,
        timestep: jax.Array,
        class_labels: jax.Array | None,
        timestep_cond: jax.Array | None,
        added_cond: dict[str, jax.Array] | None,
    ) -> jax.Array:
        temb = self.time_embedding(self._sinusoids(timestep), timestep_cond)
        if self.class_embedding is not None:
            if class_labels is None:
                raise ValueError("class_labels must be given: this UNet has a class embedding")
            if self.config.class_embed_type == "timestep":
                class_labels = self._sinusoids(class_labels)
            embedded = self.class_embedding(class_labels)
            concat = self.config.class_embeddings_concat
            temb = jnp.concatenate([temb, embedded], axis=-1) if concat else temb + embedded
        if self.add_embedding is not None:
            if added_cond is None:
                raise ValueError("added_cond must be given: this UNet has addition_embed_type")
            temb = temb + self.add_embedding(self._text_time(**added_cond))
        return temb

    def _sinusoids(self, values: jax.Array, dim: int | None = None) -> jax.Array:
        return timestep_embedding(
            values,
            dim or self.config.block_out_channels[0],
            flip_sin_to_cos=self.config.flip_sin_to_cos,
            freq_shift=self.config.freq_shift,
        )

    def _text_time(self, text_embeds: jax.Array, time_ids: jax.Array) -> jax.Array:
        times = self._sinusoids(time_ids.reshape(-1), self.config.addition_time_embed_dim)
        return jnp.concatenate([text_embeds, times.reshape(text_embeds.shape[0], -1)], axis=-1)


def _identity(x: jax.Array) -> jax.Array:
    return x


def _class_embedding(config: UNet2DConditionConfig, d: int, rngs: nnx.Rngs) -> Any:
    c = config.projection_class_embeddings_input_dim or 0
    match config.class_embed_type:
        case "timestep":
            return TimestepEmbedding(config.block_out_channels[0], d, rngs=rngs)
        case "identity":
            return _identity
        case "projection":
            return TimestepEmbedding(c, d, rngs=rngs)
        case "simple_projection":
            return Linear(c, d, rngs=rngs)
    return Embedding(config.num_class_embeds, d, rngs=rngs) if config.num_class_embeds else None


def _resnet_options(config: UNet2DConditionConfig, temb_dim: int) -> dict[str, Any]:
    return {
        "time_dim": temb_dim,
        "groups": config.norm_num_groups,
        "eps": config.norm_eps,
        "scale_shift": config.resnet_time_scale_shift == "scale_shift",
    }


def _transformer_options(
    config: UNet2DConditionConfig, level: int, count: int, layers: Any, *, only_cross: bool
) -> list[dict[str, Any]]:
    """One set of options per transformer of a level."""
    levels = len(config.block_out_channels)
    options = {
        "heads": per_level(config.attention_head_dim, levels)[level],
        "context_dim": per_level(config.cross_attention_dim, levels)[level],
        "groups": config.norm_num_groups,
        "use_linear_projection": config.use_linear_projection,
        "only_cross_attention": only_cross,
    }
    return [{**options, "layers": n} for n in per_level(layers, count)]


def _down_blocks(config: UNet2DConditionConfig, temb_dim: int, rngs: nnx.Rngs) -> list[DownBlock]:
    widths, levels = config.block_out_channels, len(config.block_out_channels)
    depths = per_level(config.layers_per_block, levels)
    layers = per_level(config.transformer_layers_per_block, levels)
    only_cross = per_level(config.only_cross_attention, levels)
    blocks = []
    for i, (c, d) in enumerate(zip((widths[0], *widths), widths)):
        attends = config.down_block_types[i] == "CrossAttnDownBlock2D"
        blocks.append(
            DownBlock(
                [(c if j == 0 else d, d) for j in range(depths[i])],
                _transformer_options(config, i, depths[i], layers[i], only_cross=only_cross[i])
                if attends
                else [],
                _resnet_options(config, temb_dim),
                downsample_padding=config.downsample_padding if i < levels - 1 else None,
                rngs=rngs,
            )
        )
    return blocks


def _mid_block(config: UNet2DConditionConfig, temb_dim: int, rngs: nnx.Rngs) -> MidBlock | None:
    if config.mid_block_type is None:
        return None
    level = len(config.block_out_channels) - 1
    layers = per_level(config.transformer_layers_per_block, level + 1)[-1]
    attends = config.mid_block_type == "UNetMidBlock2DCrossAttn"
    options = _transformer_options(config, level, 1, layers, only_cross=False) if attends else []
    resnet = _resnet_options(config, temb_dim)
    resnet["output_scale_factor"] = config.mid_block_scale_factor
    return MidBlock(config.block_out_channels[-1], options, resnet, rngs=rngs)


def _up_blocks(config: UNet2DConditionConfig, temb_dim: int, rngs: nnx.Rngs) -> list[UpBlock]:
    widths, levels = config.block_out_channels, len(config.block_out_channels)
    depths = per_level(config.layers_per_block, levels)
    only_cross = per_level(config.only_cross_attention, levels)
    layers = config.reverse_transformer_layers_per_block
    if layers is None:
        layers = per_level(config.transformer_layers_per_block, levels)[::-1]
    blocks, below = [], widths[-1]
    for i, block_type in enumerate(config.up_block_types):
        level = levels - 1 - i
        d, skip, count = widths[level], widths[max(level - 1, 0)], depths[level] + 1
        attends = block_type == "CrossAttnUpBlock2D"
        blocks.append(
            UpBlock(
                [
                    ((below if j == 0 else d) + (skip if j == count - 1 else d), d)
                    for j in range(count)
                ],
                _transformer_options(config, level, count, layers[i], only_cross=only_cross[level])
                if attends
                else [],
                _resnet_options(config, temb_dim),
                upsample=level > 0,
                rngs=rngs,
            )
        )
        below = d
    return blocks
