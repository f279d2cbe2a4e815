"""Computes scaled dot-product attention, in the fastest form for the platform and shape."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diffusax.models.matmul import materialize
from diffusax.runtime.compat import pretend_cudnn
from diffusax.runtime.lowering import by_platform, is_plain, known_sizes
from diffusax.runtime.mesh import BATCH_AXES, TENSOR_AXIS

Lowering = Literal["whole", "chunks", "large_chunks", "xla", "cudnn", "flash"]


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None, causal: bool = False
) -> jax.Array:
    """Computes softmax(q k^T scale) v, the softmax in float32 (Vaswani et al. 2017, equation 1).

    q: b t h d, k and v: b s h d -> b t h d, in q's dtype. scale defaults to d ** -0.5. With
    `causal`, query i sees keys 0 to i.

    On a mesh of TPUs or GPUs, trace it inside `jax.set_mesh(mesh)`, which splits batch and heads
    over it.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_plain():
        return _whole(q, k, v, scale, causal)
    return _by_platform(q, k, v, scale=scale, causal=causal)


# Layers of one shape are traced once, which halves the time of tracing a full-size UNet.
@partial(jax.jit, static_argnames=("scale", "causal"), inline=True)
def _by_platform(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> jax.Array:
    forms = {name: partial(form, scale=scale, causal=causal) for name, form in LOWERINGS.items()}

    def choose(platform: str) -> str:
        return choose_lowering(platform, q.dtype, known_sizes(q.shape), known_sizes(k.shape))

    return by_platform(choose, forms, q, k, v)


def choose_lowering(
    platform: str, dtype: Any, q_shape: Sequence[int], k_shape: Sequence[int]
) -> Lowering:
    """Chooses an attention's lowering: on CPU the faster in benchmarks/lowerings_cpu.py."""
    b, t, h, d = q_shape
    s = k_shape[1]
    scores = b * h * t * s
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform == "cpu":
        return "whole" if scores <= _MAX_WHOLE_SCORES else "chunks"
    if platform == "cuda" and half and d % 8 == 0 and d <= 128:
        return "cudnn"
    # With only a few blocks of keys, XLA's own fusion is as fast as the kernel; heads wider than
    # the kernel's lanes are padded to twice that width.
    if platform == "tpu" and min(t, s) >= (1024 if d <= 128 else 2048):
        return "flash"
    return "xla" if scores <= _MAX_ACCELERATOR_SCORES else "large_chunks"


# The number of scores to hold at once, in all and per chunk, that a desktop's cache can hold.
_MAX_WHOLE_SCORES = 2**22
_MAX_CHUNK_SCORES = 2**21
# On accelerators a gigabyte of float32, because a chunk has to fill the whole device.
_MAX_ACCELERATOR_SCORES = 2**28
_MAX_LARGE_CHUNK_SCORES = 2**26


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation="xla"
    )


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Calls cuDNN's kernel, even if the program is only traced and this machine has no cuDNN.

    JAX's partitioning of it takes no batch or heads that the devices do not divide, and none that
    the fsdp axis splits.
    """
    return _on_each_device(_cudnn_on_one_device, q, k, v, scale, causal)


def _cudnn_on_one_device(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> jax.Array:
    pretend_cudnn()
    if q.shape[1] % 2 or k.shape[1] % 2:
        return _cudnn_odd(q, k, v, scale, causal)
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _cudnn_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool, **lengths: Any
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation="cudnn", **lengths
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _cudnn_odd(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Takes odd lengths, which the kernel's gradients do not; those are computed on padding."""
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _cudnn_odd_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool
) -> tuple[jax.Array, Any]:
    return jax.vjp(partial(_cudnn_padded, scale=scale, causal=causal), q, k, v)


def _cudnn_odd_backward(scale: float, causal: bool, pull: Any, g: jax.Array) -> Any:
    del scale, causal
    return pull(g)


_cudnn_odd.defvjp(_cudnn_odd_forward, _cudnn_odd_backward)


