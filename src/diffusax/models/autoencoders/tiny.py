"""The tiny autoencoder (TAESD, Ollin Boer Bohan 2023): a fast stand-in for AutoencoderKL."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import Channels, Keyed, Positive, Shift, Widths, check_types
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d
from diffusax.models.layers.resnet import upsample_nearest

Blocks = Annotated[int, Meta(ge=0, le=16)]


@dataclasses.dataclass(frozen=True)
class AutoencoderTinyConfig(Keyed):
    """The options of diffusers' AutoencoderTiny."""

    class_name: ClassVar[str] = "AutoencoderTiny"
    fixed: ClassVar[dict[str, Any]] = {"act_fn": "relu", "upsample_fn": "nearest"}
    # diffusers derives this option from decoder_block_out_channels and writes both.
    ignored: ClassVar[frozenset[str]] = frozenset({"block_out_channels"})

    in_channels: Channels = 3
    out_channels: Channels = 3
    encoder_block_out_channels: Widths = (64, 64, 64, 64)
    decoder_block_out_channels: Widths = (64, 64, 64, 64)
    latent_channels: Channels = 4
    upsampling_scaling_factor: Annotated[int, Meta(ge=1, le=8)] = 2
    num_encoder_blocks: tuple[Blocks, ...] = (1, 3, 3, 3)
    num_decoder_blocks: tuple[Blocks, ...] = (3, 3, 3, 1)
    latent_magnitude: Positive = 3.0
    latent_shift: Shift = 0.5
    force_upcast: bool = False
    scaling_factor: Positive = 1.0
    shift_factor: Shift = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for side in ("encoder", "decoder"):
            widths = getattr(self, f"{side}_block_out_channels")
            counts = getattr(self, f"num_{side}_blocks")
            if len(widths) != len(counts):
                raise ValueError(
                    f"num_{side}_blocks must have one entry per level of {side}_block_out_channels "
                    f"(got {len(counts)} for {len(widths)} levels)"
                )
            if len(set(widths)) != 1:
                raise ValueError(
                    f"{side}_block_out_channels must all be equal (got {widths}): AutoencoderTiny "
                    "has no layer that changes the width"
                )

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction."""
        return self.upsampling_scaling_factor ** (len(self.decoder_block_out_channels) - 1)


class Block(nnx.Module):
    """Three convolutions and a skip connection. x: b h w c -> b h w c."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        # The checkpoint numbers the convolutions 0, 2 and 4, with activations between them.
        conv = [Conv2d(c, c, 3, rngs=rngs) for _ in range(3)]
        self.conv: Any = nnx.List([conv[0], None, conv[1], None, conv[2]])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.conv[0](x))
        h = nnx.relu(self.conv[2](h))
        return nnx.relu(self.conv[4](h) + x)


class EncoderTiny(nnx.Module):
    """The encoder. x: b H W 3 in [-1, 1] -> latents b h w z."""

    def __init__(self, config: AutoencoderTinyConfig, *, rngs: nnx.Rngs):
        layers: list[nnx.Module] = []
        for i, (c, count) in enumerate(
            zip(config.encoder_block_out_channels, config.num_encoder_blocks)
        ):
            if i == 0:
                layers.append(Conv2d(config.in_channels, c, 3, rngs=rngs))
            else:
                layers.append(Conv2d(c, c, 3, stride=2, bias=False, rngs=rngs))
            layers += [Block(c, rngs=rngs) for _ in range(count)]
        layers.append(Conv2d(c, config.latent_channels, 3, rngs=rngs))
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = (x + 1) / 2
        for layer in self.layers:
            x = layer(x)
        return x


class DecoderTiny(nnx.Module):
    """The decoder. Latents b h w z -> b H W 3 in [-1, 1]."""

    def __init__(self, config: AutoencoderTinyConfig, *, rngs: nnx.Rngs):
        self.factor = config.upsampling_scaling_factor
        widths, counts = config.decoder_block_out_channels, config.num_decoder_blocks
        last = len(widths) - 1
        # None takes the number of a layer without parameters in the checkpoint.
        layers: list[nnx.Module | None] = [
            Conv2d(config.latent_channels, widths[0], 3, rngs=rngs),
            None,
        ]
        for i, (c, count) in enumerate(zip(widths, counts)):
            layers += [Block(c, rngs=rngs) for _ in range(count)]
            if i < last:
                layers += [None, Conv2d(c, c, 3, bias=False, rngs=rngs)]
            else:
                layers.append(Conv2d(c, config.out_channels, 3, rngs=rngs))
        self.layers: Any = nnx.List(layers)

    def __call__(self, z: jax.Array) -> jax.Array:
        x = nnx.relu(self.layers[0](3 * jnp.tanh(z / 3)))
        for layer in self.layers[2:]:
            if layer is None:
                _, h, w, _ = x.shape
                x = upsample_nearest(x, (h * self.factor, w * self.factor))
            else:
                x = layer(x)
        return 2 * x - 1


class AutoencoderTiny(nnx.Module):
    """Converts images in [-1, 1] to latents and back.

    Upstream: diffusers models/autoencoders/autoencoder_tiny.py.
    """

    config_class = AutoencoderTinyConfig

    def __init__(self, config: AutoencoderTinyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = EncoderTiny(config, rngs=rngs)
        self.decoder = DecoderTiny(config, rngs=rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        """Encodes images. x: b H W 3 -> latents b h w z.

        Raises:
            ValueError: x has another shape.
        """
        check_map("x", x, self.config.in_channels)
        return self.encoder(x)

    def decode(self, z: jax.Array) -> jax.Array:
        """Decodes latents. z: b h w z -> b H W 3.

        Raises:
            ValueError: z has another shape.
        """
        check_map("z", z, self.config.latent_channels)
        return self.decoder(z)

    def scale_latents(self, z: jax.Array) -> jax.Array:
        """Scales latents to [0, 1] and clips them there, to store them as an image. z: b h w z."""
        return jnp.clip(z / (2 * self.config.latent_magnitude) + self.config.latent_shift, 0, 1)

    def unscale_latents(self, z: jax.Array) -> jax.Array:
        """Inverts `scale_latents`. z: b h w z."""
        return (z - self.config.latent_shift) * (2 * self.config.latent_magnitude)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Reconstructs images from latents rounded to bytes, as upstream. x: b H W 3 -> b H W 3."""
        stored = jnp.round(self.scale_latents(self.encode(x)) * 255)
        return self.decode(self.unscale_latents(stored / 255))
