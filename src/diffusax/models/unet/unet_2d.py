"""The UNet that generates images from noise alone (Ho et al. 2020, DDPM)."""

import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import (
    EMA_OPTIONS,
    Channels,
    Epsilon,
    Keyed,
    Positive,
    Repeats,
    Size,
    Widths,
    check_groups,
    check_types,
)
from diffusax.models.layers import resnet
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d, Embedding, GroupNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.layers.rngs import shaped
from diffusax.models.layers.transformer import OLD_ATTENTION
from diffusax.models.ops.activations import silu
from diffusax.models.unet.unet_2d_blocks import PixelDownBlock, PixelMidBlock, PixelUpBlock

# Building a network takes milliseconds for each block.
_MAX_BLOCKS = 400
_FOURIER_SCALE = 16.0

DownBlockType = Literal["DownBlock2D", "AttnDownBlock2D", "ResnetDownsampleBlock2D"]
UpBlockType = Literal["UpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"]
ClassCount = Annotated[int, Meta(ge=1, le=10**6)]


@dataclasses.dataclass(frozen=True)
class UNet2DConfig(Keyed):
    """The options of diffusers' UNet2DModel.

    `attention_head_dim` is the width of a head; None makes one head of all channels.
    """

    class_name: ClassVar[str] = "UNet2DModel"
    fixed: ClassVar[dict[str, Any]] = {"act_fn": ("silu", "swish"), "dropout": 0.0}
    ignored: ClassVar[frozenset[str]] = EMA_OPTIONS

    sample_size: Size | None = None
    in_channels: Channels = 3
    out_channels: Channels = 3
    center_input_sample: bool = False
    time_embedding_type: Literal["positional", "fourier", "learned"] = "positional"
    time_embedding_dim: Channels | None = None
    freq_shift: Annotated[float, Meta(ge=0, le=1)] = 0.0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[DownBlockType, ...] = (
        "DownBlock2D",
        "AttnDownBlock2D",
        "AttnDownBlock2D",
        "AttnDownBlock2D",
    )
    mid_block_type: Literal["UNetMidBlock2D"] | None = "UNetMidBlock2D"
    up_block_types: tuple[UpBlockType, ...] = (
        "AttnUpBlock2D",
        "AttnUpBlock2D",
        "AttnUpBlock2D",
        "UpBlock2D",
    )
    block_out_channels: Widths = (224, 448, 672, 896)
    layers_per_block: Repeats = 2
    mid_block_scale_factor: Positive = 1.0
    downsample_padding: Annotated[int, Meta(ge=0, le=1)] = 1
    downsample_type: Literal["conv", "resnet"] = "conv"
    upsample_type: Literal["conv", "resnet"] = "conv"
    attention_head_dim: Channels | None = 8
    norm_num_groups: Channels = 32
    attn_norm_num_groups: Channels | None = None
    norm_eps: Epsilon = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    add_attention: bool = True
    class_embed_type: Literal["timestep", "identity"] | None = None
    num_class_embeds: ClassCount | None = None
    num_train_timesteps: Annotated[int, Meta(ge=1, le=10**6)] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        widths = self.block_out_channels
        for name in ("down_block_types", "up_block_types"):
            if len(getattr(self, name)) != len(widths):
                raise ValueError(
                    f"{name} and block_out_channels must have one entry per level "
                    f"(got {len(getattr(self, name))} and {len(widths)})"
                )
        check_groups(widths, self.norm_num_groups)
        if self.attn_norm_num_groups is not None:
            check_groups(widths[-1:], self.attn_norm_num_groups)
        if widths[0] < 4:
            raise ValueError(
                "block_out_channels[0], the width of sinusoids, must be at least 4 "
                f"(got {widths[0]})"
            )
        if self.time_embedding_type == "learned" and self.num_train_timesteps is None:
            raise ValueError(
                "num_train_timesteps must be given with time_embedding_type='learned', which has a "
                "vector for each timestep"
            )
        self._check_heads()
        blocks = 2 * len(widths) * (self.layers_per_block + 1)
        if blocks > _MAX_BLOCKS:
            raise ValueError(
                f"layers_per_block={self.layers_per_block} and {len(widths)} levels ask for "
                f"{blocks} blocks; diffusax builds at most {_MAX_BLOCKS}"
            )

    @property
    def downsampling(self) -> int:
        """How many times smaller the smallest maps are than the image, in each direction."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def conditional(self) -> bool:
        """Whether the network is told a class."""
        return self.class_embed_type is not None or self.num_class_embeds is not None

    def attention(self, level: int) -> dict[str, Any]:
        """Returns the options of the self-attention of a level's blocks."""
        width = self.block_out_channels[level]
        head_dim = self.attention_head_dim or width
        return {
            "groups": self.norm_num_groups,
            "heads": width // head_dim,
            "head_dim": head_dim,
            "eps": self.norm_eps,
        }

    def resnet(self, time_dim: int) -> dict[str, Any]:
        """Returns the options that all resnets of the network share."""
        return {
            "time_dim": time_dim,
            "groups": self.norm_num_groups,
            "eps": self.norm_eps,
            "scale_shift": self.resnet_time_scale_shift == "scale_shift",
        }

    def _check_heads(self) -> None:
        widths, types = (
            self.block_out_channels,
            (*self.down_block_types, *self.up_block_types[::-1]),
        )
        attending = [w for kind, w in zip(types, widths * 2) if kind.startswith("Attn")]
        if self.mid_block_type is not None and self.add_attention:
            attending.append(widths[-1])
        if (self.attention_head_dim or 0) > min(attending, default=math.inf):
            raise ValueError(
                f"attention_head_dim={self.attention_head_dim}, the width of a head, must not be "
                f"more than block_out_channels={widths} where a block attends"
            )


