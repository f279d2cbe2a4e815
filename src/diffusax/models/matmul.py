"""Multiplies matrices with sums in float32, whatever the operands' dtype."""

import jax
import jax.numpy as jnp

from diffusax.runtime.lowering import by_platform, is_plain


def matmul(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes x kernel + bias. x: ... c, kernel: c d, bias: d -> ... d, in x's dtype.

    The product's result is float32: bfloat16 sums lose digits on every platform, and XLA's CPU
    backend has its fast bfloat16 kernel only in that form. That backend also merges a norm before
    and a bias after into the product, which is slow unless all are two-dimensional.
    """
    rows = materialize(x.reshape(-1, x.shape[-1]))
    y = jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype).reshape(*x.shape[:-1], kernel.shape[-1])


def materialize(x: jax.Array) -> jax.Array:
    """Makes XLA keep x in half precision on CPU; changes nothing for other dtypes and platforms.

    XLA removes a rounding of float32 to bfloat16 before a product with a float32 result, and so
    turns that product into a float32 one, at half the speed.
    """
    if x.dtype.itemsize != 2 or is_plain():
        return x
    return by_platform(lambda p: "barrier" if p == "cpu" else "none", _MATERIALIZED, x)


_MATERIALIZED = {"barrier": jax.lax.optimization_barrier, "none": lambda x: x}
