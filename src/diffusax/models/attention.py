"""Scaled dot-product attention, lowered to what is fastest on the platform at that shape."""

import jax


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None, causal: bool = False
) -> jax.Array:
    """softmax(q k^T scale) v (Vaswani et al. 2017, equation 1), the softmax in float32.

    q: b t h d, k and v: b s h d -> b t h d, in q's dtype. scale defaults to d ** -0.5.
    """
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal)
