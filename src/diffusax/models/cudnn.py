"""Attention by cuDNN's kernel on one NVIDIA GPU, with odd lengths and lengths of keys."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.runtime.compat import pretend_cudnn


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Computes attention, even if the program is only traced and this machine has no cuDNN.

    The arguments are those of `diffusax.models.attention.attention`.
    """
    pretend_cudnn()
    if key_lengths is not None:
        return _padded(q, k, v, key_lengths, scale=scale, causal=causal)
    if q.shape[1] % 2 or k.shape[1] % 2:
        return _odd(q, k, v, scale, causal)
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _cudnn_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool, **lengths: Any
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation="cudnn", **lengths
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _odd(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Takes odd lengths, which the kernel's gradients do not; those are computed on padding."""
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _odd_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool
) -> tuple[jax.Array, Any]:
    return jax.vjp(partial(_padded, scale=scale, causal=causal), q, k, v)


def _odd_backward(scale: float, causal: bool, pull: Any, g: jax.Array) -> Any:
    del scale, causal
    return pull(g)


_odd.defvjp(_odd_forward, _odd_backward)


def _padded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Pads odd lengths; the true lengths tell the kernel what is padding."""
    (b, t, _, _), s = q.shape, k.shape[1]
    own = jnp.full(b, s, jnp.int32) if key_lengths is None else key_lengths
    lengths = {"query_seq_lengths": jnp.full(b, t, jnp.int32), "key_value_seq_lengths": own}
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal, **lengths)[:, :t]
