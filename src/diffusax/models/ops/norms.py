"""Computes normalisations, group norms in the fastest form for the platform."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.runtime.devices.lowering import by_platform, is_backward_alone, is_plain


# Inlined, because layers of one shape are traced once.
@partial(jax.jit, static_argnames=("groups", "eps"), inline=True)
def group_norm(*arguments: jax.Array, groups: int, eps: float) -> jax.Array:
    """Normalises groups of channels (Wu and He 2018), with float32 statistics.

    arguments: x b ... c, the scale and the bias c, and perhaps a shift b c that is added to all
    pixels of x before.
    """
    if is_plain():
        return _centred(*arguments, groups=groups, eps=eps)
    forms = {name: partial(f, groups=groups, eps=eps) for name, f in GROUP_NORMS.items()}
    return by_platform(choose_group_norm, forms, *arguments)


def choose_group_norm(platform: str) -> str:
    """Returns the name of the form of group normalisation for a platform."""
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


def _from_moments(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shift: jax.Array | None = None,
    *,
    groups: int,
    eps: float,
    moments: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Takes the variance of maps from the means of their values and of their squares.

    XLA's GPU compiler adds the shift wherever a map is read: a map with it is never written.
    """
    x32 = _shifted(x, shift)
    return _normalized_by(x32, scale, bias, *_mean_and_root(x32, groups, eps, moments))


def _shifted(x: jax.Array, shift: jax.Array | None = None) -> jax.Array:
    """Returns x: b ... c with the shift, b c, of all its pixels, in float32."""
    x32 = x.astype(jnp.float32)
    return x32 if shift is None else x32 + _at_pixels(shift.astype(jnp.float32), x)


def _normalized_by(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, root: jax.Array
) -> jax.Array:
    """Normalises x: b ... c, float32, by what `_mean_and_root` returns of all of it."""
    gain = _spread(root, x) * scale.astype(jnp.float32)
    return ((x - _spread(mean, x)) * gain + bias.astype(jnp.float32)).astype(scale.dtype)


