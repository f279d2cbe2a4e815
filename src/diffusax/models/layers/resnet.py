"""Residual blocks and resampling, shared by the UNets and the autoencoder."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.layers.layers import Conv2d, GroupNorm, Linear
from diffusax.models.ops.activations import silu
from diffusax.models.shared import shared
from diffusax.models.streaming import streamed, unordered
from diffusax.runtime.devices.lowering import (
    is_backward_alone,
    is_plain,
    known_sizes,
    rematerialization,
)
from diffusax.runtime.devices.mesh import Rules

TENSOR_RULES: Rules = (
    (r"conv1\.kernel", -1),
    (r"time_emb_proj\.kernel", -1),
    (r"conv2\.kernel", -2),
)
"""The tensor axis splits the channels between the two convolutions."""


_LARGE = 2**28
"""The bytes of a map of which GPUs normalise one half after the other."""


class ResnetBlock2D(nnx.Module):
    """Two 3x3 convolutions and a shift by the time embedding (Ho et al. 2020, appendix B).

    x: b h w c, temb: b t -> b h w d. With `scale_shift` the embedding gives a scale as well as a
    shift, both applied after the second norm (Dhariwal and Nichol 2021, "AdaGN"). With `resample`
    the block halves or doubles the map before its first convolution, as in their BigGAN blocks.
    Upstream: diffusers models/resnet.py, ResnetBlock2D.
    """

    def __init__(
        self,
        c: int,
        d: int,
        time_dim: int | None,
        *,
        groups: int = 32,
        eps: float = 1e-5,
        scale_shift: bool = False,
        output_scale_factor: float = 1.0,
        resample: Literal["down", "up"] | None = None,
        rngs: nnx.Rngs,
    ):
        self.scale_shift = scale_shift
        self.resample = resample
        self.output_scale_factor = output_scale_factor
        self.norm1 = GroupNorm(c, groups, eps=eps, rngs=rngs)
        self.conv1 = Conv2d(c, d, 3, rngs=rngs)
        self.time_emb_proj = (
            Linear(time_dim, 2 * d if scale_shift else d, rngs=rngs) if time_dim else None
        )
        self.norm2 = GroupNorm(d, groups, eps=eps, rngs=rngs)
        self.conv2 = Conv2d(d, d, 3, rngs=rngs)
        self.conv_shortcut = Conv2d(c, d, 1, rngs=rngs) if c != d else None

    def __call__(self, x: jax.Array, temb: jax.Array | None = None) -> jax.Array:
        if self._is_large(x):
            h = self.norm1.convolved(lambda y, rows: self.conv1(silu(y), rows=rows), x)
        else:
            h = silu(self.norm1(x))
            if self.resample is not None:
                x, h = (_resampled(y, self.resample) for y in (x, h))
            h = self.conv1(h)

        if self.time_emb_proj is None or temb is None:
            h = self.norm2(h)
        else:
            shift = self.time_emb_proj(silu(temb))
            if self.scale_shift:
                scale, shift = jnp.split(shift[:, None, None], 2, axis=-1)
                h = self.norm2(h) * (1 + scale) + shift
            else:
                h = self.norm2(h, shift)

        h = self.conv2(silu(h))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return (x + h) / self.output_scale_factor

    def _is_large(self, x: jax.Array) -> bool:
        """Returns whether a map that the block narrows is so large that no copy should be held.

        In training more than that is held.
        """
        narrows = self.resample is None and self.conv1.in_features > self.conv1.out_features
        size = math.prod(known_sizes(x.shape)) * x.dtype.itemsize
        return narrows and size >= _LARGE and not (is_plain() or is_backward_alone())


class Downsample2D(nnx.Module):
    """A 3x3 convolution of stride 2. x: b h w c -> b h/2 w/2 c.

    padding=0 pads one row below and one column to the right, as the autoencoder's encoder does.
    """

    def __init__(self, c: int, *, padding: int = 1, rngs: nnx.Rngs):
        pad = ((0, 1), (0, 1)) if padding == 0 else padding
        self.conv = Conv2d(c, c, 3, stride=2, padding=pad, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x)


class Upsample2D(nnx.Module):
    """Nearest-neighbour enlargement and a 3x3 convolution. x: b h w c -> b H W c.

    `size` is (H, W); by default twice the input. A UNet asks for the size of its skip connection,
    which is one less than twice the input where an odd map was halved on the way down.
    """

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        self.conv = Conv2d(c, c, 3, rngs=rngs)

    def __call__(self, x: jax.Array, size: tuple[int, int] | None = None) -> jax.Array:
        _, h, w, _ = x.shape
        return self.conv(upsample_nearest(x, size or (2 * h, 2 * w)))


def upsample_nearest(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Repeats pixels: x: b h w c -> b H W c, from floor(i h / H) like PyTorch's `interpolate`."""
    b, h, w, c = x.shape
    if size == (2 * h, 2 * w):
        doubled = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c))
        return doubled.reshape(b, 2 * h, 2 * w, c)
    rows = jnp.arange(size[0]) * h // size[0]
    columns = jnp.arange(size[1]) * w // size[1]
    return x[:, rows][:, :, columns]


def _resampled(x: jax.Array, how: Literal["down", "up"]) -> jax.Array:
    """Averages squares of four pixels, or repeats each pixel: b h w c -> b h/2 w/2 c or b 2h 2w c.

    A last row or column that is odd is left out of the averages, as PyTorch's `avg_pool2d` does.
    """
    b, h, w, c = x.shape
    if how == "up":
        return upsample_nearest(x, (2 * h, 2 * w))
    x = x[:, : h // 2 * 2, : w // 2 * 2]
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))


def rematerialized(module: Callable[..., Any], on: bool) -> Callable[..., Any]:
    """Returns a block as a network calls it.

    on: whether gradients compute its activations again, instead of keeping them.
    """
    if not on:
        return streamed(module)

    together = shared(module)

    def call(*args: Any) -> Any:
        with unordered(), rematerialization():
            return together(*args)

    return jax.checkpoint(call)
