"""T2I-Adapter: an image steers a UNet through maps that are computed once (Mou et al. 2023)."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import Channels, Keyed, Repeats, Widths, check_types
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d

AdapterType = Literal["full_adapter", "full_adapter_xl", "light_adapter"]


@dataclasses.dataclass(frozen=True)
class T2IAdapterConfig(Keyed):
    """The options of diffusers' T2IAdapter."""

    class_name: ClassVar[str] = "T2IAdapter"
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    in_channels: Channels = 3
    channels: Widths = (320, 640, 1280, 1280)
    num_res_blocks: Repeats = 2
    downscale_factor: Annotated[int, Meta(ge=1, le=64)] = 8
    adapter_type: AdapterType = "full_adapter"

    def __post_init__(self) -> None:
        check_types(self)
        if self.adapter_type == "light_adapter" and min(self.channels) < 4:
            raise ValueError(
                f"channels must be at least 4 in a light_adapter (got {self.channels})"
            )
        # Upstream's fourth block and those after it take their own width, whatever comes before.
        if self.adapter_type == "full_adapter_xl" and len(set(self.channels[2:])) > 1:
            raise ValueError(
                "channels must not change after the third in a full_adapter_xl "
                f"(got {self.channels})"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of each map, the largest map first."""
        if self.adapter_type == "light_adapter":
            return (*self.channels, self.channels[-1])
        return self.channels

    @property
    def halved(self) -> tuple[bool, ...]:
        """Whether each map has half the height and width of the one before."""
        if self.adapter_type == "full_adapter_xl":
            return tuple(i == 2 for i in range(len(self.widths)))
        return tuple(i > 0 for i in range(len(self.widths)))

    @property
    def total_downscale_factor(self) -> int:
        """The pixels per entry of the smallest map in each direction."""
        # Upstream counts a halving of full_adapter_xl even where it has fewer than three blocks.
        halvings = 1 if self.adapter_type == "full_adapter_xl" else sum(self.halved)
        return self.downscale_factor * 2**halvings


class AdapterResnetBlock(nnx.Module):
    """Two convolutions with a ReLU between them, added to their input. x: b h w c -> b h w c."""

    def __init__(self, c: int, last_kernel: int, *, rngs: nnx.Rngs):
        self.block1 = Conv2d(c, c, 3, rngs=rngs)
        self.block2 = Conv2d(c, c, last_kernel, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block2(jax.nn.relu(self.block1(x))) + x


class AdapterBlock(nnx.Module):
    """Resnets of one width, after a pooling to half the size if `down`. x: b h w c -> b h' w' d."""

    def __init__(self, c: int, d: int, count: int, *, down: bool, rngs: nnx.Rngs):
        self.down = down
        self.in_conv = Conv2d(c, d, 1, rngs=rngs) if c != d else None
        self.resnets = nnx.List([AdapterResnetBlock(d, 1, rngs=rngs) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = _halve(x) if self.down else x
        x = x if self.in_conv is None else self.in_conv(x)
        for resnet in self.resnets:
            x = resnet(x)
        return x


class LightAdapterBlock(nnx.Module):
    """Like AdapterBlock, but the resnets have a quarter of the width."""

    def __init__(self, c: int, d: int, count: int, *, down: bool, rngs: nnx.Rngs):
        self.down = down
        self.in_conv = Conv2d(c, d // 4, 1, rngs=rngs)
        self.resnets = nnx.List([AdapterResnetBlock(d // 4, 3, rngs=rngs) for _ in range(count)])
        self.out_conv = Conv2d(d // 4, d, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.in_conv(_halve(x) if self.down else x)
        for resnet in self.resnets:
            x = resnet(x)
        return self.out_conv(x)


class AdapterBody(nnx.Module):
    """The layers of an adapter. x: b h w c, unshuffled pixels -> a map b h' w' d for each block."""

    def __init__(self, config: T2IAdapterConfig, *, rngs: nnx.Rngs):
        light = config.adapter_type == "light_adapter"
        inputs = config.in_channels * config.downscale_factor**2
        first = config.channels[0]
        self.conv_in = None if light else Conv2d(inputs, first, 3, rngs=rngs)
        block: Any = LightAdapterBlock if light else AdapterBlock
        widths = (inputs if light else first, *config.widths)
        self.body = nnx.List(
            [
                block(c, d, config.num_res_blocks, down=down, rngs=rngs)
                for (c, d), down in zip(itertools.pairwise(widths), config.halved, strict=True)
            ]
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        x = x if self.conv_in is None else self.conv_in(x)
        maps = []
        for block in self.body:
            x = block(x)
            maps.append(x)
        return tuple(maps)


class T2IAdapter(nnx.Module):
    """Computes maps for the levels of a UNet from an image, once for all steps of a run.

    Upstream: diffusers models/adapter.py. The UNet takes the maps, or a weighted sum of several
    adapters' maps, as `down_intrablock_additional_residuals`.
    """

    config_class = T2IAdapterConfig

    def __init__(self, config: T2IAdapterConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.adapter = AdapterBody(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the maps of images, the largest first.

        Args:
            x: b H W in_channels, in [0, 1]. H and W are multiples of `downscale_factor`.

        Raises:
            ValueError: x has another shape.
        """
        check_map("x", x, self.config.in_channels)
        factor = self.config.downscale_factor
        if x.shape[1] % factor or x.shape[2] % factor:
            raise ValueError(
                f"x must have a height and width divisible by {factor}, the adapter's "
                f"downscale_factor (got {x.shape[1]}x{x.shape[2]})"
            )
        return self.adapter(_pixel_unshuffle(x, factor))


def check_alike(configs: Sequence[T2IAdapterConfig]) -> None:
    """Checks that the maps of several adapters can be added up.

    Raises:
        ValueError: their sizes or widths differ.
    """
    kinds = {(config.downscale_factor, config.widths, config.halved) for config in configs}
    if len(kinds) > 1:
        raise ValueError(
            "adapter must be a list of T2IAdapters with equal downscale_factor and channels, and "
            f"equal sizes of their maps (got {_described(configs)})"
        )


def weigh_maps(maps: Iterable[Sequence[jax.Array]], scales: Any) -> list[jax.Array]:
    """Returns the weighted sum of the maps of m adapters.

    maps: for each adapter its maps, b h w c. scales: b m.
    """
    total: list[jax.Array] = []
    for m, own in enumerate(maps):
        scale = jnp.asarray(scales, jnp.float32)[:, m, None, None, None]
        scaled = [(x * scale).astype(x.dtype) for x in own]
        total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
    return total


def _described(configs: Sequence[T2IAdapterConfig]) -> str:
    return "; ".join(f"{c.adapter_type} {c.downscale_factor} {c.channels}" for c in configs)


def _pixel_unshuffle(x: jax.Array, factor: int) -> jax.Array:
    """Moves pixels into channels, b (h r) (w r) c -> b h w (c r r), as torch's PixelUnshuffle."""
    b, height, width, c = x.shape
    x = x.reshape(b, height // factor, factor, width // factor, factor, c)
    x = x.transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(b, height // factor, width // factor, c * factor * factor)


def _halve(x: jax.Array) -> jax.Array:
    """Averages 2x2 entries, those that there are at an odd edge. x: b h w c -> b h/2 w/2 c."""
    # An entry that stands twice at the edge leaves the average of those there are.
    x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)), mode="edge")
    b, height, width, c = x.shape
    return x.reshape(b, height // 2, 2, width // 2, 2, c).mean((2, 4))
