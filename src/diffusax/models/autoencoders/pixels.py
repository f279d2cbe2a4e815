"""What stands in the place of an autoencoder where a diffusion model works on pixels."""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from diffusax.models.network import Network


@dataclasses.dataclass(frozen=True)
class PixelsConfig:
    """The options of an autoencoder whose latents are the pixels themselves."""

    class_name: ClassVar[str] = "Pixels"
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    latent_channels: int = 3
    downsampling: int = 1
    scaling_factor: float = 1.0
    shift_factor: float | None = None


class Pixels(nnx.Module):
    """An autoencoder without parameters that leaves images in [-1, 1] as they are."""

    config_class = PixelsConfig

    def __init__(self, config: PixelsConfig, *, rngs: nnx.Rngs):
        self.config: Any = config

    def encode(self, x: jax.Array) -> jax.Array:
        """Returns the images, b h w c, as their own latents."""
        return x

    def decode(self, z: jax.Array) -> jax.Array:
        """Returns the latents, b h w c, which are images."""
        return z


def pixels(channels: int) -> Network:
    """Returns the network for images of this many channels; its parameters are an empty tree."""
    return Network(Pixels, PixelsConfig(channels))
