"""Qwen-Image's autoencoder (Qwen Team 2025), which is Wan's of videos, for images.

Upstream: diffusers models/autoencoders/autoencoder_kl_qwenimage.py. Its convolutions see a frame
and those before it. Before the first are zeros, so that an image meets the last slice of each
kernel alone, and layers over frames leave the first one as it is: what is left has two dimensions.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import lecun_normal, ones, zeros

from diffusax.boundary.config import (
    Channels,
    Keyed,
    Positive,
    Repeats,
    Shift,
    Widths,
    check_types,
)
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d
from diffusax.models.layers.resnet import upsample_nearest
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.activations import silu
from diffusax.models.ops.attention import attention
from diffusax.models.ops.conv import conv2d
from diffusax.models.ops.norms import rms_norm

_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
# PyTorch divides by a norm of at least 1e-12.
_EPS = 1e-24


class LevelsConfig(Keyed):
    """What follows from the options of Wan's autoencoder and of those that are made of it."""

    scaling_factor: ClassVar[float] = 1.0
    shift_factor: ClassVar[None] = None
    sample_size: ClassVar[int] = 256
    """The side of tiles in pixels, as in diffusers."""

    @property
    def widths(self: Any) -> tuple[int, ...]:
        """The channels of each level of the encoder."""
        return tuple(self.base_dim * n for n in self.dim_mult)

    @property
    def decoder_widths(self: Any) -> tuple[int, ...]:
        """The channels of each level of the decoder, that of the smallest maps first."""
        base = getattr(self, "decoder_base_dim", None) or self.base_dim
        return tuple(base * n for n in self.dim_mult[::-1])

    @property
    def latent_channels(self: Any) -> int:
        """The channels of latents."""
        return self.z_dim  # type: ignore[no-any-return]

    @property
    def downsampling(self: Any) -> int:
        """The number of pixels per latent in each direction."""
        return 2 ** (len(self.dim_mult) - 1)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class AutoencoderKLQwenImageConfig(LevelsConfig):
    """The options of diffusers' AutoencoderKLQwenImage."""

    class_name: ClassVar[str] = "AutoencoderKLQwenImage"
    # A list in files. diffusers' encoder fails with attention between its levels.
    fixed: ClassVar[dict[str, Any]] = {"attn_scales": ([], ())}
    ignored: ClassVar[frozenset[str]] = frozenset({"dropout"})

    base_dim: Channels = 96
    """The channels of the level of the image's own size."""
    z_dim: Channels = 16
    dim_mult: Widths = (1, 2, 4, 4)
    """The channels of each level, as multiples of base_dim."""
    num_res_blocks: Repeats = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    """Which halvings of the size of images halve the number of frames of videos, too."""
    input_channels: Channels = 3
    latents_mean: tuple[Shift, ...] = _MEAN
    latents_std: tuple[Positive, ...] = _STD

    def __post_init__(self) -> None:
        check_levels(self)

    @property
    def in_channels(self) -> int:
        """The channels of images."""
        return self.input_channels

    out_channels = in_channels


def check_levels(config: Any) -> None:
    """Raises ValueError where the options of an autoencoder of videos do not fit each other."""
    check_types(config)
    if len(config.temperal_downsample) != len(config.dim_mult) - 1:
        raise ValueError(
            "temperal_downsample must have one entry for each level of dim_mult but the last "
            f"(got {len(config.temperal_downsample)} for {len(config.dim_mult)} levels)"
        )
    for name in ("latents_mean", "latents_std"):
        if len(getattr(config, name)) != config.z_dim:
            raise ValueError(
                f"{name} must have one entry per latent channel (got "
                f"{len(getattr(config, name))} for z_dim={config.z_dim})"
            )