class GaussianFourierProjection(nnx.Module):
    """Random Fourier features of the noise level's logarithm. t: b -> b 2c.

    Song et al. 2021, appendix C.2; upstream: diffusers models/embeddings.py.
    """

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        init = shaped(jax.nn.initializers.normal(_FOURIER_SCALE))
        self.embedding = nnx.Param(init(rngs.params(), (c,), jnp.float32))

    def __call__(self, t: jax.Array) -> jax.Array:
        frequencies = self.embedding[...].astype(jnp.float32)
        angles = jnp.log(t.astype(jnp.float32))[:, None] * frequencies * (2 * math.pi)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class UNet2DModel(nnx.Module):
    """Predicts the noise (or the sample, or v) in images (Ho et al. 2020, appendix B).

    Upstream: diffusers models/unets/unet_2d.py.
    """

    config_class = UNet2DConfig
    tensor_rules = resnet.TENSOR_RULES
    legacy_names = OLD_ATTENTION

    def __init__(self, config: UNet2DConfig, *, rngs: nnx.Rngs):
        self.config: Any = config
        widths, levels = config.block_out_channels, len(config.block_out_channels)
        time_dim = config.time_embedding_dim or 4 * widths[0]
        self.conv_in = Conv2d(config.in_channels, widths[0], 3, rngs=rngs)
        self.time_proj = _time_projection(config, rngs)
        times = widths[0] * (2 if config.time_embedding_type == "fourier" else 1)
        self.time_embedding = TimestepEmbedding(times, time_dim, rngs=rngs)
        self.class_embedding = _class_embedding(config, times, time_dim, rngs)

        options, layers = config.resnet(time_dim), config.layers_per_block
        self.down_blocks = nnx.List(
            [
                PixelDownBlock(
                    [(c if j == 0 else d, d) for j in range(layers)],
                    config.attention(i) if kind == "AttnDownBlock2D" else None,
                    options,
                    downsampler=_downsampler(config, kind) if i < levels - 1 else None,
                    padding=config.downsample_padding,
                    rngs=rngs,
                )
                for i, (kind, c, d) in enumerate(
                    zip(config.down_block_types, (widths[0], *widths), widths)
                )
            ]
        )
        self.mid_block = _middle(config, options, rngs)
        self.up_blocks = nnx.List(
            [
                PixelUpBlock(
                    _up_channels(widths, layers + 1, i),
                    config.attention(levels - 1 - i) if kind == "AttnUpBlock2D" else None,
                    options,
                    upsampler=_upsampler(config, kind) if i < levels - 1 else None,
                    rngs=rngs,
                )
                for i, kind in enumerate(config.up_block_types)
            ]
        )
        self.conv_norm_out = GroupNorm(
            widths[0], config.norm_num_groups, eps=config.norm_eps, rngs=rngs
        )
        self.conv_out = Conv2d(widths[0], config.out_channels, 3, rngs=rngs)

    def __call__(
        self,
        sample: jax.Array,
        timestep: jax.Array,
        *,
        class_labels: jax.Array | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w out_channels, in the dtype of the parameters.

        Args:
            sample: b h w in_channels.
            timestep: a scalar or b.
            class_labels: b (or b t, for the type "identity"), where the config has classes.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", "blocks" (each resnet and attention), or "full" (each level as a
                whole, and in it each resnet and attention; the least memory).

        Raises:
            ValueError: class_labels are missing, or there should be none, or sample has another
                shape.
        """
        self._check_inputs(sample, class_labels)
        dtype = self.conv_in.kernel.dtype
        sample = sample.astype(dtype)
        if self.config.center_input_sample:
            sample = 2 * sample - 1
        timestep = jnp.broadcast_to(timestep, sample.shape[:1])
        temb = self._embed(timestep, class_labels).astype(dtype)

        inner, whole = gradient_checkpointing != "none", gradient_checkpointing == "full"
        x = self.conv_in(sample)
        skips = [x]
        for down in self.down_blocks:
            x, outputs = rematerialized(functools.partial(down, remat=inner), whole)(x, temb)
            skips += outputs
        if self.mid_block is not None:
            x = rematerialized(functools.partial(self.mid_block, remat=inner), whole)(x, temb)
        for up in self.up_blocks:
            taken = [skips.pop() for _ in up.resnets]
            x = rematerialized(functools.partial(up, remat=inner), whole)(x, taken, temb)
        y = self.conv_out(silu(self.conv_norm_out(x)))
        if self.config.time_embedding_type == "fourier":
            # Networks of noise levels predict the score (Song et al. 2021).
            y = y / timestep.astype(dtype)[:, None, None, None]
        return y

    def _embed(self, timestep: jax.Array, class_labels: jax.Array | None) -> jax.Array:
        """Returns the time embedding with that of the class. timestep: b -> b t."""
        temb = self.time_embedding(self._project(timestep))
        if self.class_embedding is None:
            return temb
        if self.config.class_embed_type == "timestep":
            class_labels = self._project(class_labels)
        return temb + self.class_embedding(class_labels)

    def _project(self, times: Any) -> jax.Array:
        """Returns what the time embedding reads of timesteps, b -> b c."""
        if self.config.time_embedding_type == "learned":
            return self.time_proj(times.astype(jnp.int32))
        if self.time_proj is not None:
            return self.time_proj(times)
        return timestep_embedding(
            times,
            self.config.block_out_channels[0],
            flip_sin_to_cos=self.config.flip_sin_to_cos,
            freq_shift=self.config.freq_shift,
        )

    def _check_inputs(self, sample: jax.Array, class_labels: jax.Array | None) -> None:
        check_map("sample", sample, self.config.in_channels)
        factor = self.config.downsampling
        if sample.shape[1] % factor or sample.shape[2] % factor:
            raise ValueError(
                f"sample must have a height and width divisible by {factor}, which this network's "
                f"{len(self.down_blocks)} levels halve (got {sample.shape[1]} and "
                f"{sample.shape[2]})"
            )
        if class_labels is None and self.class_embedding is not None:
            raise ValueError("class_labels must be given: this network has a class embedding")
        if class_labels is not None and self.class_embedding is None:
            raise ValueError("class_labels cannot be given: this network has no class embedding")


def _identity(x: jax.Array) -> jax.Array:
    return x


def _time_projection(config: UNet2DConfig, rngs: nnx.Rngs) -> Any:
    """Returns the layer before the time embedding; None for sinusoids, which have no parameters."""
    width = config.block_out_channels[0]
    if config.time_embedding_type == "fourier":
        return GaussianFourierProjection(width, rngs=rngs)
    if config.time_embedding_type == "learned":
        return Embedding(config.num_train_timesteps or 0, width, rngs=rngs)
    return None


def _class_embedding(config: UNet2DConfig, times: int, d: int, rngs: nnx.Rngs) -> Any:
    if config.class_embed_type == "timestep":
        return TimestepEmbedding(times, d, rngs=rngs)
    if config.class_embed_type == "identity":
        return _identity
    return Embedding(config.num_class_embeds, d, rngs=rngs) if config.num_class_embeds else None


def _middle(config: UNet2DConfig, options: dict[str, Any], rngs: nnx.Rngs) -> Any:
    """Returns the middle block; None where the config has none."""
    if config.mid_block_type is None:
        return None
    groups = config.attn_norm_num_groups
    if groups is None and config.resnet_time_scale_shift == "default":
        groups = config.norm_num_groups
    scale = {"output_scale_factor": config.mid_block_scale_factor}
    attention = (
        {**config.attention(-1), "groups": groups, **scale} if config.add_attention else None
    )
    return PixelMidBlock(config.block_out_channels[-1], attention, {**options, **scale}, rngs=rngs)


def _downsampler(config: UNet2DConfig, kind: str) -> str:
    """Returns the kind of a level's downsampler; levels without attention ignore the option."""
    if kind == "AttnDownBlock2D":
        return config.downsample_type
    return "resnet" if kind == "ResnetDownsampleBlock2D" else "conv"


def _upsampler(config: UNet2DConfig, kind: str) -> str:
    """Returns the kind of a level's upsampler; see `_downsampler`."""
    if kind == "AttnUpBlock2D":
        return config.upsample_type
    return "resnet" if kind == "ResnetUpsampleBlock2D" else "conv"


def _up_channels(widths: tuple[int, ...], count: int, i: int) -> list[tuple[int, int]]:
    """Returns the channels (in, out) of the resnets of the i-th level on the way up."""
    level = len(widths) - 1 - i
    d, skip = widths[level], widths[max(level - 1, 0)]
    below = widths[min(level + 1, len(widths) - 1)]
    return [((below if j == 0 else d) + (skip if j == count - 1 else d), d) for j in range(count)]
