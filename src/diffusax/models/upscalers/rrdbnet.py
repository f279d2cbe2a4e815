"""RRDBNet, the network of ESRGAN (Wang et al. 2018) and Real-ESRGAN (Wang et al. 2021)."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import Channels, Keyed, check_types
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d
from diffusax.models.layers.resnet import upsample_nearest

_SLOPE = 0.2
"""Of the activation below zero."""
_SHARE = 0.2
"""Of a block's result that is added to its input."""


@dataclasses.dataclass(frozen=True)
class RRDBNetConfig(Keyed):
    """The options of BasicSR's RRDBNet, and what files of the older form vary besides."""

    class_name: ClassVar[str] = "RRDBNet"
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    num_feat: Channels = 64
    num_block: Annotated[int, Meta(ge=1, le=64)] = 23
    num_grow_ch: Channels = 32
    unshuffle: Literal[1, 2, 4] = 1
    """The sides of the squares of pixels that become channels first: 2 for Real-ESRGAN x2."""
    doublings: Annotated[int, Meta(ge=0, le=3)] = 2
    """How often the image is doubled after the blocks."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def scale(self) -> float:
        """How many times larger the sides of images become."""
        return 2**self.doublings / self.unshuffle


class DenseBlock(nnx.Module):
    """Five convolutions, each of which sees the results of those before. x: b h w c -> b h w c."""

    def __init__(self, config: RRDBNetConfig, *, rngs: nnx.Rngs):
        c, grow = config.num_feat, config.num_grow_ch
        self.conv1 = Conv2d(c, grow, 3, rngs=rngs)
        self.conv2 = Conv2d(c + grow, grow, 3, rngs=rngs)
        self.conv3 = Conv2d(c + 2 * grow, grow, 3, rngs=rngs)
        self.conv4 = Conv2d(c + 3 * grow, grow, 3, rngs=rngs)
        self.conv5 = Conv2d(c + 4 * grow, c, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        seen = x
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            seen = jnp.concatenate([seen, _activated(conv(seen))], axis=-1)
        return self.conv5(seen) * _SHARE + x


class ResidualBlock(nnx.Module):
    """Three dense blocks around which the input goes. x: b h w c -> b h w c."""

    def __init__(self, config: RRDBNetConfig, *, rngs: nnx.Rngs):
        self.rdb1 = DenseBlock(config, rngs=rngs)
        self.rdb2 = DenseBlock(config, rngs=rngs)
        self.rdb3 = DenseBlock(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rdb3(self.rdb2(self.rdb1(x))) * _SHARE + x


class RRDBNet(nnx.Module):
    """Makes images larger by a factor of its own.

    Upstream: BasicSR basicsr/archs/rrdbnet_arch.py.
    """

    config_class = RRDBNetConfig

    def __init__(self, config: RRDBNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config.num_feat
        self.conv_first = Conv2d(3 * config.unshuffle**2, c, 3, rngs=rngs)
        self.body = nnx.List([ResidualBlock(config, rngs=rngs) for _ in range(config.num_block)])
        self.conv_body = Conv2d(c, c, 3, rngs=rngs)
        for i in range(config.doublings):
            setattr(self, f"conv_up{i + 1}", Conv2d(c, c, 3, rngs=rngs))
        self.conv_hr = Conv2d(c, c, 3, rngs=rngs)
        self.conv_last = Conv2d(c, 3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Makes images larger. x: b h w 3 in [0, 1] -> b H W 3, about in [0, 1].

        Raises:
            ValueError: x has another shape, or sides that are no multiples of `unshuffle`.
        """
        check_map("x", x, 3)
        x = self.conv_first(_unshuffled(x, self.config.unshuffle))
        y = x
        for block in self.body:
            y = block(y)
        x = x + self.conv_body(y)
        for i in range(self.config.doublings):
            _, h, w, _ = x.shape
            up: Any = getattr(self, f"conv_up{i + 1}")
            x = _activated(up(upsample_nearest(x, (2 * h, 2 * w))))
        return self.conv_last(_activated(self.conv_hr(x)))


def _activated(x: jax.Array) -> jax.Array:
    return nnx.leaky_relu(x, _SLOPE)


def _unshuffled(x: jax.Array, side: int) -> jax.Array:
    """Turns squares of pixels into channels, as PyTorch's pixel_unshuffle orders them."""
    if side == 1:
        return x
    b, h, w, c = x.shape
    if h % side or w % side:
        raise ValueError(f"x must have sides divisible by {side} (got {h}x{w})")
    squares = x.reshape(b, h // side, side, w // side, side, c)
    return squares.transpose(0, 1, 3, 5, 2, 4).reshape(b, h // side, w // side, c * side**2)
