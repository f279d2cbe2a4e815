"""Qwen-Image 2.1's autoencoder (Qwen 2026), of images with an opacity.

Upstream: diffusers models/autoencoders/autoencoder_kl_qwenimage21.py. It is Wan 2.2's of videos
with the convolutions that an image meets alone, and with a way around each level: means of pixels
beside each other on the way down, and copies of them on the way up. Those count frames, too, of
which an image has one, after zeros.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.boundary.config import Channels, Keyed, Positive, Repeats, Shift, Widths
from diffusax.models.autoencoders import qwen_image
from diffusax.models.autoencoders.qwen_image import (
    ChannelNorm,
    Downsample,
    MidBlock,
    OneFrameAutoencoder,
    ResidualBlock,
    Upsample,
    check_levels,
)
from diffusax.models.layers.layers import Conv2d

_MEAN = (
    *(0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722),
    *(1.8873, -1.7177, -0.651, 0.2732, 0.7562, -0.6163, -1.0277, 3.8363),
    *(2.021, 0.0472, 0.932, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464),
    *(-0.5236, 1.2826, 3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955),
    *(-0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751, -0.1076, 1.7376),
    *(-1.0914, -1.9435, -0.2784, -1.368, 0.4809, -0.4433, 0.3764, 0.5729),
    *(-2.0595, 1.096, -1.326, -2.0211, -5.0179, 0.5275, 4.0162, 1.8505),
    *(0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304),
)
_STD = (
    *(3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.791),
    *(3.0785, 3.65, 3.9308, 3.0904, 2.8778, 3.7675, 3.732, 5.0756),
    *(3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489),
    *(3.4896, 3.8513, 3.9323, 3.4719, 3.7498, 4.283, 3.5694, 4.2467),
    *(3.9037, 3.2947, 5.077, 3.5075, 3.27, 3.4767, 2.8063, 5.1125),
    *(3.5327, 4.7833, 3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875),
    *(3.9624, 4.0168, 3.5643, 4.055, 5.5614, 4.2963, 4.408, 3.4959),
    *(3.8747, 3.7608, 3.5735, 3.149, 3.7662, 3.6746, 3.4563, 3.8161),
)


@dataclasses.dataclass(frozen=True)
class AutoencoderKLQwenImage21Config(Keyed):
    """The options of diffusers' AutoencoderKLQwenImage21."""

    class_name: ClassVar[str] = "AutoencoderKLQwenImage21"
    fixed: ClassVar[dict[str, Any]] = {
        # A list in files.
        "attn_scales": ([], ()),
        "is_residual": True,
        "patch_size": None,
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "scale_factor_temporal", "scale_factor_spatial"}
    )
    scaling_factor: ClassVar[float] = 1.0
    shift_factor: ClassVar[None] = None
    sample_size: ClassVar[int] = 256
    """The side of tiles in pixels, as in diffusers."""

    base_dim: Channels = 96
    """The channels of the encoder's level of the image's own size."""
    decoder_base_dim: Channels | None = 144
    """Those of the decoder's; None for base_dim."""
    z_dim: Channels = 64
    dim_mult: Widths = (1, 2, 4, 8, 8)
    """The channels of each level, as multiples of those."""
    num_res_blocks: Repeats = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True, True)
    """Which halvings of the size of images halve the number of frames of videos, too."""
    in_channels: Channels = 4
    out_channels: Channels = 4
    latents_mean: tuple[Shift, ...] = _MEAN
    latents_std: tuple[Positive, ...] = _STD

    def __post_init__(self) -> None:
        check_levels(self)
        before, last = self.dim_mult[-2:] if len(self.dim_mult) > 1 else (1, self.dim_mult[0])
        if before % last:
            raise ValueError(
                "dim_mult must not have more channels on the last level than on the one before "
                f"(got {self.dim_mult})"
            )

    @property
    def latent_channels(self) -> int:
        """The channels of latents."""
        return self.z_dim

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction."""
        return 2 ** (len(self.dim_mult) - 1)


class DownBlock(nnx.Module):
    """Residual blocks and, but for the last level, the reduction, with a way around both.

    x: b h w c -> b h/2 w/2 d, or b h w d.
    """

    def __init__(self, c: int, d: int, layers: int, *, time: bool | None, rngs: nnx.Rngs):
        """Builds the layers. time: whether the reduction is one of frames, too; None for none."""
        widths = [c, *[d] * (layers - 1)]
        self.resnets = nnx.List([ResidualBlock(n, d, conv=Conv2d, rngs=rngs) for n in widths])
        self.downsampler = (
            None if time is None else Downsample(d, time=time, size=(1, 1), rngs=rngs)
        )
        self.channels, self.frames = d, 2 if time else 1

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        if self.downsampler is None:
            return h + group_means(x, self.channels, 1, 1)
        return self.downsampler(h) + group_means(x, self.channels, 2, self.frames)


class UpBlock(nnx.Module):
    """Residual blocks and, but for the last level, the enlargement, with a way around both.

    x: b h w c -> b 2h 2w d, or b h w d.
    """

    def __init__(self, c: int, d: int, layers: int, *, time: bool | None, rngs: nnx.Rngs):
        """Builds the layers. time: whether the enlargement is one of frames, too; None for none."""
        widths = [c, *[d] * (layers - 1)]
        self.resnets = nnx.List([ResidualBlock(n, d, conv=Conv2d, rngs=rngs) for n in widths])
        self.upsampler = None if time is None else Upsample(d, d, time=time, size=(1, 1), rngs=rngs)
        self.channels, self.frames = d, 2 if time else 1

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        if self.upsampler is None:
            return h
        return self.upsampler(h) + spread_channels(x, self.channels, self.frames)


def group_means(x: jax.Array, d: int, side: int, frames: int) -> jax.Array:
    """Returns means over squares of pixels and groups of channels, b h w c -> b h/side w/side d.

    An image is the last of so many frames, of which the others are zeros. Upstream:
    autoencoder_kl_wan.py, AvgDown3D.
    """
    b, h, w, c = x.shape
    squares = x.reshape(b, h // side, side, w // side, side, c).transpose(0, 1, 3, 5, 2, 4)
    flat = squares.reshape(*squares.shape[:4], 1, side**2)
    flat = jnp.pad(flat, ((0, 0),) * 4 + ((frames - 1, 0), (0, 0)))
    groups = flat.reshape(*flat.shape[:3], d, -1).astype(jnp.float32)
    return groups.mean(-1).astype(x.dtype)


def spread_channels(x: jax.Array, d: int, frames: int) -> jax.Array:
    """Returns squares of pixels that repeat channels, b h w c -> b 2h 2w d.

    They are those of the last of so many frames. Upstream: autoencoder_kl_wan.py, DupUp3D.
    """
    b, h, w, c = x.shape
    repeated = jnp.repeat(x, d * frames * 4 // c, axis=-1)
    last = repeated.reshape(b, h, w, d, frames, 2, 2)[..., -1, :, :]
    return last.transpose(0, 1, 4, 2, 5, 3).reshape(b, 2 * h, 2 * w, d)


class Encoder(qwen_image.Encoder):
    """The encoder. x: b H W 4 -> b h w 2z, the mean and log variance side by side."""

    def __init__(self, config: AutoencoderKLQwenImage21Config, *, rngs: nnx.Rngs):
        widths = [config.base_dim * n for n in (1, *config.dim_mult)]
        times = (*config.temperal_downsample, None)
        levels = zip(widths, widths[1:], times)
        self.conv_in = Conv2d(config.in_channels, widths[0], 3, rngs=rngs)
        self.down_blocks = nnx.List(
            [DownBlock(c, d, config.num_res_blocks, time=t, rngs=rngs) for c, d, t in levels]
        )
        self.mid_block = MidBlock(widths[-1], conv=Conv2d, rngs=rngs)
        self.norm_out = ChannelNorm(widths[-1], 3, rngs=rngs)
        self.conv_out = Conv2d(widths[-1], 2 * config.z_dim, 3, rngs=rngs)


class Decoder(qwen_image.Decoder):
    """The decoder. z: b h w z -> b H W 4."""

    def __init__(self, config: AutoencoderKLQwenImage21Config, *, rngs: nnx.Rngs):
        base = config.decoder_base_dim or config.base_dim
        widths = [base * n for n in (config.dim_mult[-1], *config.dim_mult[::-1])]
        times = (*config.temperal_downsample[::-1], None)
        levels = zip(widths, widths[1:], times)
        self.conv_in = Conv2d(config.z_dim, widths[0], 3, rngs=rngs)
        self.mid_block = MidBlock(widths[0], conv=Conv2d, rngs=rngs)
        self.up_blocks = nnx.List(
            [UpBlock(c, d, config.num_res_blocks + 1, time=t, rngs=rngs) for c, d, t in levels]
        )
        self.norm_out = ChannelNorm(widths[-1], 3, rngs=rngs)
        self.conv_out = Conv2d(widths[-1], config.out_channels, 3, rngs=rngs)


class AutoencoderKLQwenImage21(OneFrameAutoencoder):
    """Qwen-Image 2.1's autoencoder, of images with an opacity, b H W 4."""

    config_class = AutoencoderKLQwenImage21Config
    encoder_class, decoder_class, conv_class = Encoder, Decoder, Conv2d