def _cudnn_padded(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> jax.Array:
    (b, t, _, _), s = q.shape, k.shape[1]
    names = {"query_seq_lengths": t, "key_value_seq_lengths": s}
    lengths = {name: jnp.full(b, n, jnp.int32) for name, n in names.items()}
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal, **lengths)[:, :t]


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Calls JAX's Pallas kernel for TPU (Dao et al. 2022), which keeps the scores on the chip."""
    return _on_each_device(_flash_on_one_device, q, k, v, scale, causal)


def _on_each_device(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Calls a kernel, which XLA cannot partition, on each device of the mesh.

    Each takes some of the batch, and some of the heads, or of the queries if the devices do not
    divide the heads.
    """
    run = partial(kernel, scale=scale, causal=causal)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(q, k, v)
    batch = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    images = batch if q.shape[0] % math.prod(mesh.shape[axis] for axis in batch) == 0 else None
    parts = mesh.shape.get(TENSOR_AXIS, 1)
    by_heads = parts > 1 and q.shape[2] % parts == 0
    by_queries = parts > 1 and not by_heads and not causal and q.shape[1] % parts == 0
    heads = TENSOR_AXIS if by_heads else None
    queries = PartitionSpec(images, TENSOR_AXIS if by_queries else None, heads)
    keys = PartitionSpec(images, None, heads)
    split = jax.shard_map(run, in_specs=(queries, keys, keys), out_specs=queries, check_vma=False)
    return split(q, k, v)


def _flash_on_one_device(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> jax.Array:
    """Pads positions to the kernel's blocks, and marks padding as another segment."""
    from jax.experimental.pallas.ops.tpu.flash_attention import (
        BlockSizes,
        SegmentIds,
        flash_attention,
    )

    (b, t, _, d), s = q.shape, k.shape[1]
    # The kernel takes any head size up to 128, and multiples of 128.
    pad = -d % 128 if d > 128 else 0
    rows, columns = _block(t), _block(s)
    q, k, v = (
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, -x.shape[1] % block), (0, pad)))
        for x, block in ((q, rows), (k, columns), (v, columns))
    )
    segments = None
    if q.shape[2] > t or k.shape[2] > s:
        ids = (jnp.arange(x.shape[2]) >= n for x, n in ((q, t), (k, s)))
        segments = SegmentIds(*(jnp.broadcast_to(i.astype(jnp.int32), (b, i.size)) for i in ids))
    blocks = BlockSizes(
        block_b=1,
        block_q=rows,
        block_k_major=columns,
        block_k=columns,
        block_q_major_dkv=rows,
        block_q_dkv=rows,
        block_k_major_dkv=columns,
        block_k_dkv=columns,
        block_q_dq=rows,
        block_k_major_dq=columns,
        block_k_dq=columns,
    )
    y = flash_attention(
        q, k, v, segment_ids=segments, causal=causal, sm_scale=scale, block_sizes=blocks
    )
    return y[:, :, :t, :d].transpose(0, 2, 1, 3)


def _block(n: int) -> int:
    """Returns the positions per block, which are many because each block reads all keys."""
    return next((size for size in (512, 384, 256) if n % size == 0), 512 if n > 2048 else 128)


def _whole(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Computes all scores at once."""
    heads = partial(_scores_times_values, first=jnp.int32(0), scale=scale, causal=causal)
    return jax.vmap(jax.vmap(heads, 1, 1))(q, k, v)


def _chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool, *, large: bool = False
) -> jax.Array:
    """Computes one head and one chunk of its queries after the other, the last chunk padded.

    Gradients compute the scores again, so that they do not hold b h t s of them either.
    """
    (b, t, h, d), s = q.shape, k.shape[1]
    limit = _MAX_LARGE_CHUNK_SCORES if large else _MAX_CHUNK_SCORES
    count = math.ceil(t / max(1, limit // s))
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
    """Computes one head; `first` is the first query's position. q: t d, k and v: s d -> t d."""
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


LOWERINGS: dict[str, Callable[..., jax.Array]] = {
    "whole": _whole,
    "chunks": _chunks,
    "large_chunks": partial(_chunks, large=True),
    "xla": _xla,
    "cudnn": _cudnn,
    "flash": _flash,
}
"""The lowerings by name; each takes q, k, v, scale and causal."""
