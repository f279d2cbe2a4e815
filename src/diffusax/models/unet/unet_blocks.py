"""The down, middle and up blocks of the UNet."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.adapters.freeu import apply_freeu
from diffusax.models.layers.resnet import Downsample2D, ResnetBlock2D, Upsample2D, rematerialized
from diffusax.models.layers.transformer import Transformer2DModel


class DownBlock(nnx.Module):
    """Resnets, each followed by a transformer if the level has attention, then a downsampler.

    x: b h w c -> (b h/2 w/2 d, the skip connections in order). residual: a T2I-Adapter's map, which
    is added after the last transformer, or in a level without attention at the end.
    """

    def __init__(
        self,
        channels: Sequence[tuple[int, int]],
        transformers: Sequence[dict[str, Any]],
        resnet: dict[str, Any],
        *,
        downsample_padding: int | None,
        rngs: nnx.Rngs,
    ):
        d = channels[-1][1]
        self.resnets = nnx.List([ResnetBlock2D(*cd, **resnet, rngs=rngs) for cd in channels])
        self.attentions = _transformers(d, transformers, rngs)
        self.downsamplers = (
            nnx.List([Downsample2D(d, padding=downsample_padding, rngs=rngs)])
            if downsample_padding is not None
            else None
        )

    @property
    def layers(self) -> int:
        """The layers, each of which makes a skip connection."""
        return len(self.resnets) + (self.downsamplers is not None)

    def __call__(
        self,
        x: jax.Array,
        temb: jax.Array,
        context: jax.Array,
        residual: jax.Array | None = None,
        layers: range | None = None,
        remat: bool = False,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the map for the next level, and the skip connections.

        residual: see the class. layers: those to run, of which the downsampler is the last; None
        for all.
        """
        skips = []
        last = len(self.resnets) - 1
        layers = range(self.layers) if layers is None else layers
        for i in layers[: len(self.resnets) - layers.start]:
            x = rematerialized(self.resnets[i], remat)(x, temb)
            if self.attentions is not None:
                x = rematerialized(self.attentions[i], remat)(x, context)
                x = _add(x, residual) if i == last else x
            skips.append(x)
        ends = layers.stop == self.layers
        if self.downsamplers is not None and ends:
            x = self.downsamplers[0](x)
            skips.append(x)
        if self.attentions is None and residual is not None and ends:
            # Upstream adds in place, to the last skip connection too (unet_2d_condition.py).
            x = skips[-1] = _add(x, residual)
        return x, skips


class MidBlock(nnx.Module):
    """A resnet, and with attention a transformer and a resnet. x: b h w c -> b h w c."""

    def __init__(
        self,
        c: int,
        transformers: Sequence[dict[str, Any]],
        resnet: dict[str, Any],
        *,
        rngs: nnx.Rngs,
    ):
        count = 1 + len(transformers)
        self.resnets = nnx.List([ResnetBlock2D(c, c, **resnet, rngs=rngs) for _ in range(count)])
        self.attentions = _transformers(c, transformers, rngs)

    def __call__(
        self, x: jax.Array, temb: jax.Array, context: jax.Array, remat: bool = False
    ) -> jax.Array:
        x = rematerialized(self.resnets[0], remat)(x, temb)
        if self.attentions is not None:
            x = rematerialized(self.attentions[0], remat)(x, context)
            x = rematerialized(self.resnets[1], remat)(x, temb)
        return x


class UpBlock(nnx.Module):
    """Like DownBlock, but joins a skip connection before every resnet, and upsamples at the end."""

    def __init__(
        self,
        channels: Sequence[tuple[int, int]],
        transformers: Sequence[dict[str, Any]],
        resnet: dict[str, Any],
        *,
        upsample: bool,
        rngs: nnx.Rngs,
    ):
        d = channels[-1][1]
        self.resnets = nnx.List([ResnetBlock2D(*cd, **resnet, rngs=rngs) for cd in channels])
        self.attentions = _transformers(d, transformers, rngs)
        self.upsamplers = nnx.List([Upsample2D(d, rngs=rngs)]) if upsample else None

    def __call__(
        self,
        x: jax.Array,
        skips: Sequence[jax.Array],
        temb: jax.Array,
        context: jax.Array,
        freeu: jax.Array | None = None,
        size: tuple[int, int] | None = None,
        layers: range | None = None,
        remat: bool = False,
    ) -> jax.Array:
        """Returns the map for the next level, b h' w' d.

        skips: one skip connection for each resnet, the last one first. freeu: this level's numbers,
        see `apply_freeu`. size: h w after upsampling. layers: the resnets to run; None for all.
        """
        layers = range(len(self.resnets)) if layers is None else layers
        for i, skip in zip(layers, skips, strict=True):
            resnet = self.resnets[i]
            if freeu is not None:
                x, skip = apply_freeu(x, skip, freeu)
            x = rematerialized(resnet, remat)(jnp.concatenate([x, skip], axis=-1), temb)
            if self.attentions is not None:
                x = rematerialized(self.attentions[i], remat)(x, context)
        ends = layers.stop == len(self.resnets)
        return x if self.upsamplers is None or not ends else self.upsamplers[0](x, size)


def _add(x: jax.Array, residual: jax.Array | None) -> jax.Array:
    """Adds a T2I-Adapter's map, if there is one. x: b h w c.

    Raises:
        ValueError: the map has another size or width.
    """
    if residual is None:
        return x
    if residual.shape[1:] != x.shape[1:]:
        raise ValueError(
            "down_intrablock_additional_residuals must have the size and channels of the UNet's "
            f"levels, {x.shape[1:]} here (got {residual.shape[1:]}); is the T2I-Adapter made for "
            "this UNet?"
        )
    return x + residual.astype(x.dtype)


def _transformers(c: int, options: Sequence[dict[str, Any]], rngs: nnx.Rngs) -> Any:
    transformers = [Transformer2DModel(c, **o, rngs=rngs) for o in options]
    return nnx.List(transformers) if transformers else None
