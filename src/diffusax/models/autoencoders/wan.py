"""Wan's autoencoder (Wan Team 2025), which takes videos in chunks of frames.

Upstream: diffusers models/autoencoders/autoencoder_kl_wan.py. Its convolutions see a frame and
those before it, so that a video is encoded and decoded chunk by chunk, each with what convolutions
remember of the one before. The first frame is a chunk of its own, and goes through the network as
an image does; the others are a loop, whose program does not grow with their number. Between layers
the frames of a chunk stand with the batch, as rows (b f) h w c.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import lecun_normal, zeros

from diffusax.boundary.config import Channels, Positive, Repeats, Shift, Widths
from diffusax.models.autoencoders import qwen_image, qwen_image21
from diffusax.models.autoencoders.latents import fold_latents, unfold_latents
from diffusax.models.autoencoders.qwen_image import Layers, LevelsConfig, check_levels
from diffusax.models.autoencoders.qwen_image21 import check_ways_around
from diffusax.models.layers.inputs import check_video
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.conv import conv2d, conv3d
from diffusax.models.streaming import unordered
from diffusax.runtime.devices.splitting import split_maps

CHUNK = 4
"""The frames that are encoded at once, after the first. Upstream has the number in its code."""


@dataclasses.dataclass(frozen=True)
class AutoencoderKLWanConfig(LevelsConfig):
    """The options of diffusers' AutoencoderKLWan."""

    class_name: ClassVar[str] = "AutoencoderKLWan"
    # A list in files. diffusers' encoder fails with attention between its levels.
    fixed: ClassVar[dict[str, Any]] = {"attn_scales": ([], ())}
    ignored: ClassVar[frozenset[str]] = frozenset({"dropout"})

    base_dim: Channels = 96
    """The channels of the encoder's level of the largest maps."""
    decoder_base_dim: Channels | None = None
    """Those of the decoder's; None for base_dim."""
    z_dim: Channels = 16
    dim_mult: Widths = (1, 2, 4, 4)
    """The channels of each level, as multiples of those."""
    num_res_blocks: Repeats = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    """Which halvings of the size of frames halve their number, too: two at most."""
    latents_mean: tuple[Shift, ...] = qwen_image.AutoencoderKLQwenImageConfig.latents_mean
    latents_std: tuple[Positive, ...] = qwen_image.AutoencoderKLQwenImageConfig.latents_std
    is_residual: bool = False
    """Whether there is a way around each level, as in Wan 2.2's."""
    in_channels: Channels = 3
    """The channels of the encoder's input, those of the pixels of a patch."""
    out_channels: Channels = 3
    """The same of the decoder's output."""
    patch_size: Repeats | None = None
    """The side of the squares of pixels that are one pixel to the network; None for one pixel."""
    scale_factor_temporal: Repeats | None = 4
    """The frames per frame of latents, for pipelines."""
    scale_factor_spatial: Channels | None = 8
    """The pixels per latent in each direction, for pipelines."""

    def __post_init__(self) -> None:
        check_levels(self)
        if self.is_residual:
            check_ways_around(self)
        if CHUNK % self.frames_per_latent:
            raise ValueError(
                "temperal_downsample must have at most two entries that are True (got "
                f"{self.temperal_downsample})"
            )
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.patch**2:
                raise ValueError(
                    f"{name} must be divisible by the {self.patch**2} pixels of a patch (got "
                    f"{getattr(self, name)})"
                )

    @property
    def patch(self) -> int:
        """The side of the squares of pixels that are one pixel to the network."""
        return self.patch_size or 1

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction."""
        return super().downsampling * self.patch

    @property
    def frames_per_latent(self) -> int:
        """The number of frames per frame of latents, after the first."""
        return 2 ** sum(self.temperal_downsample)

    @property
    def pixel_channels(self) -> int:
        """The channels of videos."""
        return self.in_channels // self.patch**2


class Remembering(nnx.Module):
    """A layer that sees frames of the chunk before. What it remembers is no part of Flax's state.

    `before` is of the chunk before, and None at the first; `after` is what the next one needs.
    Upstream: feat_cache.
    """

    before: ClassVar[Any] = None
    after: ClassVar[Any] = None

    @property
    def is_first(self) -> bool:
        """Whether it is given the first frames of videos."""
        return self.before is None

    def seen(self, x: jax.Array) -> jax.Array:
        """Returns a chunk with the remembered frames before it. x: (b f) h w c -> b f' h w c."""
        frames = x.reshape(self.before.shape[0], -1, *x.shape[1:])
        return jnp.concatenate([self.before, frames], axis=1)

    def remember(self, frames: jax.Array) -> None:
        """Keeps frames, b f h w c, for the next chunk."""
        object.__setattr__(self, "after", frames)

    def begin(self, before: Any) -> None:
        """Begins a chunk. before: what it remembers of the one before; None at the first."""
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "after", None)


