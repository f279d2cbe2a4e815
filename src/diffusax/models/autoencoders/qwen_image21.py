"""Qwen-Image 2.1's autoencoder (Qwen 2026), of images with an opacity.

Upstream: diffusers models/autoencoders/autoencoder_kl_qwenimage21.py. It is Wan 2.2's of videos
with the convolutions that an image meets alone, and with a way around each level: means of pixels
beside each other on the way down, and copies of them on the way up. Those count frames, too, of
which an image has one, after zeros.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.boundary.config import Channels, Positive, Repeats, Shift, Widths
from diffusax.models.autoencoders import qwen_image
from diffusax.models.autoencoders.qwen_image import (
    Downsample,
    Layers,
    LevelsConfig,
    OneFrameAutoencoder,
    ResidualBlock,
    TimeConv,
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
class AutoencoderKLQwenImage21Config(LevelsConfig):
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
        check_ways_around(self)


def check_ways_around(config: Any) -> None:
    """Raises ValueError where means of channels cannot be those of the encoder's last level."""
    before, last = (1, *config.dim_mult)[-2:]
    if before % last:
        raise ValueError(
            "dim_mult must not have more channels on the last level than on the one before "
            f"(got {config.dim_mult})"
        )


class DownBlock(nnx.Module):
    """Residual blocks and, but for the last level, the reduction, with a way around both.

    x: b h w c -> b h/2 w/2 d, or b h w d.
    """

    def __init__(
        self, c: int, d: int, count: int, *, layers: Layers, time: bool | None, rngs: nnx.Rngs
    ):
        """Builds the layers. time: whether the reduction is one of frames, too; None for none.

        The others are those of `qwen_image.UpBlock`.
        """
        widths = [c, *[d] * (count - 1)]
        self.resnets = nnx.List([ResidualBlock(n, d, conv=layers.conv, rngs=rngs) for n in widths])
        halve = layers.halve if time else None
        self.downsampler = None if time is None else Downsample(d, time=halve, rngs=rngs)
        self.channels = d

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        if self.downsampler is None:
            return h + group_means(x, self.channels, side=1, time=None)
        means = group_means(x, self.channels, side=2, time=self.downsampler.time_conv)
        return self.downsampler(h) + means


class UpBlock(nnx.Module):
    """Residual blocks and, but for the last level, the enlargement, with a way around both.

    x: b h w c -> b 2h 2w d, or b h w d.
    """

    def __init__(
        self, c: int, d: int, count: int, *, layers: Layers, time: bool | None, rngs: nnx.Rngs
    ):
        """Builds the layers, see `qwen_image.UpBlock`."""
        widths = [c, *[d] * (count - 1)]
        self.resnets = nnx.List([ResidualBlock(n, d, conv=layers.conv, rngs=rngs) for n in widths])
        double = layers.double if time else None
        self.upsampler = None if time is None else Upsample(d, d, time=double, rngs=rngs)
        self.channels = d

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        if self.upsampler is None:
            return h
        spread = spread_channels(x, self.channels, time=self.upsampler.time_conv)
        return self.upsampler(h) + spread


def group_means(x: jax.Array, d: int, *, side: int, time: Any) -> jax.Array:
    """Returns means over squares of pixels and groups of channels, b h w c -> b h/side w/side d.

    They are over pairs of frames, too, where there is a layer `time` that halves their number; a
    first frame is the second of its pair, after zeros. Upstream: autoencoder_kl_wan.py, AvgDown3D.
    """
    _, h, w, c = x.shape
    frames = 1 if time is None or time.is_first else 2
    cut = x.reshape(-1, frames, h // side, side, w // side, side, c)
    cut = cut.transpose(0, 2, 4, 6, 1, 3, 5)
    flat = cut.reshape(*cut.shape[:4], frames, side**2)
    if time is not None and time.is_first:
        flat = jnp.pad(flat, ((0, 0),) * 4 + ((1, 0), (0, 0)))
    groups = flat.reshape(*flat.shape[:3], d, -1).astype(jnp.float32)
    return groups.mean(-1).astype(x.dtype)


def spread_channels(x: jax.Array, d: int, *, time: Any) -> jax.Array:
    """Returns squares of pixels that repeat channels, b h w c -> b 2h 2w d.

    They are in two frames where there is a layer `time` that doubles their number, of which a first
    frame has the second alone. Upstream: autoencoder_kl_wan.py, DupUp3D.
    """
    b, h, w, c = x.shape
    frames = 1 if time is None else 2
    squares = jnp.repeat(x, d * frames * 4 // c, axis=-1).reshape(b, h, w, d, frames, 2, 2)
    kept = squares[..., -1:, :, :] if time is not None and time.is_first else squares
    return kept.transpose(0, 4, 1, 5, 2, 6, 3).reshape(-1, 2 * h, 2 * w, d)


_time_conv = functools.partial(TimeConv, size=(1, 1))
ONE_FRAME = Layers(Conv2d, _time_conv, _time_conv)


class Encoder(qwen_image.Encoder):
    """The encoder. x: b H W 4 -> b h w 2z, the mean and log variance side by side."""

    layers = ONE_FRAME

    def _levels(self, config: Any, rngs: nnx.Rngs) -> list[Any]:
        widths = config.base_dim, *config.widths
        times = *config.temperal_downsample, None
        given: dict[str, Any] = {"layers": self.layers, "rngs": rngs}
        return [
            DownBlock(c, d, config.num_res_blocks, time=time, **given)
            for c, d, time in zip(widths, config.widths, times)
        ]


class Decoder(qwen_image.Decoder):
    """The decoder. z: b h w z -> b H W 4."""

    layers = ONE_FRAME
    block = UpBlock

    def _inputs(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        return widths[0], *widths


class AutoencoderKLQwenImage21(OneFrameAutoencoder):
    """Qwen-Image 2.1's autoencoder, of images with an opacity, b H W 4."""

    config_class = AutoencoderKLQwenImage21Config
    encoder_class, decoder_class = Encoder, Decoder
