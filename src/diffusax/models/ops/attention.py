"""Computes scaled dot-product attention, in the fastest form for the platform and shape."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from diffusax.models.ops.attention_kernels import (
    Operands,
    cudnn_attention,
    flash_on_one_device,
    for_each_head,
)
from diffusax.models.ops.matmul import materialize
from diffusax.runtime.devices.lowering import (
    by_platform,
    cuda_capability,
    is_plain,
    known_sizes,
)
from diffusax.runtime.devices.mesh import BATCH_AXES, CONTEXT_AXIS, TENSOR_AXIS
from diffusax.runtime.devices.splitting import gather_tokens, split_tokens

Lowering = Literal["whole", "chunks", "large_chunks", "xla", "cudnn", "flash", "side_by_side"]
Watcher = Callable[[Operands, Callable[[Operands], jax.Array]], jax.Array]
"""A function (operands, what computes an attention) -> the attention's result, b t h d."""
_WATCHER: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("watcher", default=None)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q k^T scale + bias) v, the softmax in float32 (Vaswani et al. 2017, eq. 1).

    On a mesh of TPUs or GPUs, trace it inside `jax.set_mesh(mesh)`, which splits batch and heads
    over it, and on one with a context axis the queries unless attention is causal.

    Args:
        q: b t h d; the result has its shape and dtype.
        k: b s g d, where g divides h: each head of keys serves h / g heads of queries that follow
            each other (Ainslie et al. 2023).
        v: b s g d.
        scale: by default d ** -0.5.
        causal: whether query i sees only keys 0 to i.
        key_lengths: b, int32; a row's queries see only this many of its first keys, at least one.
        bias: h t s, float32, which is added to the scores of all rows.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    of, watcher = Operands(q, k, v, scale, causal, key_lengths, bias), _WATCHER.get()
    return _attention(of) if watcher is None else watcher(of, _attention)


@contextlib.contextmanager
def watched_attention(watcher: Watcher) -> Iterator[None]:
    """Has a function compute all attentions that are traced in this context; see `models.hooks`."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def _attention(of: Operands) -> jax.Array:
    q, k, v, scale, causal, key_lengths, bias = of
    given = {"key_lengths": key_lengths, "bias": bias}
    more = {name: x for name, x in given.items() if x is not None}
    if not causal:
        q, k, v = split_tokens(q), gather_tokens(k), gather_tokens(v)
    if is_plain():
        return _whole(Operands(q, k, v, scale, causal, **more))
    return _by_platform(q, k, v, more, scale=scale, causal=causal)


# Layers of one shape are traced once, which halves the time of tracing a full-size UNet.
@partial(jax.jit, static_argnames=("scale", "causal"), inline=True)
def _by_platform(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    more: dict[str, jax.Array],
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    def bound(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda q, k, v, more: form(Operands(q, k, v, scale, causal, **more))

    def choose(platform: str) -> str:
        shapes = known_sizes(q.shape), known_sizes(k.shape)
        # A kernel says what it costs, in numbers.
        closed = all(isinstance(n, int) for n in q.shape)
        plain = closed and not causal and not more
        return choose_lowering(
            platform,
            q.dtype,
            *shapes,
            biased="bias" in more,
            plain=plain,
            capability=cuda_capability() if platform == "cuda" else None,
        )

    return by_platform(choose, {n: bound(form) for n, form in LOWERINGS.items()}, q, k, v, more)


def choose_lowering(
    platform: str,
    dtype: Any,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    biased: bool = False,
    plain: bool = True,
    capability: tuple[int, int] | None = None,
) -> Lowering:
    """Chooses an attention's lowering: on CPU the faster in benchmarks/lowerings_cpu.py.

    biased: whether something is added to the scores, which only the forms without a kernel do.
    plain: whether all queries see all keys, and an export leaves no size open.
    capability: the compute capability of NVIDIA's GPUs; None where it is not known.
    """
    b, t, h, d = q_shape
    s = k_shape[1]
    scores = b * h * t * s
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform == "cpu":
        return "whole" if scores <= _MAX_WHOLE_SCORES else "chunks"
    old = (capability or _MIN_CAPABILITY) < _MIN_CAPABILITY
    if platform == "cuda" and not old and half and d % 8 == 0 and d <= 128 and not biased:
        return "cudnn"
    beside = d in _SIDE_BY_SIDE and h == k_shape[2] and s <= _MAX_KEYS_SIDE_BY_SIDE
    beside = beside and jnp.dtype(dtype) == jnp.bfloat16 and plain and not biased
    if platform == "tpu" and beside:
        return "side_by_side"
    # With only a few blocks of keys, XLA's own fusion is as fast as the kernel; heads wider than
    # the kernel's lanes are padded to twice that width.
    least = _MIN_FLASH if d <= 128 else 2 * _MIN_FLASH
    if platform == "tpu" and min(t, s) >= least and not biased:
        return "flash"
    # A head that fills the device by itself loses nothing in chunks.
    wide = t * s >= _MAX_LARGE_CHUNK_SCORES
    limit = _MAX_ACCELERATOR_SCORES // 2 if wide else _MAX_ACCELERATOR_SCORES
    if scores > limit:
        return "large_chunks"
    # JAX's own form asks for products in bfloat16, which XLA refuses on cards without units for it.
    refused = platform == "cuda" and old and jnp.dtype(dtype) == jnp.bfloat16
    return "whole" if refused else "xla"


# The number of scores to hold at once, in all and per chunk, that a desktop's cache can hold.
_MAX_WHOLE_SCORES = 2**22
_MAX_CHUNK_SCORES = 2**21
# On accelerators a gigabyte of float32, because a chunk has to fill the whole device.
_MAX_ACCELERATOR_SCORES = 2**28
_MAX_LARGE_CHUNK_SCORES = 2**26
# cuDNN has attention for Ampere and later: docs.nvidia.com/cudnn, "Attention", "Support Matrix".
_MIN_CAPABILITY = (8, 0)
# The fewest queries and keys for JAX's kernel for TPUs.
_MIN_FLASH = 1024
# The widths of heads of which several fill a TPU's lanes, and the keys and values of so many lanes
# that fill half of the vector memory that a kernel has.
_SIDE_BY_SIDE = (32, 64)
_MAX_KEYS_SIDE_BY_SIDE = 2**13


def _xla(of: Operands) -> jax.Array:
    return jax.nn.dot_product_attention(
        of.q,
        of.k,
        of.v,
        None if of.bias is None else of.bias[None],
        scale=of.scale,
        is_causal=of.causal,
        key_value_seq_lengths=of.key_lengths,
        implementation="xla",
    )


def _cudnn(of: Operands) -> jax.Array:
    """Calls cuDNN's kernel on each device.

    JAX's partitioning of it takes no batch or heads that the devices do not divide, and none that
    the fsdp axis splits.
    """
    return on_each_device(cudnn_attention, of)


def _flash(of: Operands) -> jax.Array:
    """Calls JAX's kernel for TPUs on each device, which keeps the scores on the chip."""
    return on_each_device(flash_on_one_device, of)


