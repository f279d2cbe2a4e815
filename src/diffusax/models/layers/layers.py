"""The layers that all networks share: Flax's own, with layout, accumulation and lowering fixed.

Every layer computes in the dtype of its parameters, so the dtype of a network is that of its
parameter tree. Images are channels last, `b h w c`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import lecun_normal, normal, ones, zeros

from diffusax.models.adapters.low_rank import Base, LayerAdapters
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.conv import conv2d
from diffusax.models.ops.matmul import apart, matmul
from diffusax.runtime.devices.lowering import by_platform, is_plain
from diffusax.runtime.devices.mesh import split_columns, tensor_parts

_DENSE: dict[str, Any] = {"kernel_init": shaped(lecun_normal()), "bias_init": shaped(zeros)}
_NORM: dict[str, Any] = {"scale_init": shaped(ones), "bias_init": shaped(zeros)}


class Linear(nnx.Linear):
    """A linear layer. x: ... c -> ... d."""

    adapters: LayerAdapters | None = None
    """The layer's adapters, or those in training, while a network is traced with some; x is b ... c
    then."""

    def __init__(self, c: int, d: int, *, bias: bool = True, rngs: nnx.Rngs):
        super().__init__(c, d, use_bias=bias, rngs=rngs, **_DENSE)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x = x.astype(kernel.dtype)
        if self.adapters is None:
            return matmul(x, kernel, bias)
        own, other = apart(x, 2)
        y = matmul(own, kernel, bias)
        return y + self.adapters.linear(other, Base(y, kernel, bias))

    def finished(self, given: Any) -> jax.Array:
        """Returns the layer's result of what was computed before, see `context_keys.Lowered`."""
        if self.adapters is None or not isinstance(given, tuple):
            return given
        y, h = given
        return y + self.adapters.raised(h)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arranged:
    """A kernel in the place of a layer's own, as the devices of a mesh's tensor axis read it."""

    replaces_parameter: ClassVar[bool] = True
    """That it may stand in a network's parameters, see `parameter_tree`."""
    parts: tuple[jax.Array, ...]


class ArrangedLinear(Linear):
    """A linear layer whose kernel is not stored as the devices of a mesh's tensor axis read it."""

    _parts: Callable[[jax.Array], tuple[jax.Array, ...]]
    """Arranges the kernel."""

    @property
    def differs(self) -> bool:
        """Whether the devices of the mesh read it otherwise than it is stored."""
        return tensor_parts() > 1

    def arranged(self) -> Arranged:
        """Returns the kernel as the devices read it, which may stand in the kernel's place."""
        kernel: Any = self.kernel.get_value()
        return kernel if isinstance(kernel, Arranged) else Arranged(self._parts(kernel))


