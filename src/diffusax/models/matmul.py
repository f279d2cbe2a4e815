"""Matrix products that accumulate in float32, whatever the operands' type."""

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x: ... c, kernel: c d -> ... d, in x's dtype.

    The product is asked for in float32: bfloat16 sums lose digits on every platform, and XLA's CPU
    backend has its fast bfloat16 kernel only in that form.
    """
    y = jax.lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.astype(x.dtype)