def _side_by_side(of: Operands) -> jax.Array:
    """Calls a kernel for TPU that takes narrow heads as they lie, where queries see all keys."""
    from diffusax.models.ops.side_by_side import attend_side_by_side

    long = min(of.q.shape[1], of.k.shape[1]) >= _MIN_FLASH
    other = flash_on_one_device if long else _xla

    def run(of: Operands) -> jax.Array:
        form = lambda q, k, v: other(Operands(q, k, v, of.scale, of.causal))  # noqa: E731
        return attend_side_by_side(of.q, of.k, of.v, scale=of.scale, form=form)

    return on_each_device(run, of)


def on_each_device(kernel: Callable[[Operands], jax.Array], of: Operands) -> jax.Array:
    """Calls a kernel, which XLA cannot partition, on each device of the mesh.

    Each takes some of the batch, some of the queries on a context axis, and some of the heads, or
    of the queries if the devices do not divide the heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(of)
    q, k, v = of.q, of.k, of.v
    batch = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    images = batch if q.shape[0] % math.prod(mesh.shape[axis] for axis in batch) == 0 else None
    parts = mesh.shape.get(TENSOR_AXIS, 1)
    if k.shape[2] % parts:
        k, v = for_each_head(q, k, v)
    by_heads = parts > 1 and k.shape[2] % parts == 0
    heads = TENSOR_AXIS if by_heads else None
    queries = PartitionSpec(images, _axes_of_queries(mesh, q, of.causal, by_heads), heads)
    keys = PartitionSpec(images, None, heads)
    lengths = () if of.key_lengths is None else (of.key_lengths,)
    specs = (queries, keys, keys, *[PartitionSpec(images) for _ in lengths])

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *lengths: jax.Array) -> jax.Array:
        return kernel(Operands(q, k, v, of.scale, of.causal, *lengths))

    split = jax.shard_map(run, in_specs=specs, out_specs=queries, check_vma=False)
    return split(q, k, v, *lengths)


def _axes_of_queries(
    mesh: AbstractMesh, q: jax.Array, causal: bool, by_heads: bool
) -> tuple[str, ...] | None:
    """Returns the axes of the mesh that split the queries, those that divide their number."""
    found: tuple[str, ...] = ()
    for axis in (CONTEXT_AXIS, *([] if by_heads else [TENSOR_AXIS])):
        parts = math.prod(mesh.shape.get(name, 1) for name in (*found, axis))
        if mesh.shape.get(axis, 1) > 1 and not causal and q.shape[1] % parts == 0:
            found = (*found, axis)
    return found or None


def _whole(of: Operands) -> jax.Array:
    """Computes all scores at once."""
    q, k, v, scale, causal, key_lengths, bias = of
    shape, (groups, count) = q.shape, (k.shape[2], q.shape[2] // k.shape[2])
    run: Any = partial(_scores_times_values, first=jnp.int32(0), scale=scale, causal=causal)
    if count > 1:
        q = q.reshape(*shape[:2], groups, count, shape[-1])
        bias = None if bias is None else bias.reshape(groups, count, *bias.shape[1:])
        run = jax.vmap(run, (1, None, None, None, 0), 1)
    heads = jax.vmap(run, (1, 1, 1, None, 0), 1)
    return jax.vmap(heads, (0, 0, 0, 0, None))(q, k, v, key_lengths, bias).reshape(shape)


def _chunks(
    of: Operands, *, limit: int = _MAX_CHUNK_SCORES, together: int = _MAX_CHUNK_SCORES // 2
) -> jax.Array:
    """Computes chunks one after the other: of a head's queries, the last one padded, or of heads.

    Gradients compute the scores again, so that they do not hold b h t s of them either.

    limit: the scores of a chunk of queries.
    together: the scores of several heads that are computed at once.
    """
    q, k, v, scale, causal, key_lengths, bias = of
    (b, t, h, d), s = q.shape, k.shape[1]
    count = math.ceil(t / max(1, limit // s))
    size = math.ceil(t / count)

    k, v = for_each_head(q, k, v)
    q = jnp.pad(q, ((0, 0), (0, count * size - t), (0, 0), (0, 0)))
    q, k, v = (
        materialize(x.transpose(0, 2, 1, 3).reshape(b * h, x.shape[1], d)) for x in (q, k, v)
    )
    lengths = None if key_lengths is None else jnp.repeat(key_lengths, h)
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, count * size - t), (0, 0)))
        bias = bias.reshape(h, count, size, s)

    def head(args: tuple[Any, ...]) -> jax.Array:
        q, k, v, length, index = args

        @jax.checkpoint
        def chunk(args: tuple[Any, ...]) -> jax.Array:
            q, first, bias = args
            return _scores_times_values(
                q, k, v, length, bias, first=first, scale=scale, causal=causal
            )

        own = None if bias is None else bias[index % h]
        return jax.lax.map(chunk, (q.reshape(count, size, d), jnp.arange(count) * size, own))

    numbers = None if bias is None else jnp.arange(b * h)
    heads = max(1, min(b * h, together // (t * s)))
    y = jax.lax.map(head, (q, k, v, lengths, numbers), batch_size=heads if heads > 1 else None)
    y = y.reshape(b, h, count * size, d)
    return y[:, :, :t].transpose(0, 2, 1, 3)


def _large_chunks(of: Operands, *, limit: int = _MAX_LARGE_CHUNK_SCORES) -> jax.Array:
    """Computes chunks that fill an accelerator, on a mesh in a loop of each device's own.

    For a loop over images that are split, XLA gathers all of them on each device.
    """
    run = partial(_chunks, limit=limit, together=0)
    return on_each_device(run, of) if of.bias is None else run(of)


def _scores_times_values(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array | None,
    bias: jax.Array | None,
    *,
    first: jax.Array,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Computes one head; `first` is the first query's position. q: t d, k and v: s d -> t d."""
    # Queries are fewer than scores, but half precision would round them once more.
    early = q.dtype == jnp.float32
    scores = jnp.matmul(q * scale if early else q, k.T, preferred_element_type=jnp.float32)
    scores = scores if early else scores * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = jnp.arange(k.shape[0]) <= first + jnp.arange(q.shape[0])[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    if length is not None:
        scores = jnp.where(jnp.arange(k.shape[0]) < length, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    p = jnp.exp(scores - top).astype(v.dtype)
    # Without the barrier XLA computes the exponentials once for the sum and again for the product.
    p = jax.lax.optimization_barrier(p)
    total = p.astype(jnp.float32).sum(-1, keepdims=True)
    return (jnp.matmul(p, v, preferred_element_type=jnp.float32) / total).astype(q.dtype)


LOWERINGS: dict[str, Callable[..., jax.Array]] = {
    "whole": _whole,
    "chunks": _chunks,
    "large_chunks": _large_chunks,
    "xla": _xla,
    "cudnn": _cudnn,
    "flash": _flash,
    "side_by_side": _side_by_side,
}
"""The lowerings by name; each takes `Operands`.

Those without a kernel of their own take a bias, too. Those in chunks take the limit of the scores
in one chunk.
"""