def _mean_and_root(
    x: jax.Array,
    groups: int,
    eps: float,
    moments: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the inverse deviation of each group, b groups. x: b ... c."""
    mean, mean_square = moments(x, groups)
    variance = jnp.maximum(mean_square - jnp.square(mean), 0)
    return mean, jax.lax.rsqrt(variance + eps)


def group_norm_in_bands(
    form: Callable[[jax.Array, tuple[int, int]], jax.Array],
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    groups: int,
    eps: float,
) -> jax.Array:
    """Computes a convolution of a normalised map, of its upper and then of its lower half.

    A GPU holds half of the normalised map so, beside the map itself.

    x: b h w c -> b h w d. form: computes a convolution of 3x3, perhaps of an activation, from a map
    and the numbers of rows of zeros above and below it.
    """
    known = _mean_and_root(x.astype(jnp.float32), groups, eps, _sums)
    rows = x.shape[1] // 2

    def half(x: jax.Array, pad: tuple[int, int]) -> jax.Array:
        return form(_normalized_by(x.astype(jnp.float32), scale, bias, *known), pad)

    upper = half(x[:, : rows + 1], (1, 0))
    # Otherwise XLA would normalise both halves in one kernel.
    x, upper = jax.lax.optimization_barrier((x, upper))
    return jnp.concatenate([upper, half(x[:, rows - 1 :], (0, 1))], axis=1)


def _one_pass(x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Takes means that a TPU adds up while it computes what it normalises."""
    return _group_means(x, groups), _group_means(jnp.square(x), groups)


def _by_sums(*arguments: jax.Array, groups: int, eps: float) -> jax.Array:
    """Takes moments from sums; in training it has a gradient of its own."""
    if is_backward_alone():
        found: jax.Array = _with_backward(arguments, groups, eps)
        return found
    return _from_moments(*arguments, groups=groups, eps=eps, moments=_sums)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_backward(arguments: tuple[jax.Array, ...], groups: int, eps: float) -> jax.Array:
    return _forward(arguments, groups, eps)[0]


def _forward(
    arguments: tuple[jax.Array, ...], groups: int, eps: float
) -> tuple[jax.Array, tuple[Any, ...]]:
    x, scale, bias, *shift = arguments
    x32 = _shifted(x, *shift)
    known = _mean_and_root(x32, groups, eps, _sums)
    return _normalized_by(x32, scale, bias, *known), (arguments, *known)


def _backward(groups: int, eps: float, kept: Any, g: jax.Array) -> tuple[Any]:
    """Returns the gradients from sums over the pixels of each channel.

    They are added up at once, and all that follows has no pixels but the gradient of x. XLA's GPU
    compiler writes maps in float32 between the sums of JAX's own gradient.
    """
    del eps
    (x, scale, bias, *shift), mean, root = kept
    x32, g32, s = _shifted(x, *shift), g.astype(jnp.float32), scale.astype(jnp.float32)
    centred = x32 - _spread(mean, x)
    of_g, product, *of_x = _channel_sums(g32, g32 * centred, *[centred for _ in shift])
    pixels, width = math.prod(x.shape[1:-1]), x.shape[-1] // groups
    spread = partial(jnp.repeat, repeats=width, axis=-1)
    product = product * spread(root)
    a, b = (_group_sums(s * y, groups) / (pixels * width) for y in (of_g, product))
    of_map = (g32 * s - _spread(a, x) - centred * _spread(root * b, x)) * _spread(root, x)
    found = [of_map, product.sum(0), of_g.sum(0)]
    for own in of_x:
        found.append(spread(root) * (s * of_g - pixels * spread(a) - own * spread(root * b)))
    given = x, scale, bias, *shift
    return (tuple(y.astype(own.dtype) for y, own in zip(found, given, strict=True)),)


_with_backward.defvjp(_forward, _backward)


def _channel_sums(*maps: jax.Array) -> tuple[jax.Array, ...]:
    """Adds up the pixels of maps b ... c together, in parts as `_sums` does. -> b c each."""
    b, c, pixels = maps[0].shape[0], maps[0].shape[-1], math.prod(maps[0].shape[1:-1])
    parts = norm_parts(pixels)
    rows = [x.reshape(b, parts, pixels // parts, c) for x in maps]
    add = lambda a, b: tuple(map(jnp.add, a, b))  # noqa: E731
    zeros = (jnp.float32(0),) * len(rows)
    return tuple(x.sum(1) for x in jax.lax.reduce(tuple(rows), zeros, add, (2,)))


def _group_sums(x: jax.Array, groups: int) -> jax.Array:
    """Adds up the channels of each group: b c -> b groups."""
    return x.reshape(x.shape[0], groups, -1).sum(-1)


def _sums(x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Takes sums, as Flax's own, for maps that are read once less.

    Pixels are added up in parts, which keep a GPU busy where maps are few, and then parts and the
    channels of a group together.
    """
    b, c, pixels = x.shape[0], x.shape[-1], math.prod(x.shape[1:-1])
    parts = norm_parts(pixels)
    rows = x.reshape(b, parts, pixels // parts, c)
    share = groups / (pixels * c)
    sums = (_by_group(share * y.sum(2), groups) for y in (rows, jnp.square(rows)))
    return _last_sums(*sums)


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


GROUP_NORMS: dict[str, Callable[..., jax.Array]] = {
    "centred": _centred,
    "one_pass": partial(_from_moments, moments=_one_pass),
    "sums": _by_sums,
}


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
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float) -> jax.Array:
    """Normalises the last axis with float32 statistics. x: ... c -> ... c."""
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


@partial(jax.jit, static_argnames=("eps", "centre"), inline=True)
def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, centre: float = 0.0) -> jax.Array:
    """Divides by the root mean square in float32 (Zhang and Sennrich 2019). x: ... c -> ... c.

    The result is multiplied by centre + scale.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32)
    return (y * (gain + centre if centre else gain)).astype(scale.dtype)


def _affine(y: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(scale.dtype)
