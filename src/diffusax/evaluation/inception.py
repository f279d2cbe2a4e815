"""Inception v3 (Szegedy et al. 2016) in the form that the Frechet Inception distance uses.

Upstream: pytorch-fid's inception.py, which repeats TensorFlow's network of 2015-12-05: 1008
classes, averages that ignore the padding, and in the last block the largest value instead of the
average.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import ones, zeros

from diffusax.models.layers.layers import Conv2d, Linear
from diffusax.models.layers.rngs import shaped

SIDE = 299
"""The height and width of the images in pixels."""


@dataclasses.dataclass(frozen=True)
class InceptionConfig:
    """The config, which has no options because there is only one such network."""


class InceptionOutput(NamedTuple):
    """The network's outputs. features: b 2048, which FID compares. logits: b 1008."""

    features: jax.Array
    logits: jax.Array


class BatchNorm2d(nnx.Module):
    """Batch normalisation by the statistics of training (Ioffe and Szegedy 2015)."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        self.scale, self.bias, self.running_mean, self.running_var = (
            nnx.Param(shaped(start)(rngs.params(), (c,), jnp.float32))
            for start in (ones, zeros, zeros, ones)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        gain = self.scale[...] * jax.lax.rsqrt(self.running_var[...] + 0.001)
        return (x - self.running_mean[...]) * gain + self.bias[...]


class BasicConv2d(nnx.Module):
    """A convolution, its norm and ReLU. x: b h w c -> b h' w' d."""

    def __init__(
        self,
        c: int,
        d: int,
        kernel_size: int | tuple[int, int] = 1,
        *,
        stride: int = 1,
        padding: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv2d(c, d, kernel_size, stride=stride, padding=padding, bias=False, rngs=rngs)
        self.bn = BatchNorm2d(d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.bn(self.conv(x)))


class InceptionA(nnx.Module):
    """Four branches at 35x35. x: b h w c -> b h w 224+p."""

    def __init__(self, c: int, pool_features: int, *, rngs: nnx.Rngs):
        self.branch1x1 = BasicConv2d(c, 64, rngs=rngs)
        self.branch5x5_1 = BasicConv2d(c, 48, rngs=rngs)
        self.branch5x5_2 = BasicConv2d(48, 64, 5, rngs=rngs)
        self.branch3x3dbl_1 = BasicConv2d(c, 64, rngs=rngs)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, rngs=rngs)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, rngs=rngs)
        self.branch_pool = BasicConv2d(c, pool_features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        pool = self.branch_pool(_average(x))
        return _joined(self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x)), double, pool)


class InceptionB(nnx.Module):
    """Branches that reduce 35x35 to 17x17. x: b h w c -> b h' w' c+480."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        self.branch3x3 = BasicConv2d(c, 384, 3, stride=2, padding=0, rngs=rngs)
        self.branch3x3dbl_1 = BasicConv2d(c, 64, rngs=rngs)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, rngs=rngs)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, stride=2, padding=0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return _joined(self.branch3x3(x), double, _largest(x, stride=2))


