"""The down, middle and up blocks of the unconditional UNet: resnets and self-attention."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.layers.resnet import Downsample2D, ResnetBlock2D, Upsample2D, rematerialized
from diffusax.models.layers.transformer import SpatialAttention


class PixelDownBlock(nnx.Module):
    """Resnets, each followed by self-attention if the level has it, then a downsampler.

    x: b h w c, temb: b t -> (b h/2 w/2 d, the skip connections in order).
    """

    def __init__(
        self,
        channels: Sequence[tuple[int, int]],
        attention: dict[str, Any] | None,
        resnet: dict[str, Any],
        *,
        downsampler: str | None,
        padding: int,
        rngs: nnx.Rngs,
    ):
        """Builds the layers.

        Args:
            channels: the channels (in, out) of each resnet.
            attention: the options of `SpatialAttention`; None for a level without.
            resnet: the options of `ResnetBlock2D`.
            downsampler: "conv", "resnet", or None for none.
            padding: the padding of the downsampling convolution, see `Downsample2D`.
            rngs: Flax's.
        """
        d = channels[-1][1]
        self.resnets = nnx.List([ResnetBlock2D(*cd, **resnet, rngs=rngs) for cd in channels])
        self.attentions = _attentions(d, len(channels), attention, rngs)
        samplers: dict[str | None, Any] = {
            None: lambda: None,
            "conv": lambda: Downsample2D(d, padding=padding, rngs=rngs),
            "resnet": lambda: ResnetBlock2D(d, d, **resnet, resample="down", rngs=rngs),
        }
        made = samplers[downsampler]()
        self.downsamplers = None if made is None else nnx.List([made])

    def __call__(
        self, x: jax.Array, temb: jax.Array, remat: bool = False
    ) -> tuple[jax.Array, list[jax.Array]]:
        skips = []
        for i, resnet in enumerate(self.resnets):
            x = rematerialized(resnet, remat)(x, temb)
            if self.attentions is not None:
                x = rematerialized(self.attentions[i], remat)(x)
            skips.append(x)
        if self.downsamplers is not None:
            x = _resampled(self.downsamplers[0], x, temb)
            skips.append(x)
        return x, skips


class PixelMidBlock(nnx.Module):
    """A resnet, self-attention if the network has it there, and a resnet. x: b h w c -> b h w c."""

    def __init__(
        self,
        c: int,
        attention: dict[str, Any] | None,
        resnet: dict[str, Any],
        *,
        rngs: nnx.Rngs,
    ):
        self.resnets = nnx.List([ResnetBlock2D(c, c, **resnet, rngs=rngs) for _ in range(2)])
        self.attentions = _attentions(c, 1, attention, rngs)

    def __call__(self, x: jax.Array, temb: jax.Array, remat: bool = False) -> jax.Array:
        x = rematerialized(self.resnets[0], remat)(x, temb)
        if self.attentions is not None:
            x = rematerialized(self.attentions[0], remat)(x)
        return rematerialized(self.resnets[1], remat)(x, temb)


class PixelUpBlock(nnx.Module):
    """Like PixelDownBlock, but joins a skip connection before every resnet, and upsamples."""

    def __init__(
        self,
        channels: Sequence[tuple[int, int]],
        attention: dict[str, Any] | None,
        resnet: dict[str, Any],
        *,
        upsampler: str | None,
        rngs: nnx.Rngs,
    ):
        """Builds the layers; the arguments are those of `PixelDownBlock`."""
        d = channels[-1][1]
        self.resnets = nnx.List([ResnetBlock2D(*cd, **resnet, rngs=rngs) for cd in channels])
        self.attentions = _attentions(d, len(channels), attention, rngs)
        samplers: dict[str | None, Any] = {
            None: lambda: None,
            "conv": lambda: Upsample2D(d, rngs=rngs),
            "resnet": lambda: ResnetBlock2D(d, d, **resnet, resample="up", rngs=rngs),
        }
        made = samplers[upsampler]()
        self.upsamplers = None if made is None else nnx.List([made])

    def __call__(
        self, x: jax.Array, skips: Sequence[jax.Array], temb: jax.Array, remat: bool = False
    ) -> jax.Array:
        """Returns the map for the next level, b 2h 2w d.

        skips: one skip connection for each resnet, the last one first.
        """
        for i, (resnet, skip) in enumerate(zip(self.resnets, skips, strict=True)):
            x = rematerialized(resnet, remat)(jnp.concatenate([x, skip], axis=-1), temb)
            if self.attentions is not None:
                x = rematerialized(self.attentions[i], remat)(x)
        return x if self.upsamplers is None else _resampled(self.upsamplers[0], x, temb)


def _resampled(sampler: Any, x: jax.Array, temb: jax.Array) -> jax.Array:
    y: jax.Array = sampler(x, temb) if isinstance(sampler, ResnetBlock2D) else sampler(x)
    return y


def _attentions(c: int, count: int, options: dict[str, Any] | None, rngs: nnx.Rngs) -> Any:
    if options is None:
        return None
    return nnx.List([SpatialAttention(c, **options, rngs=rngs) for _ in range(count)])