class FrameConv(nnx.Module):
    """What a causal convolution of videos does to an image. x: b h w c -> b h w d."""

    def __init__(self, c: int, d: int, size: int, *, rngs: nnx.Rngs):
        make, shape = rngs.params, (size, size, c, d)
        self.frame_kernel = nnx.Param(shaped(lecun_normal())(make(), shape, jnp.float32))
        self.bias = nnx.Param(shaped(zeros)(make(), (d,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.frame_kernel[...]
        pad = (kernel.shape[0] // 2, kernel.shape[0] // 2)
        y = conv2d(x.astype(kernel.dtype), kernel, padding=(pad, pad))
        bias: Any = self.bias[...]
        return y + bias


class ChannelNorm(nnx.Module):
    """Divides by the root mean square of the channels, in float32. x: ... c -> ... c.

    axes: how many axes of length one the parameter has in checkpoints.
    """

    def __init__(self, c: int, axes: int, *, rngs: nnx.Rngs):
        shape = (c, *(1,) * axes)
        self.gamma = nnx.Param(shaped(ones)(rngs.params(), shape, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        gamma: Any = self.gamma[...]
        return rms_norm(x, gamma.reshape(-1), eps=_EPS)


class ResidualBlock(nnx.Module):
    """Two convolutions, each after a norm and SiLU, added to x: b h w c -> b h w d.

    conv: the class of its convolutions.
    """

    def __init__(self, c: int, d: int, *, conv: Any, rngs: nnx.Rngs):
        self.norm1 = ChannelNorm(c, 3, rngs=rngs)
        self.conv1 = conv(c, d, 3, rngs=rngs)
        self.norm2 = ChannelNorm(d, 3, rngs=rngs)
        self.conv2 = conv(d, d, 3, rngs=rngs)
        self.conv_shortcut = conv(c, d, 1, rngs=rngs) if c != d else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.conv1(silu(self.norm1(x)))
        h = self.conv2(silu(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class AttentionBlock(nnx.Module):
    """Attention of all pixels to all, with one head, added to x: b h w c -> b h w c."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        self.norm = ChannelNorm(c, 2, rngs=rngs)
        self.to_qkv = Conv2d(c, 3 * c, 1, rngs=rngs)
        self.proj = Conv2d(c, c, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        tokens = self.to_qkv(self.norm(x)).reshape(b, h * w, 1, 3 * c)
        q, k, v = jnp.split(tokens, 3, axis=-1)
        return x + self.proj(attention(q, k, v).reshape(b, h, w, c))


class TimeConv(nnx.Module):
    """The parameters of a convolution over frames alone, which leaves the first one as it is.

    They are kept as the checkpoint has them. size: the last axes of the kernel in checkpoints.
    """

    is_first: ClassVar[bool] = True
    """Whether it is given the first frames of videos."""

    def __init__(self, c: int, d: int, size: tuple[int, ...] = (3, 1, 1), *, rngs: nnx.Rngs):
        make, shape = rngs.params, (d, c, *size)
        self.weight = nnx.Param(shaped(lecun_normal())(make(), shape, jnp.float32))
        self.bias = nnx.Param(shaped(zeros)(make(), (d,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Layers(NamedTuple):
    """The classes of an autoencoder's layers that see several frames of videos.

    They are built of (the input's channels, the output's), and `conv` of its kernel's size, too.
    """

    conv: Any
    """Convolves frames with those before them."""
    halve: Any
    """Makes one of two frames."""
    double: Any
    """Makes two of one frame."""


ONE_FRAME = Layers(FrameConv, TimeConv, TimeConv)


class Downsample(nnx.Module):
    """A convolution of stride 2. x: b h w c -> b h/2 w/2 c.

    time: the class of the layer that halves the number of frames, too; None where none does.
    """

    def __init__(self, c: int, *, time: Any, rngs: nnx.Rngs):
        # The checkpoint numbers the layers; 0 is the padding below and to the right.
        conv = Conv2d(c, c, 3, stride=2, padding=((0, 1), (0, 1)), rngs=rngs)
        self.resample: Any = nnx.List([None, conv])
        self.time_conv = None if time is None else time(c, c, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.resample[1](x)
        return x if self.time_conv is None else self.time_conv(x)


class Upsample(nnx.Module):
    """Repeats pixels, and convolves them. x: b h w c -> b 2h 2w d.

    time: the class of the layer that doubles the number of frames, too; None where none does.
    """

    def __init__(self, c: int, d: int, *, time: Any, rngs: nnx.Rngs):
        # The checkpoint numbers the layers; 0 is the enlargement.
        self.resample: Any = nnx.List([None, Conv2d(c, d, 3, rngs=rngs)])
        self.time_conv = None if time is None else time(c, 2 * c, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.time_conv is None else self.time_conv(x)
        return self.resample[1](upsample_nearest(x, (2 * x.shape[1], 2 * x.shape[2])))


class MidBlock(nnx.Module):
    """A residual block, attention and a residual block. x: b h w c -> b h w c.

    conv: the class of the residual blocks' convolutions.
    """

    def __init__(self, c: int, *, conv: Any, rngs: nnx.Rngs):
        self.resnets = nnx.List([ResidualBlock(c, c, conv=conv, rngs=rngs) for _ in range(2)])
        self.attentions = nnx.List([AttentionBlock(c, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Encoder(nnx.Module):
    """The encoder. x: b H W 3 -> b h w 2z, the mean and log variance side by side."""

    layers: ClassVar[Layers] = ONE_FRAME

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        conv, last = self.layers.conv, config.widths[-1]
        self.conv_in: Any = conv(config.in_channels, config.base_dim, 3, rngs=rngs)
        self.down_blocks: Any = nnx.List(self._levels(config, rngs))
        self.mid_block = MidBlock(last, conv=conv, rngs=rngs)
        self.norm_out = ChannelNorm(last, 3, rngs=rngs)
        self.conv_out: Any = conv(last, 2 * config.z_dim, 3, rngs=rngs)

    def _levels(self, config: Any, rngs: nnx.Rngs) -> list[Any]:
        """Builds the layers of all levels, in one row."""
        c, rows = config.base_dim, list[Any]()
        for i, d in enumerate(config.widths):
            for _ in range(config.num_res_blocks):
                rows.append(ResidualBlock(c, d, conv=self.layers.conv, rngs=rngs))
                c = d
            if i < len(config.widths) - 1:
                time = self.layers.halve if config.temperal_downsample[i] else None
                rows.append(Downsample(d, time=time, rngs=rngs))
        return rows

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv_in(x)
        for layer in self.down_blocks:
            x = layer(x)
        return self.conv_out(silu(self.norm_out(self.mid_block(x))))


class UpBlock(nnx.Module):
    """The residual blocks of one resolution, and the enlargement after them, if any.

    x: b h w c -> b h w d, or b 2h 2w d/2.
    """

    def __init__(
        self, c: int, d: int, count: int, *, layers: Layers, time: bool | None, rngs: nnx.Rngs
    ):
        """Builds the layers.

        Args:
            c: the input's channels.
            d: those of the residual blocks.
            count: how many residual blocks there are.
            layers: the classes of layers.
            time: whether the enlargement is one of frames, too; None for no enlargement.
            rngs: the keys of the parameters.
        """
        widths = [c, *[d] * (count - 1)]
        self.resnets = nnx.List([ResidualBlock(n, d, conv=layers.conv, rngs=rngs) for n in widths])
        double = layers.double if time else None
        self.upsamplers = (
            None if time is None else nnx.List([Upsample(d, d // 2, time=double, rngs=rngs)])
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for resnet in self.resnets:
            x = resnet(x)
        return x if self.upsamplers is None else self.upsamplers[0](x)


class Decoder(nnx.Module):
    """The decoder. z: b h w z -> b H W 3."""

    layers: ClassVar[Layers] = ONE_FRAME
    block: ClassVar[Any] = UpBlock
    """The class of the levels."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        conv, widths = self.layers.conv, config.decoder_widths
        times = (*config.temperal_downsample[::-1], None)
        self.conv_in: Any = conv(config.z_dim, widths[0], 3, rngs=rngs)
        self.mid_block = MidBlock(widths[0], conv=conv, rngs=rngs)
        self.up_blocks: Any = nnx.List(
            [
                self.block(
                    c, d, config.num_res_blocks + 1, layers=self.layers, time=time, rngs=rngs
                )
                for c, d, time in zip(self._inputs(widths), widths, times)
            ]
        )
        self.norm_out = ChannelNorm(widths[-1], 3, rngs=rngs)
        self.conv_out: Any = conv(widths[-1], config.out_channels, 3, rngs=rngs)

    def _inputs(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the channels that each level is given: an enlargement halves them."""
        return widths[0], *(d // 2 for d in widths)

    def __call__(self, z: jax.Array) -> jax.Array:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(silu(self.norm_out(x)))


class OneFrameAutoencoder(nnx.Module):
    """Converts images in [-1, 1] to a normal distribution over latents, and back.

    Latents here are the network's own; the pipeline normalises them by `latents_mean` and
    `latents_std`.
    """

    encoder_class: ClassVar[Any]
    decoder_class: ClassVar[Any]

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.config = config
        z = config.z_dim
        self.encoder = self.encoder_class(config, rngs=rngs)
        conv = self.encoder_class.layers.conv
        self.quant_conv = conv(2 * z, 2 * z, 1, rngs=rngs)
        self.post_quant_conv = conv(z, z, 1, rngs=rngs)
        self.decoder = self.decoder_class(config, rngs=rngs)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Encodes images. x: b H W c -> the mean and the log variance of the latents, each b h w z.

        Raises:
            ValueError: x has another shape.
        """
        check_map("x", x, self.config.in_channels)
        mean, logvar = jnp.split(self.quant_conv(self.encoder(x)), 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0)

    def decode(self, z: jax.Array) -> jax.Array:
        """Decodes latents. z: b h w z -> b H W c, about [-1, 1].

        Raises:
            ValueError: z has another shape.
        """
        check_map("z", z, self.config.z_dim)
        return self.decoder(self.post_quant_conv(z))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Reconstructs images from the latents' mean. x: b H W c -> b H W c."""
        return self.decode(self.encode(x)[0])


class AutoencoderKLQwenImage(OneFrameAutoencoder):
    """Qwen-Image's autoencoder, of images b H W 3.

    Saved, it decodes and encodes images in diffusers as it does here, and no videos: what kernels
    do to earlier frames is not read, and zeros are written for it.
    """

    config_class = AutoencoderKLQwenImageConfig
    encoder_class, decoder_class = Encoder, Decoder