class InceptionC(nnx.Module):
    """Four branches at 17x17, with kernels of one row or one column. x: b h w c -> b h w 768."""

    def __init__(self, c: int, channels_7x7: int, *, rngs: nnx.Rngs):
        d = channels_7x7
        self.branch1x1 = BasicConv2d(c, 192, rngs=rngs)
        self.branch7x7_1 = BasicConv2d(c, d, rngs=rngs)
        self.branch7x7_2 = BasicConv2d(d, d, (1, 7), rngs=rngs)
        self.branch7x7_3 = BasicConv2d(d, 192, (7, 1), rngs=rngs)
        self.branch7x7dbl_1 = BasicConv2d(c, d, rngs=rngs)
        self.branch7x7dbl_2 = BasicConv2d(d, d, (7, 1), rngs=rngs)
        self.branch7x7dbl_3 = BasicConv2d(d, d, (1, 7), rngs=rngs)
        self.branch7x7dbl_4 = BasicConv2d(d, d, (7, 1), rngs=rngs)
        self.branch7x7dbl_5 = BasicConv2d(d, 192, (1, 7), rngs=rngs)
        self.branch_pool = BasicConv2d(c, 192, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return _joined(self.branch1x1(x), single, double, self.branch_pool(_average(x)))


class InceptionD(nnx.Module):
    """Branches that reduce 17x17 to 8x8. x: b h w c -> b h' w' c+512."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        self.branch3x3_1 = BasicConv2d(c, 192, rngs=rngs)
        self.branch3x3_2 = BasicConv2d(192, 320, 3, stride=2, padding=0, rngs=rngs)
        self.branch7x7x3_1 = BasicConv2d(c, 192, rngs=rngs)
        self.branch7x7x3_2 = BasicConv2d(192, 192, (1, 7), rngs=rngs)
        self.branch7x7x3_3 = BasicConv2d(192, 192, (7, 1), rngs=rngs)
        self.branch7x7x3_4 = BasicConv2d(192, 192, 3, stride=2, padding=0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        long = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        short = self.branch3x3_2(self.branch3x3_1(x))
        return _joined(short, self.branch7x7x3_4(long), _largest(x, stride=2))


class InceptionE(nnx.Module):
    """Branches at 8x8 that split again; `largest` replaces the average. -> b h w 2048."""

    def __init__(self, c: int, *, largest: bool, rngs: nnx.Rngs):
        self.largest = largest
        self.branch1x1 = BasicConv2d(c, 320, rngs=rngs)
        self.branch3x3_1 = BasicConv2d(c, 384, rngs=rngs)
        self.branch3x3_2a = BasicConv2d(384, 384, (1, 3), rngs=rngs)
        self.branch3x3_2b = BasicConv2d(384, 384, (3, 1), rngs=rngs)
        self.branch3x3dbl_1 = BasicConv2d(c, 448, rngs=rngs)
        self.branch3x3dbl_2 = BasicConv2d(448, 384, 3, rngs=rngs)
        self.branch3x3dbl_3a = BasicConv2d(384, 384, (1, 3), rngs=rngs)
        self.branch3x3dbl_3b = BasicConv2d(384, 384, (3, 1), rngs=rngs)
        self.branch_pool = BasicConv2d(c, 192, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        single = self.branch3x3_1(x)
        single = _joined(self.branch3x3_2a(single), self.branch3x3_2b(single))
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        double = _joined(self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double))
        pool = _largest(x, stride=1, padding=1) if self.largest else _average(x)
        return _joined(self.branch1x1(x), single, double, self.branch_pool(pool))


class InceptionV3(nnx.Module):
    """The whole network, with the names of torchvision's and pytorch-fid's state dicts."""

    config_class = InceptionConfig
    ignored_keys = ("num_batches_tracked",)

    def __init__(self, config: InceptionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, 3, stride=2, padding=0, rngs=rngs)
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, 3, padding=0, rngs=rngs)
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, 3, rngs=rngs)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, rngs=rngs)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, 3, padding=0, rngs=rngs)
        self.Mixed_5b = InceptionA(192, 32, rngs=rngs)
        self.Mixed_5c = InceptionA(256, 64, rngs=rngs)
        self.Mixed_5d = InceptionA(288, 64, rngs=rngs)
        self.Mixed_6a = InceptionB(288, rngs=rngs)
        self.Mixed_6b = InceptionC(768, 128, rngs=rngs)
        self.Mixed_6c = InceptionC(768, 160, rngs=rngs)
        self.Mixed_6d = InceptionC(768, 160, rngs=rngs)
        self.Mixed_6e = InceptionC(768, 192, rngs=rngs)
        self.Mixed_7a = InceptionD(768, rngs=rngs)
        self.Mixed_7b = InceptionE(1280, largest=False, rngs=rngs)
        self.Mixed_7c = InceptionE(2048, largest=True, rngs=rngs)
        self.fc = Linear(2048, 1008, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> InceptionOutput:
        """Computes features. pixels: b h w 3 in [0, 1], 299x299 in FID, at least 75x75."""
        x = self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(2 * pixels - 1))
        x = _largest(self.Conv2d_2b_3x3(x), stride=2)
        x = _largest(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), stride=2)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.mean((1, 2))
        return InceptionOutput(features, self.fc(features))


def _joined(*branches: jax.Array) -> jax.Array:
    return jnp.concatenate(branches, axis=-1)


def _largest(x: jax.Array, *, stride: int, padding: int = 0) -> jax.Array:
    """Returns the largest of 3x3 pixels."""
    pads = (0, 0), (padding, padding), (padding, padding), (0, 0)
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, stride, stride, 1), pads
    )


def _average(x: jax.Array) -> jax.Array:
    """Returns the average of the pixels around each pixel, without the padding."""

    def sums(y: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    return sums(x) / sums(jnp.ones((1, *x.shape[1:3], 1), x.dtype))
