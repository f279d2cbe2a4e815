"""The autoencoder between images and latents (Rombach et al. 2022, appendix G)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.boundary.config import (
    Channels,
    Keyed,
    Positive,
    Repeats,
    Shift,
    Size,
    Widths,
    check_groups,
    check_types,
)
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d, GroupNorm
from diffusax.models.layers.resnet import TENSOR_RULES, Downsample2D, ResnetBlock2D, Upsample2D
from diffusax.models.layers.transformer import OLD_ATTENTION, SpatialAttention
from diffusax.models.ops.activations import silu

_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class AutoencoderKLConfig(Keyed):
    """The options of diffusers' AutoencoderKL."""

    class_name: ClassVar[str] = "AutoencoderKL"
    fixed: ClassVar[dict[str, Any]] = {"act_fn": ("silu", "swish")}
    ignored: ClassVar[frozenset[str]] = frozenset()

    in_channels: Channels = 3
    out_channels: Channels = 3
    down_block_types: tuple[Literal["DownEncoderBlock2D"], ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[Literal["UpDecoderBlock2D"], ...] = ("UpDecoderBlock2D",)
    block_out_channels: Widths = (64,)
    layers_per_block: Repeats = 1
    latent_channels: Channels = 4
    norm_num_groups: Channels = 32
    sample_size: Size = 32
    scaling_factor: Positive = 0.18215
    shift_factor: Shift | None = None
    latents_mean: tuple[Shift, ...] | None = None
    latents_std: tuple[Positive, ...] | None = None
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        levels = len(self.block_out_channels)
        for name in ("down_block_types", "up_block_types"):
            if len(getattr(self, name)) != levels:
                raise ValueError(
                    f"{name} must have one entry per level of block_out_channels "
                    f"(got {len(getattr(self, name))} for {levels} levels)"
                )
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.latent_channels:
                raise ValueError(
                    f"{name} must have one entry per latent channel "
                    f"(got {len(values)} for latent_channels={self.latent_channels})"
                )
        check_groups(self.block_out_channels, self.norm_num_groups)

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction."""
        return 2 ** (len(self.block_out_channels) - 1)


class MidBlock(nnx.Module):
    """A resnet, attention and a resnet. x: b h w c -> b h w c."""

    def __init__(self, c: int, groups: int, attends: bool, *, rngs: nnx.Rngs):
        self.resnets = nnx.List([_resnet(c, c, groups, rngs) for _ in range(2)])
        self.attentions = nnx.List([SpatialAttention(c, groups, rngs=rngs)]) if attends else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.resnets[0](x)
        if self.attentions is not None:
            x = self.attentions[0](x)
        return self.resnets[1](x)


class Level(nnx.Module):
    """The resnets of one resolution and the resampling after them. x: b h w c -> b h' w' d."""

    def __init__(self, c: int, d: int, layers: int, groups: int, *, resample: str, rngs: nnx.Rngs):
        self.resnets = nnx.List(
            [_resnet(c if j == 0 else d, d, groups, rngs) for j in range(layers)]
        )
        self.downsamplers = (
            nnx.List([Downsample2D(d, padding=0, rngs=rngs)]) if resample == "down" else None
        )
        self.upsamplers = nnx.List([Upsample2D(d, rngs=rngs)]) if resample == "up" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        for resnet in self.resnets:
            x = resnet(x)
        if self.downsamplers is not None:
            x = self.downsamplers[0](x)
        return x if self.upsamplers is None else self.upsamplers[0](x)


class Encoder(nnx.Module):
    """The encoder. x: b H W 3 -> b h w 2z, the mean and log variance side by side."""

    def __init__(self, config: AutoencoderKLConfig, *, rngs: nnx.Rngs):
        widths, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = Conv2d(config.in_channels, widths[0], 3, rngs=rngs)
        self.down_blocks = nnx.List(
            [
                Level(c, d, config.layers_per_block, groups, resample=resample, rngs=rngs)
                for c, d, resample in zip(
                    (widths[0], *widths), widths, ["down"] * (len(widths) - 1) + ["none"]
                )
            ]
        )
        self.mid_block = MidBlock(widths[-1], groups, config.mid_block_add_attention, rngs=rngs)
        self.conv_norm_out = GroupNorm(widths[-1], groups, eps=_EPS, rngs=rngs)
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return self.conv_out(silu(self.conv_norm_out(x)))


class Decoder(nnx.Module):
    """The decoder. z: b h w z -> b H W 3."""

    def __init__(self, config: AutoencoderKLConfig, *, rngs: nnx.Rngs):
        widths, groups = config.block_out_channels[::-1], config.norm_num_groups
        self.conv_in = Conv2d(config.latent_channels, widths[0], 3, rngs=rngs)
        self.mid_block = MidBlock(widths[0], groups, config.mid_block_add_attention, rngs=rngs)
        self.up_blocks = nnx.List(
            [
                Level(c, d, config.layers_per_block + 1, groups, resample=resample, rngs=rngs)
                for c, d, resample in zip(
                    (widths[0], *widths), widths, ["up"] * (len(widths) - 1) + ["none"]
                )
            ]
        )
        self.conv_norm_out = GroupNorm(widths[-1], groups, eps=_EPS, rngs=rngs)
        self.conv_out = Conv2d(widths[-1], config.out_channels, 3, rngs=rngs)

    def __call__(self, z: jax.Array) -> jax.Array:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.head(x)

    def head(self, x: jax.Array) -> jax.Array:
        """Converts the last level's map to an image. x: b H W c -> b H W 3."""
        return self.conv_out(silu(self.conv_norm_out(x)))


class AutoencoderKL(nnx.Module):
    """Converts images in [-1, 1] to a normal distribution over latents, and back.

    Upstream: diffusers models/autoencoders/autoencoder_kl.py. Latents here are the network's own;
    the pipeline applies `scaling_factor` and `shift_factor`.
    """

    config_class = AutoencoderKLConfig
    tensor_rules = TENSOR_RULES
    # In files converted from the original code the attention has 1x1 convolutions.
    legacy_names = OLD_ATTENTION

    def __init__(self, config: AutoencoderKLConfig, *, rngs: nnx.Rngs):
        self.config: Any = config
        z = config.latent_channels
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.quant_conv = Conv2d(2 * z, 2 * z, 1, rngs=rngs) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(z, z, 1, rngs=rngs) if config.use_post_quant_conv else None

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Encodes images. x: b H W 3 -> the mean and the log variance of the latents, each b h w z.

        Raises:
            ValueError: x has another shape.
        """
        check_map("x", x, self.config.in_channels)
        moments = self.encoder(x)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, logvar = jnp.split(moments, 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0)

    def decode(self, z: jax.Array) -> jax.Array:
        """Decodes latents. z: b h w z -> b H W 3.

        Raises:
            ValueError: z has another shape.
        """
        check_map("z", z, self.config.latent_channels)
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        return self.decoder(z)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Reconstructs images from the latents' mean. x: b H W 3 -> b H W 3."""
        return self.decode(self.encode(x)[0])


def _resnet(c: int, d: int, groups: int, rngs: nnx.Rngs) -> ResnetBlock2D:
    return ResnetBlock2D(c, d, None, groups=groups, eps=_EPS, rngs=rngs)
