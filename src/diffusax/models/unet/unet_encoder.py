"""The shared parts of the UNet and the ControlNet: embeddings, the way down and the middle."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import (
    Bool,
    Channels,
    Epsilon,
    Heads,
    Keyed,
    Positive,
    Repeats,
    Widths,
    check_groups,
    check_types,
    per_level,
)
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens, check_width
from diffusax.models.layers.layers import Conv2d, Embedding, Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.unet.unet_blocks import DownBlock, MidBlock

# Four times SDXL's number. Building a network takes milliseconds for each block.
_MAX_BLOCKS = 400
_DEPTH = "transformer_layers_per_block"

Depth = Annotated[int, Meta(ge=0, le=64)]
PerLayer = Depth | Annotated[tuple[Depth, ...], Meta(min_length=1)]
Depths = Depth | tuple[PerLayer, ...]
"""Transformer blocks per transformer: one number, one per level, or one per layer of a level."""


@dataclasses.dataclass(frozen=True)
class UNetEncoderConfig(Keyed):
    """The options that diffusers' UNet2DConditionModel and ControlNetModel have in common.

    `attention_head_dim` is, for historical reasons, the *number* of heads of a level (diffusers
    issue 2011). Options with one value per level accept a single value for all. Attention's softmax
    is always in float32, whatever `upcast_attention` says.
    """

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]]

    in_channels: Channels = 4
    flip_sin_to_cos: bool = True
    freq_shift: Annotated[float, Meta(ge=0, le=1)] = 0.0
    down_block_types: tuple[Literal["CrossAttnDownBlock2D", "DownBlock2D"], ...] = (
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    )
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] | None = (
        "UNetMidBlock2DCrossAttn"
    )
    only_cross_attention: Bool = False
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: Repeats | tuple[Repeats, ...] = 2
    downsample_padding: Annotated[int, Meta(ge=0, le=1)] = 1
    mid_block_scale_factor: Positive = 1.0
    norm_num_groups: Channels = 32
    norm_eps: Epsilon = 1e-5
    cross_attention_dim: Channels | tuple[Channels, ...] = 1280
    transformer_layers_per_block: Depths = 1
    attention_head_dim: Heads | tuple[Heads, ...] = 8
    use_linear_projection: bool = False
    upcast_attention: bool | None = False
    class_embed_type: Literal["timestep", "identity", "projection", "simple_projection"] | None = (
        None
    )
    num_class_embeds: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    projection_class_embeddings_input_dim: Channels | None = None
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: Channels | None = None
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"

    def __post_init__(self) -> None:
        check_types(self)
        levels = len(self.block_out_channels)
        if len(self.down_block_types) != levels:
            raise ValueError(
                "down_block_types and block_out_channels must have one entry per level "
                f"(got {len(self.down_block_types)} and {levels})"
            )
        check_groups(self.block_out_channels, self.norm_num_groups)
        if self.class_embed_type in ("projection", "simple_projection") or self.addition_embed_type:
            self._require("projection_class_embeddings_input_dim")
        if self.addition_embed_type:
            self._require("addition_time_embed_dim")
        if min(self.block_out_channels[0], self.addition_time_embed_dim or 4) < 4:
            raise ValueError(
                "block_out_channels[0] and addition_time_embed_dim, the widths of sinusoids, must "
                f"be at least 4 (got {self.block_out_channels[0]}, {self.addition_time_embed_dim})"
            )
        blocks = self.count_blocks()
        if blocks > _MAX_BLOCKS:
            raise ValueError(
                "layers_per_block and transformer_layers_per_block ask for "
                f"{blocks} blocks; diffusax builds at most {_MAX_BLOCKS}"
            )

    def count_blocks(self) -> int:
        """Counts resnets and transformer blocks, as a measure of the time that building takes."""
        return sum(
            len(level.resnets) + sum(o["layers"] for o in level.transformers)
            for level in (*down_levels(self), mid_level(self))
        )

    def per_level(self, name: str) -> tuple[Any, ...]:
        """Returns the option `name` of each level."""
        return per_level(name, getattr(self, name), len(self.block_out_channels))

    def _require(self, name: str) -> None:
        if getattr(self, name) is None:
            raise ValueError(
                f"{name} must be given with class_embed_type={self.class_embed_type!r} and "
                f"addition_embed_type={self.addition_embed_type!r}"
            )


@dataclasses.dataclass(frozen=True)
class Level:
    """The resnets of one resolution, as (channels in, out), and the options of its transformers."""

    resnets: list[tuple[int, int]]
    transformers: list[dict[str, Any]]


def make_level(
    config: UNetEncoderConfig, level: int, resnets: list[tuple[int, int]], depth: Any, attends: bool
) -> Level:
    """Makes a level; if it attends, its transformers have `depth` blocks (one number, or one each).

    Raises:
        ValueError: it attends with more heads than it has channels.
    """
    heads = config.per_level("attention_head_dim")[level]
    if attends and heads > config.block_out_channels[level]:
        raise ValueError(
            f"attention_head_dim={config.attention_head_dim}, the number of heads, must not be "
            f"more than block_out_channels={config.block_out_channels} where a block attends"
        )
    options = {
        "heads": heads,
        "context_dim": config.per_level("cross_attention_dim")[level],
        "groups": config.norm_num_groups,
        "use_linear_projection": config.use_linear_projection,
        "only_cross_attention": config.per_level("only_cross_attention")[level],
    }
    depths = per_level(_DEPTH, depth, len(resnets)) if attends else ()
    return Level(resnets, [{**options, "layers": n} for n in depths])


def down_levels(config: UNetEncoderConfig) -> list[Level]:
    """Returns the levels on the way down, the largest maps first."""
    widths = config.block_out_channels
    counts, depths = config.per_level("layers_per_block"), config.per_level(_DEPTH)
    result = []
    for i, (c, d) in enumerate(zip((widths[0], *widths), widths)):
        resnets = [(c if j == 0 else d, d) for j in range(counts[i])]
        attends = config.down_block_types[i] == "CrossAttnDownBlock2D"
        result.append(make_level(config, i, resnets, depths[i], attends))
    return result


def skip_widths(config: UNetEncoderConfig) -> list[int]:
    """Returns the channels of each skip connection on the way down, the largest maps first."""
    counts, last = config.per_level("layers_per_block"), len(config.block_out_channels) - 1
    widths = [config.block_out_channels[0]]
    for level, (width, count) in enumerate(zip(config.block_out_channels, counts, strict=True)):
        widths += [width] * (count + (level < last))
    return widths


def mid_level(config: UNetEncoderConfig) -> Level:
    """Returns the middle level; its transformer, if any, is between the resnet and a second one."""
    level, width = len(config.block_out_channels) - 1, config.block_out_channels[-1]
    if config.mid_block_type is None:
        return Level([], [])
    depth = config.per_level(_DEPTH)[-1]
    # Upstream's middle block takes the first of a list for the lowest level.
    depth = depth[0] if isinstance(depth, tuple) else depth
    attends = config.mid_block_type == "UNetMidBlock2DCrossAttn"
    made = make_level(config, level, [(width, width)], depth, attends)
    # Upstream never hands only_cross_attention to the middle block.
    plain = [{**options, "only_cross_attention": False} for options in made.transformers]
    return Level(made.resnets, plain)


def resnet_options(config: UNetEncoderConfig, temb_dim: int) -> dict[str, Any]:
    """Returns the options that all resnets of the network share."""
    return {
        "time_dim": temb_dim,
        "groups": config.norm_num_groups,
        "eps": config.norm_eps,
        "scale_shift": config.resnet_time_scale_shift == "scale_shift",
    }


class UNetEncoder(nnx.Module):
    """The embeddings, the way down and the middle, under the names of diffusers' checkpoints."""

    def __init__(
        self,
        config: UNetEncoderConfig,
        *,
        time_dim: int,
        cond_dim: int | None = None,
        concat_class: bool = False,
        conv_in_kernel: int = 3,
        rngs: nnx.Rngs,
    ):
        """Builds the layers.

        time_dim: the width of the time embedding, to which the class embedding is added, or with
        `concat_class` appended.
        """
        self.config: Any = config
        self.concat_class = concat_class
        width = config.block_out_channels[0]
        self.conv_in = Conv2d(config.in_channels, width, conv_in_kernel, rngs=rngs)
        self.time_embedding = TimestepEmbedding(width, time_dim, cond_dim=cond_dim, rngs=rngs)
        self.class_embedding = _class_embedding(config, time_dim, rngs)
        added = config.projection_class_embeddings_input_dim or 0
        self.add_embedding = (
            TimestepEmbedding(added, time_dim, rngs=rngs) if config.addition_embed_type else None
        )

        resnet = resnet_options(config, time_dim * 2 if concat_class else time_dim)
        levels = down_levels(config)
        self.down_blocks = nnx.List(
            [
                DownBlock(
                    level.resnets,
                    level.transformers,
                    resnet,
                    downsample_padding=config.downsample_padding if i < len(levels) - 1 else None,
                    rngs=rngs,
                )
                for i, level in enumerate(levels)
            ]
        )
        middle = mid_level(config)
        resnet = {**resnet, "output_scale_factor": config.mid_block_scale_factor}
        self.mid_block = (
            MidBlock(config.block_out_channels[-1], middle.transformers, resnet, rngs=rngs)
            if middle.resnets
            else None
        )

    def check_inputs(
        self, sample: jax.Array, timestep: Any, encoder_hidden_states: jax.Array
    ) -> None:
        """Raises ValueError unless the inputs are b h w in_channels and b s cross_attention_dim.

        timestep: one, or b.
        """
        check_map("sample", sample, self.config.in_channels)
        blocks = (self.down_blocks, getattr(self, "up_blocks", ()), (self.mid_block,))
        attends = any(getattr(b, "attentions", None) for b in itertools.chain(*blocks))
        widths = set(self.config.per_level("cross_attention_dim")) if attends else None
        check_tokens("encoder_hidden_states", encoder_hidden_states, widths)
        context = {"encoder_hidden_states": encoder_hidden_states} if attends else {}
        check_rows(sample, timestep=timestep, **context)

    def embed(
        self,
        timestep: jax.Array,
        class_labels: jax.Array | None,
        timestep_cond: jax.Array | None,
        added_cond: dict[str, jax.Array] | None,
    ) -> jax.Array:
        """Returns the time embedding with all that is added to it. timestep: b -> b t.

        Raises:
            ValueError: a condition that the config asks for is missing.
        """
        temb = self.time_embedding(self._sinusoids(timestep), timestep_cond)
        if self.class_embedding is not None:
            if class_labels is None:
                raise ValueError("class_labels must be given: this network has a class embedding")
            if self.config.class_embed_type == "timestep":
                class_labels = self._sinusoids(class_labels)
            elif self.config.class_embed_type in ("projection", "simple_projection"):
                check_width(
                    "class_labels",
                    class_labels,
                    self.config.projection_class_embeddings_input_dim or 0,
                )
            embedded = self.class_embedding(class_labels)
            concat = self.concat_class
            temb = jnp.concatenate([temb, embedded], axis=-1) if concat else temb + embedded
        if self.add_embedding is not None:
            if added_cond is None:
                raise ValueError("added_cond must be given: this network has addition_embed_type")
            temb = temb + self.add_embedding(self._text_time(**added_cond))
        return temb

    def down_maps(
        self,
        x: jax.Array,
        temb: jax.Array,
        context: jax.Array,
        residuals: Sequence[jax.Array] = (),
        gradient_checkpointing: str = "none",
        layers: range | None = None,
    ) -> list[jax.Array]:
        """Runs layers on the way down, and returns the map after each, a skip connection.

        Args:
            x: the map after the first layer, b h w c.
            temb: the embedded time, b t.
            context: b s k.
            residuals: a T2I-Adapter's maps, one for each level; one more of the middle block's
                shape is added after it, as upstream does for SDXL.
            gradient_checkpointing: see a call of the network.
            layers: those to run, counted from 0 over all levels; None for all.
        """
        inner, whole = gradient_checkpointing != "none", gradient_checkpointing == "full"
        maps, left = list[jax.Array](), list(residuals)
        counts = [down.layers for down in self.down_blocks]
        for down, own in zip(self.down_blocks, ranges_by_level(counts, layers), strict=True):
            residual = left.pop(0) if left else None
            if own:
                run_down = functools.partial(down, layers=own, remat=inner)
                x, outputs = rematerialized(run_down, whole)(x, temb, context, residual)
                maps += outputs
        return maps

    def middle(
        self,
        x: jax.Array,
        temb: jax.Array,
        context: jax.Array,
        residuals: Sequence[jax.Array] = (),
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Runs the middle block, if there is one. Arguments as those of `down_maps`."""
        if self.mid_block is None:
            return x
        inner, whole = gradient_checkpointing != "none", gradient_checkpointing == "full"
        run_mid = functools.partial(self.mid_block, remat=inner)
        x = rematerialized(run_mid, whole)(x, temb, context)
        left = residuals[len(self.down_blocks) :]
        if left and left[0].shape[1:] == x.shape[1:]:
            x = x + left[0].astype(x.dtype)
        return x

    def _sinusoids(self, values: jax.Array, dim: int | None = None) -> jax.Array:
        return timestep_embedding(
            values,
            dim or self.config.block_out_channels[0],
            flip_sin_to_cos=self.config.flip_sin_to_cos,
            freq_shift=self.config.freq_shift,
        )

    def _text_time(self, text_embeds: jax.Array, time_ids: jax.Array) -> jax.Array:
        times = self._sinusoids(time_ids.reshape(-1), self.config.addition_time_embed_dim)
        times = times.reshape(text_embeds.shape[0], -1)
        width = self.config.projection_class_embeddings_input_dim or 0
        check_width("added_cond's text_embeds", text_embeds, width - times.shape[-1])
        return jnp.concatenate([text_embeds, times], axis=-1)


def ranges_by_level(counts: Sequence[int], layers: range | None) -> Iterator[range]:
    """Yields which layers of each level are among some of all levels; None for all.

    counts: the layers of each level.
    """
    begin = 0
    for count in counts:
        own = range(begin, begin + count)
        if layers is not None:
            own = range(max(own.start, layers.start), min(own.stop, layers.stop))
        yield range(own.start - begin, own.stop - begin)
        begin += count


def _identity(x: jax.Array) -> jax.Array:
    return x


def _class_embedding(config: UNetEncoderConfig, d: int, rngs: nnx.Rngs) -> Any:
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