class CausalConv(Remembering):
    """A convolution over frames, of each with those before it. x: (b f) h w c -> (b f) h w d.

    Before the first frame are zeros, so that it meets the last slice of the kernel alone. size: the
    kernel's, one for all axes or that of frames, rows and columns.
    """

    def __init__(self, c: int, d: int, size: int | tuple[int, int, int], *, rngs: nnx.Rngs):
        size = (size,) * 3 if isinstance(size, int) else size
        make, shape = rngs.params, (*size, c, d)
        self.kernel = nnx.Param(shaped(lecun_normal())(make(), shape, jnp.float32))
        self.bias = nnx.Param(shaped(zeros)(make(), (d,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.kernel[...]
        bias: Any = self.bias[...]
        x, (frames, rows, columns, _, _) = split_maps(x.astype(kernel.dtype)), kernel.shape
        pad = (rows // 2, rows // 2), (columns // 2, columns // 2)
        if frames == 1:
            return conv2d(x, kernel[0], padding=pad) + bias
        if self.is_first:
            nothing = jnp.zeros_like(x)
            self.remember(jnp.stack([*[nothing] * (frames - 2), x], axis=1))
            return conv2d(x, kernel[-1], padding=pad) + bias
        seen = self.seen(x)
        self.remember(seen[:, 1 - frames :])
        y = conv3d(seen, kernel, padding=((0, 0), *pad))
        return y.reshape(-1, *y.shape[2:]) + bias


class HalvedFrames(CausalConv):
    """Makes one of two frames, but leaves the first as it is. x: (b f) h w c -> (b f/2) h w d."""

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        super().__init__(c, d, (3, 1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.kernel[...]
        bias: Any = self.bias[...]
        if self.is_first:
            self.remember(x[:, None])
            return x
        seen = self.seen(x)
        self.remember(seen[:, -1:])
        y = conv3d(seen, kernel, stride=2, padding=((0, 0),) * 3)
        return y.reshape(-1, *y.shape[2:]) + bias


class DoubledFrames(CausalConv):
    """Makes two of one frame, but leaves the first as it is. x: (b f) h w c -> (b 2f) h w d/2.

    The frames after the first see none before them. Upstream: the "Rep" of its cache.
    """

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        super().__init__(c, d, (3, 1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.is_first:
            self.remember(jnp.zeros((x.shape[0], 2, *x.shape[1:]), x.dtype))
            return x
        n, h, w, c = x.shape
        both = super().__call__(x).reshape(n, h, w, 2, c)
        return both.transpose(0, 3, 1, 2, 4).reshape(2 * n, h, w, c)


LAYERS = Layers(CausalConv, HalvedFrames, DoubledFrames)


class Encoder(qwen_image.Encoder):
    """The encoder. x: (b f) h w c -> (b f') h' w' 2z, the mean and log variance side by side."""

    layers = LAYERS


class Decoder(qwen_image.Decoder):
    """The decoder. z: (b f) h w z -> (b f') h' w' c."""

    layers = LAYERS


class ResidualEncoder(qwen_image21.Encoder):
    """The encoder with a way around each level."""

    layers = LAYERS


class ResidualDecoder(qwen_image21.Decoder):
    """The decoder with a way around each level."""

    layers = LAYERS


class AutoencoderKLWan(nnx.Module):
    """Converts videos in [-1, 1] to a normal distribution over latents, and back.

    Latents here are the network's own; pipelines normalise them by `latents_mean` and
    `latents_std`.
    """

    config_class = AutoencoderKLWanConfig

    def __init__(self, config: AutoencoderKLWanConfig, *, rngs: nnx.Rngs):
        self.config = config
        residual, z = config.is_residual, config.z_dim
        self.encoder: Any = (ResidualEncoder if residual else Encoder)(config, rngs=rngs)
        self.quant_conv = CausalConv(2 * z, 2 * z, 1, rngs=rngs)
        self.post_quant_conv = CausalConv(z, z, 1, rngs=rngs)
        self.decoder: Any = (ResidualDecoder if residual else Decoder)(config, rngs=rngs)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Encodes videos: the mean and the log variance of the latents, each b f' h w z.

        Args:
            x: b f H W c. Of frames after the first those beyond a multiple of four are left out, as
                in diffusers.

        Raises:
            ValueError: x has another shape, or height or width are no multiple of what the network
                can take.
        """
        config = self.config
        check_video("x", x, config.pixel_channels)
        multiple = config.downsampling if config.is_residual else config.patch
        if x.shape[2] % multiple or x.shape[3] % multiple:
            raise ValueError(
                f"x must have a height and width that are multiples of {multiple} (got "
                f"{x.shape[2]}x{x.shape[3]})"
            )

        def encode(rows: jax.Array) -> jax.Array:
            patches = fold_latents(rows.swapaxes(1, 2), config.patch).swapaxes(1, 2)
            return self.quant_conv(self.encoder(patches))

        mean, logvar = jnp.split(_over_chunks(self.encoder, encode, x, CHUNK), 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0)

    def decode(self, z: jax.Array) -> jax.Array:
        """Decodes latents to videos. z: b f h w z -> b F H W c, about [-1, 1].

        Raises:
            ValueError: z has another shape.
        """
        check_video("z", z, self.config.z_dim)

        def decode(rows: jax.Array) -> jax.Array:
            patches = self.decoder(self.post_quant_conv(rows))
            return unfold_latents(patches.swapaxes(1, 2), self.config.patch).swapaxes(1, 2)

        return _over_chunks(self.decoder, decode, z, 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Reconstructs videos from the latents' mean. x: b f H W c -> b f H W c."""
        return self.decode(self.encode(x)[0])


def _over_chunks(
    module: Any, call: Callable[[jax.Array], jax.Array], x: jax.Array, size: int
) -> jax.Array:
    """Gives a module the first frame of videos, and then `size` frames at a time.

    Args:
        module: has the layers that remember.
        call: takes the frames of a chunk to the results, both as rows (b f) h w c.
        x: the videos, b f h w c.
        size: the frames of a chunk.
    """
    layers = [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, Remembering)]
    b = x.shape[0]

    def chunk(first: Any, count: int, memory: list[Any]) -> tuple[jax.Array, list[Any]]:
        for layer, before in zip(layers, memory):
            layer.begin(before)
        rows = jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)
        y = call(rows.reshape(-1, *x.shape[2:]))
        kept = [layer.after for layer in layers]
        for layer in layers:
            # Arrays of a loop must not be seen outside of it.
            layer.begin(None)
        return y.reshape(b, -1, *y.shape[1:]), kept

    def step(memory: list[Any], i: jax.Array) -> tuple[list[Any], jax.Array]:
        with unordered():
            y, memory = chunk(1 + size * i, size, memory)
        return memory, y

    first, memory = chunk(0, 1, [None] * len(layers))
    count = (x.shape[1] - 1) // size
    if not count:
        return first
    _, rest = jax.lax.scan(step, memory, jnp.arange(count))
    rest = jnp.moveaxis(rest, 0, 1)
    return jnp.concatenate([first, rest.reshape(b, -1, *rest.shape[3:])], axis=1)
