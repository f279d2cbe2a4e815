"""Multiplies matrices with sums in float32, whatever the operands' dtype."""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from diffusax.models.quantized import Kernel, Quantized
from diffusax.models.streaming import computed
from diffusax.runtime.devices.lowering import (
    barrier_on,
    by_platform,
    is_plain,
    is_rematerialized,
)
from diffusax.runtime.devices.splitting import context_parts, split_widths


def matmul(x: jax.Array, kernel: Kernel, bias: jax.Array | None = None) -> jax.Array:
    """Computes x kernel + bias. x: ... c, kernel: c d, bias: d -> ... d, in x's dtype.

    The product's result is float32: bfloat16 sums lose digits on TPUs and CPUs, and XLA's CPU
    backend has its fast bfloat16 kernel only in that form. That backend also merges a norm before
    and a bias after into the product, which is slow unless all are two-dimensional.

    On NVIDIA's GPUs sums are float32 in any case, and a float32 result would be written and read
    at twice the bytes, because XLA leaves its rounding to what follows. cuBLAS adds a bias, and a
    map that is added to the result, where they have the result's dtype.
    """
    if isinstance(kernel, Quantized):
        x, kernel = _multiplied_out(x, kernel)
    # Images and tokens in one axis could not be split by tokens.
    rows = x if context_parts() > 1 else x.reshape(-1, x.shape[-1])
    biases = () if bias is None else (bias,)
    if x.dtype.itemsize != 2 or is_plain():
        y = _in_float32(rows, kernel, *biases)
    else:
        y = by_platform(lambda p: _FORMS.get(p, "float32"), PRODUCTS, rows, kernel, *biases)
    return computed(y.reshape(*x.shape[:-1], kernel.shape[-1]))


def _multiplied_out(x: jax.Array, kernel: Quantized) -> tuple[jax.Array, jax.Array]:
    """Returns x as a kernel of eight bits reads it, and the kernel."""
    if is_rematerialized():
        # XLA would multiply out the kernels of many layers at once, and keep them.
        x, kernel = barrier_on("cuda", (x, kernel))
    return kernel.rotated(x), kernel.unrotated()


def _in_float32(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> jax.Array:
    y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    for one in bias:
        y = y + one.astype(jnp.float32)
    return y.astype(x.dtype)


def _materialized(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> jax.Array:
    rows = len(x)
    # For one row alone XLA would convert the whole kernel to float32 first.
    x = jnp.pad(x, ((0, 1), (0, 0))) if rows == 1 and x.ndim == 2 else x
    return _in_float32(jax.lax.optimization_barrier(x), kernel, *bias)[:rows]


def _rounded(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> jax.Array:
    y = jnp.matmul(x, kernel)
    for one in bias:
        y = y + one
    return y


PRODUCTS = {"float32": _in_float32, "materialized": _materialized, "rounded": _rounded}
_FORMS = {"cpu": "materialized", "cuda": "rounded"}


def split_matmul(
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    widths: Sequence[int],
    read_together: Sequence[int] = (),
    parts: int = 1,
) -> tuple[jax.Array, ...]:
    """Multiplies x by matrices that stand side by side in one kernel. x: ... c -> ... d each.

    On a TPU those that are read together are one product, so that what reads a result gets it in
    the layout that it wants, instead of a copy. Elsewhere all are one.

    Args:
        x: ... c.
        kernel: c (d + ...).
        bias: (d + ...).
        widths: the columns d of each matrix.
        read_together: the number of matrices of each reader, in order; by default all have one.
        parts: the number of devices in whose order the columns are, see `arranged`.
    """
    ends = itertools.accumulate(read_together, initial=0)
    read = [widths[i:j] for i, j in itertools.pairwise(ends)]
    product = partial(_split_product, parts)
    forms = {"one": partial(product, [widths]), "several": partial(product, read)}
    if not read_together or is_plain():
        return forms["one"](x, kernel, bias)
    return by_platform(lambda p: "several" if p == "tpu" else "one", forms, x, kernel, bias)


def _split_product(
    parts: int,
    read: Sequence[Sequence[int]],
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Multiplies by the matrices of each reader in one product. read: the columns of each."""
    sizes = [sum(widths) for widths in read]
    kernels = columns(kernel, sizes, parts)
    biases = [None] * len(sizes) if bias is None else split_widths(bias, sizes, parts)
    x = x.astype(kernel.dtype)
    ys = [matmul(x, k, b) for k, b in zip(kernels, biases)]
    return tuple(z for y, widths in zip(ys, read) for z in split_widths(y, widths, parts))


def columns(kernel: Kernel, widths: Sequence[int], parts: int = 1) -> Sequence[Kernel]:
    """Returns the kernels that stand side by side in one, see `split_widths`."""
    given = widths, parts
    return kernel.columns(*given) if isinstance(kernel, Quantized) else split_widths(kernel, *given)


def apart(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Returns x several times, to be multiplied by as many matrices one after the other.

    XLA's GPU compiler would multiply it by all of them side by side, and then copy each result out
    of the whole, as cuDNN's attention takes no part of an array.
    """
    kept: tuple[jax.Array, ...] = barrier_on("cuda", (x,) * count)
    return kept


def concatenate(xs: Sequence[jax.Array], axis: int) -> jax.Array:
    """Puts arrays of one dtype beside each other.

    XLA's CPU backend does so with half precision in float32, and writes twice the bytes, unless it
    takes the numbers for integers.
    """
    if xs[0].dtype.itemsize != 2 or is_plain():
        return jnp.concatenate(xs, axis)
    forms = {"bits": partial(_concatenate_bits, axis), "numbers": partial(_concatenate, axis)}
    return by_platform(lambda p: "bits" if p == "cpu" else "numbers", forms, *xs)


def _concatenate(axis: int, *xs: jax.Array) -> jax.Array:
    return jnp.concatenate(xs, axis)


def _concatenate_bits(axis: int, *xs: jax.Array) -> jax.Array:
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in xs]
    return jax.lax.bitcast_convert_type(jnp.concatenate(bits, axis), xs[0].dtype)


def materialize(x: jax.Array) -> jax.Array:
    """Makes XLA keep x in half precision on CPU; changes nothing for other dtypes and platforms.

    XLA removes a rounding of float32 to bfloat16 before a product with a float32 result, and so
    turns that product into a float32 one, at half the speed.
    """
    kept: jax.Array = x if x.dtype.itemsize != 2 else barrier_on("cpu", x)
    return kept
