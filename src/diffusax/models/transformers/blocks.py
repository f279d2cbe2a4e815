"""The parts that denoising transformers share: rotary positions, attention, feed-forward, patches.

Shapes in the docstrings: b images, t tokens, h heads of width d, c the model's width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.attention import attention
from diffusax.models.layers import Linear, RMSNorm
from diffusax.runtime.lowering import by_platform, is_plain
from diffusax.runtime.mesh import Rule, Rules

TENSOR_RULES: Rules = (
    Rule(r"to_[qkv]\.(kernel|bias)", -1, "heads"),
    Rule(r"to_out\.0\.kernel", -2, "heads"),
    (r"feed_forward\.w[13]\.kernel", -1),
    (r"feed_forward\.w2\.kernel", -2),
)
"""The tensor axis splits the heads, and the feed-forward's inner channels."""


class Rotation(NamedTuple):
    """The rotation of each token's pairs of channels, b t d/2 each, or 1 t d/2."""

    cos: jax.Array
    sin: jax.Array


def rotary_table(length: int, dim: int, theta: float) -> Rotation:
    """Returns the rotations of positions 0 to length - 1 along one axis, length dim/2.

    The angles are computed in float64 on the host and rounded once, as diffusers does
    (Su et al. 2021, equation 15).
    """
    frequencies = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.outer(np.arange(length, dtype=np.float64), frequencies).astype(np.float32)
    return Rotation(jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))


def rotary_positions(
    positions: Sequence[jax.Array], lengths: Sequence[int], dims: Sequence[int], theta: float
) -> Rotation:
    """Returns the rotations of tokens that have a position on each of several axes.

    Args:
        positions: b t integers for each axis, below that axis's length.
        lengths: the number of positions of each axis.
        dims: the channels of each axis, which follow each other in a head.
        theta: the base of the wavelengths.
    """
    tables = [rotary_table(n, dim, theta) for n, dim in zip(lengths, dims, strict=True)]
    parts = [
        jax.tree.map(lambda x, i=index: x[i], table)
        for table, index in zip(tables, positions, strict=True)
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=-1), *parts)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates neighbouring pairs of channels in float32. x: b t h d -> b t h d, in x's dtype."""
    if is_plain():
        return _rotate_pairs(x, rotation)
    return by_platform(lambda p: "product" if p == "tpu" else "pairs", _ROTATIONS, x, rotation)


def _rotate_pairs(x: jax.Array, rotation: Rotation) -> jax.Array:
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _rotate_by_product(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Swaps the channels of pairs by a product with a permutation, which rounds nothing.

    An axis of length two would make a TPU copy the array into another layout and back.
    """
    quarter = np.kron(np.eye(x.shape[-1] // 2), [[0, 1], [-1, 0]])
    turned = jnp.matmul(
        x,
        jnp.asarray(quarter, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    cos, sin = (jnp.repeat(table, 2, axis=-1)[:, :, None] for table in rotation)
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


_ROTATIONS = {"pairs": _rotate_pairs, "product": _rotate_by_product}


def written(x: jax.Array) -> jax.Array:
    """Makes a TPU write x, which is scaled by the image's modulation, to memory as it is.

    XLA would move the reshape of the next product before the scaling, and write the scales of all
    blocks for all tokens instead.
    """
    if is_plain():
        return x
    return by_platform(lambda p: "barrier" if p == "tpu" else "none", _WRITTEN, x)


_WRITTEN = {"barrier": jax.lax.optimization_barrier, "none": lambda x: x}


class RotaryAttention(nnx.Module):
    """Multi-head self-attention with rotary positions. x: b t c -> b t c.

    With `qk_norm` queries and keys are normalised in each head.
    """

    def __init__(self, c: int, *, heads: int, qk_norm: bool, eps: float, rngs: nnx.Rngs):
        self.heads = heads
        self.to_q = Linear(c, c, bias=False, rngs=rngs)
        self.to_k = Linear(c, c, bias=False, rngs=rngs)
        self.to_v = Linear(c, c, bias=False, rngs=rngs)
        self.norm_q = RMSNorm(c // heads, eps=eps, rngs=rngs) if qk_norm else None
        self.norm_k = RMSNorm(c // heads, eps=eps, rngs=rngs) if qk_norm else None
        self.to_out = nnx.List([Linear(c, c, bias=False, rngs=rngs)])

    def __call__(self, x: jax.Array, rotation: Rotation, lengths: jax.Array | None) -> jax.Array:
        """Attends to the first `lengths` tokens, b; None for all of them."""
        q, k, v = (
            to(x).reshape(*x.shape[:2], self.heads, -1) for to in (self.to_q, self.to_k, self.to_v)
        )
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        y = attention(rotate(q, rotation), rotate(k, rotation), v, key_lengths=lengths)
        return self.to_out[0](y.reshape(x.shape))


class SwiGLU(nnx.Module):
    """A feed-forward layer gated by SiLU (Shazeer 2020). x: ... c -> ... c."""

    def __init__(self, c: int, inner: int, *, rngs: nnx.Rngs):
        self.w1 = Linear(c, inner, bias=False, rngs=rngs)
        self.w2 = Linear(inner, c, bias=False, rngs=rngs)
        self.w3 = Linear(c, inner, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(nnx.silu(self.w1(x)) * self.w3(x))


def patchify(x: jax.Array, size: int) -> jax.Array:
    """Cuts maps into tokens of size x size pixels, row by row. x: b h w c -> b t (size size c)."""
    b, h, w, c = x.shape
    cut = x.reshape(b, h // size, size, w // size, size, c)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(b, (h // size) * (w // size), size * size * c)


def unpatchify(x: jax.Array, size: int, h: int, w: int) -> jax.Array:
    """Inverts `patchify` for maps of h rows and w columns: b t (size size c) -> b h w c."""
    b, c = x.shape[0], x.shape[-1] // size**2
    cut = x.reshape(b, h // size, w // size, size, size, c)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