class SplitLinear(ArrangedLinear):
    """Linear layers that stand side by side in one kernel. x: ... c -> ... d for each width d.

    A split of the kernel's columns would give each device of a mesh's tensor axis other layers
    instead of a part of all, so that they are split one by one, see `split_columns`.
    """

    def __init__(
        self,
        c: int,
        widths: Sequence[int],
        *,
        bias: bool = True,
        tpu_products: Sequence[int] = (),
        rngs: nnx.Rngs,
    ):
        """Builds the layers.

        Args:
            c: the input's channels.
            widths: the outputs' channels.
            bias: whether they have biases.
            tpu_products: how many layers that follow each other are one product on a TPU, for each
                product; by default all are one. What reads a layer then gets it in the layout that
                it wants, instead of a copy.
            rngs: the keys of the parameters.
        """
        super().__init__(c, sum(widths), bias=bias, rngs=rngs)
        self.widths, self.tpu_products = tuple(widths), tuple(tpu_products)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:  # type: ignore[override]
        if not self.differs:
            if not self.tpu_products or self.adapters is not None or is_plain():
                return self._split(super().__call__(x))
            given = x, self.kernel[...], None if self.bias is None else self.bias[...]
            forms = {"one": self.one_product, "several": self.several_products}
            return by_platform(lambda p: "several" if p == "tpu" else "one", forms, *given)
        kernels = self.arranged().parts
        biases = [None] * len(kernels) if self.bias is None else self._split(self.bias[...])
        x = x.astype(kernels[0].dtype)
        ys = [matmul(x, k, bias) for k, bias in zip(kernels, biases)]
        if (adapters := self.adapters) is not None:
            ups = map(split_columns, self._split(adapters.up))
            ys = [y + adapters._replace(up=up).linear(x) for y, up in zip(ys, ups)]
        return tuple(ys)

    def _parts(self, kernel: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(split_columns, self._split(kernel)))

    def one_product(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        return self._split(matmul(x.astype(kernel.dtype), kernel, bias))

    def several_products(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        ends = np.cumsum([0, *self.tpu_products])
        sizes = [sum(self.widths[i:j]) for i, j in itertools.pairwise(ends)]
        kernels = jax.lax.split(kernel, sizes, axis=kernel.ndim - 1)
        biases = [None] * len(sizes) if bias is None else jax.lax.split(bias, sizes)
        x = x.astype(kernel.dtype)
        ys = [matmul(x, k, b) for k, b in zip(kernels, biases)]
        widths = (self.widths[i:j] for i, j in itertools.pairwise(ends))
        return tuple(z for y, w in zip(ys, widths) for z in jax.lax.split(y, w, axis=y.ndim - 1))

    def _split(self, y: jax.Array) -> tuple[jax.Array, ...]:
        # The gradient of a split is one concatenation; that of slices is a sum of padded maps.
        return tuple(jax.lax.split(y, self.widths, axis=y.ndim - 1))


class Conv2d(nnx.Conv):
    """A convolution with PyTorch's symmetric padding or explicit (low, high) pairs.

    x: b h w c -> b h' w' d.
    """

    adapters: LayerAdapters | None = None
    """The layer's adapters, or those in training, while a network is traced with some."""

    def __init__(
        self,
        c: int,
        d: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[tuple[int, int], tuple[int, int]] | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__(c, d, kernel, use_bias=bias, rngs=rngs, **_DENSE)
        if padding is None:
            padding = ((kernel[0] // 2, kernel[0] // 2), (kernel[1] // 2, kernel[1] // 2))
        self.stride = stride
        self.pad = ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        x = x.astype(kernel.dtype)
        y = conv2d(x, kernel, stride=self.stride, padding=self.pad)
        bias = None if self.bias is None else self.bias[...]
        y = y if bias is None else y + bias
        if self.adapters is None:
            return y
        base = Base(y, kernel, bias)
        return y + self.adapters.conv(x, base, stride=self.stride, padding=self.pad)


class GroupNorm(nnx.GroupNorm):
    """Group normalisation with float32 statistics (Wu and He 2018). x: b ... c -> b ... c.

    shift: b c, which is added to all pixels of x before.
    """

    def __init__(self, c: int, groups: int, *, eps: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(c, num_groups=groups, epsilon=eps, rngs=rngs, **_NORM)

    def __call__(self, x: jax.Array, shift: jax.Array | None = None) -> jax.Array:
        arguments = (x, *_gain_and_bias(self), *(() if shift is None else (shift,)))
        return _group_norm(*arguments, groups=self.num_groups, eps=self.epsilon)


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation with float32 statistics. x: ... c -> ... c."""

    def __init__(self, c: int, *, eps: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(c, epsilon=eps, rngs=rngs, **_NORM)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(x, *_gain_and_bias(self), eps=self.epsilon)


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalisation in float32 (Zhang and Sennrich 2019). x: ... c -> ... c."""

    def __init__(self, c: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        super().__init__(c, epsilon=eps, rngs=rngs, scale_init=shaped(ones))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale: Any = self.scale
        return _rms_norm(x, scale[...], eps=self.epsilon)


class Embedding(nnx.Embed):
    """A table lookup. ids: ... -> ... c."""

    def __init__(self, num: int, c: int, *, rngs: nnx.Rngs):
        super().__init__(num, c, rngs=rngs, embedding_init=shaped(normal(0.02)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embedding[...][ids]


def _gain_and_bias(norm: Any) -> tuple[jax.Array, jax.Array]:
    return norm.scale[...], norm.bias[...]


# Inlined, because layers of one shape are traced once.
@partial(jax.jit, static_argnames=("groups", "eps"), inline=True)
def _group_norm(*arguments: jax.Array, groups: int, eps: float) -> jax.Array:
    if is_plain():
        return _centred(*arguments, groups=groups, eps=eps)
    forms = {name: partial(f, groups=groups, eps=eps) for name, f in GROUP_NORMS.items()}
    return by_platform(choose_group_norm, forms, *arguments)


def choose_group_norm(platform: str) -> str:
    forms = {"cuda": "sums", "rocm": "sums", "tpu": "one_pass"}
    return forms.get(platform, "centred")


def _centred(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shift: jax.Array | None = None,
    *,
    groups: int,
    eps: float,
) -> jax.Array:
    """Takes the variance of centred maps, which XLA's CPU backend does in place."""
    if shift is not None:
        x = x + _at_pixels(shift, x)
    x32 = x.astype(jnp.float32)
    centred = x32 - _spread(_group_means(x32, groups), x)
    variance = _group_means(jnp.square(centred), groups)
    return _affine(centred * _spread(jax.lax.rsqrt(variance + eps), x), scale, bias)


def _one_pass(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shift: jax.Array | None = None,
    *,
    groups: int,
    eps: float,
) -> jax.Array:
    """Takes sums and sums of squares, which a TPU adds up while it computes what it normalises."""
    x32 = x.astype(jnp.float32)
    if shift is not None:
        x32 = x32 + _at_pixels(shift.astype(jnp.float32), x)
    mean = _group_means(x32, groups)
    variance = jnp.maximum(_group_means(jnp.square(x32), groups) - jnp.square(mean), 0)
    gain = _spread(jax.lax.rsqrt(variance + eps), x) * scale.astype(jnp.float32)
    return ((x32 - _spread(mean, x)) * gain + bias.astype(jnp.float32)).astype(scale.dtype)


def _sums(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shift: jax.Array | None = None,
    *,
    groups: int,
    eps: float,
) -> jax.Array:
    """Takes sums and sums of squares, as Flax's own, for maps that are read once less.

    Pixels are added up in parts, which keep a GPU busy where maps are few, and then parts and the
    channels of a group together. XLA's GPU compiler adds the shift wherever a map is read: a map
    with it is never written.
    """
    b, c, pixels = x.shape[0], x.shape[-1], math.prod(x.shape[1:-1])
    x32 = x.astype(jnp.float32)
    if shift is not None:
        x32 = x32 + _at_pixels(shift.astype(jnp.float32), x)
    parts = norm_parts(pixels)
    rows = x32.reshape(b, parts, pixels // parts, c)
    share = groups / (pixels * c)
    sums = (_by_group(share * y.sum(2), groups) for y in (rows, jnp.square(rows)))
    mean, mean_square = _last_sums(*sums)
    variance = jnp.maximum(mean_square - jnp.square(mean), 0)
    gain = _spread(jax.lax.rsqrt(variance + eps), x) * scale.astype(jnp.float32)
    return ((x32 - _spread(mean, x)) * gain + bias.astype(jnp.float32)).astype(scale.dtype)


def norm_parts(pixels: int) -> int:
    """Returns the number of parts: with 32 pixels each, or so few that it is one kernel with them.

    By the estimates of XLA's GPU compiler; see benchmarks/gpu_compile.py.
    """
    return math.gcd(pixels, 64 if pixels < 1024 else min(2 ** int(math.log2(pixels / 32)), 256))


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """Gathers what belongs to each group: b p c -> b groups d."""
    b, parts, c = x.shape
    split = x.reshape(b, parts, groups, c // groups).transpose(0, 2, 1, 3)
    return split.reshape(b, groups, parts * c // groups)


def _at_pixels(values: jax.Array, x: jax.Array) -> jax.Array:
    """Gives all pixels of x: b ... c the values of their channels, b c."""
    return values.reshape(values.shape[0], *(1,) * (x.ndim - 2), values.shape[-1])


@jax.custom_jvp
def _last_sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds up both along the last axis, in one kernel."""
    zero = jnp.float32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    return jax.lax.reduce((x, y), (zero, zero), add, (x.ndim - 1,))


@_last_sums.defjvp
def _last_sums_jvp(primals: Any, tangents: Any) -> Any:
    # JAX has no derivative of a reduction of two arrays.
    return _last_sums(*primals), tuple(t.sum(-1) for t in tangents)


GROUP_NORMS = {"centred": _centred, "one_pass": _one_pass, "sums": _sums}


def _group_means(x: jax.Array, groups: int) -> jax.Array:
    """Returns the mean of each group, b groups.

    It is over pixels, then over the channels of a group: XLA's CPU backend takes twice as long for
    maps that are cut into groups.
    """
    sums = x.sum(tuple(range(1, x.ndim - 1))).reshape(x.shape[0], groups, -1).sum(-1)
    return sums / (math.prod(x.shape[1:]) // groups)


def _spread(values: jax.Array, x: jax.Array) -> jax.Array:
    """Gives pixels and channels of x: b ... c the values of their group, b groups -> b ... c."""
    channels = jnp.repeat(values, x.shape[-1] // values.shape[-1], axis=-1)
    return channels.reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])


@partial(jax.jit, static_argnames=("eps",), inline=True)
def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float) -> jax.Array:
    return _affine(_normalized(x, eps), scale, bias)


@partial(jax.jit, static_argnames=("eps",), inline=True)
def normalized(x: jax.Array, *, eps: float) -> jax.Array:
    """Computes a layer normalisation without gain and bias. x: ... c -> ... c, in x's dtype."""
    return _normalized(x, eps).astype(x.dtype)


def _normalized(x: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    var = jnp.square(x32 - mean).mean(-1, keepdims=True)
    return (x32 - mean) * jax.lax.rsqrt(var + eps)


@partial(jax.jit, static_argnames=("eps",), inline=True)
def _rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(scale.dtype)


def _affine(y: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(scale.dtype)
