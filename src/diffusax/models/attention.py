"""Scaled dot-product attention, lowered to what is fastest on the platform at that shape."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from diffusax.models.matmul import materialize
from diffusax.runtime.lowering import is_plain

Lowering = Literal["whole", "chunks", "xla", "cudnn", "flash"]


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None, causal: bool = False
) -> jax.Array:
    """softmax(q k^T scale) v (Vaswani et al. 2017, equation 1), the softmax in float32.

    q: b t h d, k and v: b s h d -> b t h d, in q's dtype. scale defaults to d ** -0.5. With
    `causal`, query i sees keys 0 to i.
    """
    name = choose_lowering(jax.default_backend(), q.dtype, q.shape, k.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return LOWERINGS["whole" if is_plain() else name](q, k, v, scale, causal)


def choose_lowering(
    platform: str, dtype: Any, q_shape: Sequence[int], k_shape: Sequence[int]
) -> Lowering:
    """The lowering of an attention: on CPU the faster of those that lowerings_cpu.py times."""
    b, t, h, d = q_shape
    s = k_shape[1]
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform == "cpu":
        return "whole" if b * h * t * s <= _MAX_WHOLE_SCORES else "chunks"
    if platform in ("gpu", "cuda") and half and d % 8 == 0 and d <= 128:
        return "cudnn"
    # The kernel's blocks are 128 rows; below a few of them XLA's own fusion is as good.
    if platform == "tpu" and min(t, s) >= 1024 and t % 128 == 0 and s % 128 == 0:
        return "flash"
    return "xla"


# Scores to hold at once, b h t s and per chunk: what stays in a desktop's last-level cache.
_MAX_WHOLE_SCORES = 2**22
_MAX_CHUNK_SCORES = 2**21


def _xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    causal: bool,
    implementation: Any = "xla",
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation=implementation
    )


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """JAX's Pallas kernel for TPU (Dao et al. 2022), which keeps the scores on the chip."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    # The kernel takes head sizes up to 128 as they are and larger ones in multiples of 128.
    d = q.shape[-1]
    pad = -d % 128 if d > 128 else 0
    q, k, v = (
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 0), (0, pad))) for x in (q, k, v)
    )
    y = flash_attention(q, k, v, causal=causal, sm_scale=scale)
    return y.transpose(0, 2, 1, 3)[..., :d]


def _whole(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """All scores at once."""
    heads = partial(_scores_times_values, first=jnp.int32(0), scale=scale, causal=causal)
    return jax.vmap(jax.vmap(heads, 1, 1))(q, k, v)


def _chunks(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """One head and one chunk of its queries after the other, the last chunk filled up.

    Gradients compute the scores again, so they too never hold b h t s of them.
    """
    (b, t, h, d), s = q.shape, k.shape[1]
    count = math.ceil(t / max(1, _MAX_CHUNK_SCORES // s))
    size = math.ceil(t / count)

    q = jnp.pad(q, ((0, 0), (0, count * size - t), (0, 0), (0, 0)))
    q, k, v = (
        materialize(x.transpose(0, 2, 1, 3).reshape(b * h, x.shape[1], d)) for x in (q, k, v)
    )

    def head(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = qkv

        @jax.checkpoint
        def chunk(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, first = args
            return _scores_times_values(q, k, v, first=first, scale=scale, causal=causal)

        return jax.lax.map(chunk, (q.reshape(count, size, d), jnp.arange(count) * size))

    y = jax.lax.map(head, (q, k, v)).reshape(b, h, count * size, d)
    return y[:, :, :t].transpose(0, 2, 1, 3)


def _scores_times_values(
    q: jax.Array, k: jax.Array, v: jax.Array, *, first: jax.Array, scale: float, causal: bool
) -> jax.Array:
    """One head; `first` is the position of the first query. q: t d, k and v: s d -> t d."""
    scores = jnp.matmul(q, k.T, preferred_element_type=jnp.float32) * scale
    if causal:
        seen = jnp.arange(k.shape[0]) <= first + jnp.arange(q.shape[0])[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    p = jnp.exp(scores - top).astype(v.dtype)
    # Without the barrier XLA computes the exponentials once for the sum and again for the product.
    p = jax.lax.optimization_barrier(p)
    total = p.astype(jnp.float32).sum(-1, keepdims=True)
    return (jnp.matmul(p, v, preferred_element_type=jnp.float32) / total).astype(q.dtype)


LOWERINGS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, float, bool], jax.Array]] = {
    "whole": _whole,
    "chunks": _chunks,
    "xla": _xla,
    "cudnn": partial(_xla, implementation="cudnn"),
    "flash": _flash,
}
"""Each takes q, k, v, scale and causal."""
