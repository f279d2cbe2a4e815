"""Attention in two steps with the whole map between them, for who looks at it or changes it."""

import jax
import jax.numpy as jnp

from diffusax.models.ops.attention_kernels import Operands, for_each_head


def attention_probs(of: Operands) -> jax.Array:
    """Computes softmax(q k^T scale + bias), the softmax in float32: b h t s, float32."""
    k, _ = for_each_head(of.q, of.k, of.v)
    scores = jnp.einsum("bthd,bshd->bhts", of.q, k, preferred_element_type=jnp.float32) * of.scale
    if of.bias is not None:
        scores = scores + of.bias
    keys = jnp.arange(k.shape[1])
    if of.causal:
        scores = jnp.where(keys <= jnp.arange(of.q.shape[1])[:, None], scores, -jnp.inf)
    if of.key_lengths is not None:
        scores = jnp.where(keys < of.key_lengths[:, None, None, None], scores, -jnp.inf)
    return jax.nn.softmax(scores)


def weighted_values(probs: jax.Array, of: Operands) -> jax.Array:
    """Returns the values, summed with weights b h t s in the place of the attention's own."""
    _, v = for_each_head(of.q, of.k, of.v)
    weights = probs.astype(v.dtype)
    y = jnp.einsum("bhts,bshd->bthd", weights, v, preferred_element_type=jnp.float32)
    return y.astype(of.q.dtype)
