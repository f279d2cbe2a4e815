"""The parts that denoising transformers share: rotary positions, attention, feed-forward, patches.

Shapes in the docstrings: b images, t tokens, h heads of width d, c the model's width.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.adapters.low_rank import Base
from diffusax.models.arranged import Arranged, arranged
from diffusax.models.layers.layers import ArrangedLinear, Linear, RMSNorm, project
from diffusax.models.ops.activations import approximate_gelu, gated_silu
from diffusax.models.ops.attention import attention
from diffusax.models.ops.int8 import linear
from diffusax.models.ops.layer_input import LayerInput, Tokens, as_input
from diffusax.models.ops.matmul import apart, concatenate
from diffusax.models.ops.rotation import Rotation, rotate
from diffusax.models.quantized import Kernel, dense
from diffusax.models.transformers.references import KeysValues, attend
from diffusax.runtime.devices.mesh import Rule, Rules
from diffusax.runtime.devices.splitting import (
    gather_channels,
    split_tokens,
)

TENSOR_RULES: Rules = (
    Rule(r"(to_[qkv]|add_[qkv]_proj)\.(kernel|bias)", -1, "heads"),
    Rule(r"(to_out\.0|to_add_out)\.kernel", -2, "heads"),
    (r"feed_forward\.w[13]\.kernel", -1),
    (r"feed_forward\.w2\.kernel", -2),
    (r"net\.0\.proj\.(kernel|bias)", -1),
    (r"net\.2\.kernel", -2),
    (r"(norm\w*|modulation\w*)\.linear\.(kernel|bias)", -1),
)
"""The tensor axis splits the heads, the feed-forward's inner channels, and the modulations'."""

TRANSFORMER_CACHES = ("FirstBlockCacheConfig", "TaylorSeerCacheConfig")
"""The caches of steps that all transformers have, by their options; see `models.caches`."""


def rotary_table(
    length: int, dim: int, theta: float, *, first: int = 0, angle_dtype: Any = np.float32
) -> Rotation:
    """Returns the rotations of so many positions from `first` on along one axis, length dim/2.

    The angles are computed in float64 on the host (Su et al. 2021, equation 15).

    angle_dtype: what they are rounded to before their cosines are taken: float32 as for Z-Image in
    diffusers, or float64 as for FLUX.
    """
    return _rotations(np.arange(first, first + length), dim, theta, angle_dtype)


def _rotations(positions: np.ndarray, dim: int, theta: float, angle_dtype: Any) -> Rotation:
    """Returns the rotations of positions along one axis, n -> n dim/2; see `rotary_table`."""
    frequencies = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.outer(positions.astype(np.float64), frequencies).astype(angle_dtype)
    return Rotation(*(jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin)))


def rotary_positions(
    positions: Sequence[Any],
    lengths: Sequence[int],
    dims: Sequence[int],
    theta: float,
    *,
    first: int = 0,
    angle_dtype: Any = np.float32,
) -> Rotation:
    """Returns the rotations of tokens that have a position on each of several axes.

    Args:
        positions: b t integers for each axis, from `first` to below `first` + that axis's length.
        lengths: the number of positions of each axis.
        dims: the channels of each axis, which follow each other in a head.
        theta: the base of the wavelengths.
        first: the least position of all axes.
        angle_dtype: see `rotary_table`.
    """
    tables = [
        rotary_table(n, dim, theta, first=first, angle_dtype=angle_dtype)
        for n, dim in zip(lengths, dims, strict=True)
    ]
    return _joined_axes(tables, [axis - first for axis in positions])


def _joined_axes(tables: Sequence[Rotation], places: Sequence[Any]) -> Rotation:
    """Returns the rotations at places of tables, b t each, of all axes side by side."""
    parts = [
        jax.tree.map(lambda x, i=index: x[i], table)
        for table, index in zip(tables, places, strict=True)
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=-1), *parts)


def rotation_at(ids: np.ndarray, dims: Sequence[int], theta: float) -> Rotation:
    """Returns the rotations of tokens at given positions, 1 t d/2.

    The angles are not rounded to float32 before their cosines are taken, as for FLUX in diffusers.

    Args:
        ids: the position of each token on each axis, t a, any numbers.
        dims: the channels of each axis, which follow each other in a head.
        theta: the base of the wavelengths.
    """
    tables, places = [], []
    for axis, dim in zip(ids.T, dims, strict=True):
        positions, index = np.unique(axis, return_inverse=True)
        tables.append(_rotations(positions, dim, theta, np.float64))
        places.append(index.reshape(1, -1).astype(np.int32))
    return _joined_axes(tables, places)


class RotaryAttention(nnx.Module):
    """Multi-head self-attention with rotary positions. x: b t c -> b t c.

    With `qk_norm` queries and keys are normalised in each head. Without `out` there is no layer
    after the attention.
    """

    reads_together = (("to_q", "to_k", "to_v"),)

    def __init__(
        self,
        c: int,
        *,
        heads: int,
        qk_norm: bool,
        eps: float,
        bias: bool = False,
        out: bool = True,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.to_q = Linear(c, c, bias=bias, rngs=rngs)
        self.to_k = Linear(c, c, bias=bias, rngs=rngs)
        self.to_v = Linear(c, c, bias=bias, rngs=rngs)
        self.norm_q = RMSNorm(c // heads, eps=eps, rngs=rngs) if qk_norm else None
        self.norm_k = RMSNorm(c // heads, eps=eps, rngs=rngs) if qk_norm else None
        self.to_out = nnx.List([Linear(c, c, bias=bias, rngs=rngs)]) if out else None

    def __call__(
        self, x: Tokens, rotation: Rotation, lengths: jax.Array | None = None
    ) -> jax.Array:
        """Attends to the first `lengths` tokens, b; None for all of them."""
        return self.with_keys(x, rotation, lengths)[0]

    def with_keys(
        self,
        x: Tokens,
        rotation: Rotation,
        lengths: jax.Array | None = None,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns what tokens read, and their keys, rotated, and values, b t h d each.

        lengths: see a call. before: further keys and values, which all tokens attend to.
        """
        q, k, v = split_heads(x, (self.to_q, self.to_k, self.to_v), self.heads)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = attend(q, k, v, before, lengths).reshape(x.shape)
        return y if self.to_out is None else self.to_out[0](y), (k, v)


class JointAttention(nnx.Module):
    """Attention of a text's and an image's tokens to all of both (Esser et al. 2024).

    x: b t c, context: b s c -> b t c, b s c. Each has layers of its own. Queries and keys are
    normalised in each head.
    """

    reads_together = (
        ("to_q", "to_k", "to_v"),
        ("add_q_proj", "add_k_proj", "add_v_proj"),
    )

    def __init__(self, c: int, *, heads: int, bias: bool, eps: float, rngs: nnx.Rngs):
        self.heads = heads
        self.to_q = Linear(c, c, bias=bias, rngs=rngs)
        self.to_k = Linear(c, c, bias=bias, rngs=rngs)
        self.to_v = Linear(c, c, bias=bias, rngs=rngs)
        self.norm_q = RMSNorm(c // heads, eps=eps, rngs=rngs)
        self.norm_k = RMSNorm(c // heads, eps=eps, rngs=rngs)
        self.to_out = nnx.List([Linear(c, c, bias=bias, rngs=rngs)])
        self.add_q_proj = Linear(c, c, bias=bias, rngs=rngs)
        self.add_k_proj = Linear(c, c, bias=bias, rngs=rngs)
        self.add_v_proj = Linear(c, c, bias=bias, rngs=rngs)
        self.norm_added_q = RMSNorm(c // heads, eps=eps, rngs=rngs)
        self.norm_added_k = RMSNorm(c // heads, eps=eps, rngs=rngs)
        self.to_add_out = Linear(c, c, bias=bias, rngs=rngs)

    def __call__(
        self,
        x: Tokens,
        context: Tokens,
        rotation: Rotation,
        lengths: jax.Array | None = None,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what the tokens read.

        rotation: the positions of the context's tokens, then those of x; with lengths those of x
        come first. lengths: how many of the context's first tokens are attended to, b; None for
        all. before: further keys, rotated, and values, b n h d.
        """
        own = self._own(x)
        added = split_heads(
            context, (self.add_q_proj, self.add_k_proj, self.add_v_proj), self.heads
        )
        added = self.norm_added_q(added[0]), self.norm_added_k(added[1]), added[2]
        # Lengths are those of what comes last.
        pairs = zip(added, own) if lengths is None else zip(own, added)
        q, k, v = (concatenate(pair, axis=1) for pair in pairs)
        seen = None if lengths is None else lengths + x.shape[1]
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = attend(q, k, v, before, seen)
        y = y.reshape(*y.shape[:2], -1)
        at = context.shape[1] if lengths is None else x.shape[1]
        parts = split_tokens(y[:, :at]), split_tokens(y[:, at:])
        of_context, of_x = parts if lengths is None else parts[::-1]
        return self.to_out[0](of_x), self.to_add_out(of_context)

    def alone(self, x: Tokens, rotation: Rotation) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns what image tokens read of themselves, and their keys, rotated, and values."""
        q, k, v = self._own(x)
        q, k = rotate(q, rotation), rotate(k, rotation)
        return self.to_out[0](attention(q, k, v).reshape(*x.shape[:2], -1)), (k, v)

    def _own(self, x: Tokens) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the queries, keys and values of image tokens."""
        q, k, v = split_heads(x, (self.to_q, self.to_k, self.to_v), self.heads)
        return self.norm_q(q), self.norm_k(k), v


def split_heads(x: Tokens, layers: Sequence[Any], heads: int) -> tuple[jax.Array, ...]:
    """Returns what layers make of x, in heads. x: b t c -> b t heads d each."""
    found = project(as_input(x), *layers)
    return tuple(y.reshape(*x.shape[:2], heads, -1) for y in found)


class JoinedLinear(ArrangedLinear):
    """A linear layer of two arrays whose channels stand side by side. x: ... c, y: ... d -> ... e.

    On a mesh with a tensor axis each device has a part of both beside each other, so that one sum
    over devices is enough.
    """

    axis = -2

    def __init__(self, c: int, d: int, e: int, *, bias: bool = True, rngs: nnx.Rngs):
        super().__init__(c + d, e, bias=bias, rngs=rngs)
        self.widths = c, d

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:  # type: ignore[override]
        beside = LayerInput(_beside, x, y, width=x.shape[-1] + y.shape[-1])
        parts = self.parts
        if parts == 1:
            return super().__call__(beside)
        kernel = self._on_devices()
        own = [z.reshape(*z.shape[:-1], parts, -1).astype(kernel.dtype) for z in (x, y)]
        whole = jnp.concatenate(own, axis=-1).reshape(beside.shape)
        plain, bias = self._parameters()
        z = linear(whole, kernel, bias)
        if self.adapters is not None:
            z = z + self.adapters.linear(beside.dense.astype(kernel.dtype), Base(z, plain, bias))
        return z

    def _on_devices(self) -> Kernel:
        """Returns the kernel in the order of the devices."""
        found = self.arranged()
        if not isinstance(found, Arranged):
            # The devices cut blocks of inputs that share a scale.
            found = arranged(dense(found), self.axis, self.widths, self.parts)
        values: Kernel = found.values
        return values


def _beside(x: jax.Array, y: jax.Array) -> jax.Array:
    return concatenate([x, y], axis=-1)


def activations(temb: jax.Array, *counts: int) -> list[tuple[jax.Array, ...]]:
    """Returns the SiLU of the embedded time for groups of modulations, b c for each of them.

    Modulations of one array would have a GPU copy the kernels of all blocks side by side first.
    """
    all_of_them = iter(apart(nnx.silu(temb), sum(counts)))
    return [tuple(itertools.islice(all_of_them, count)) for count in counts]


class Modulation(nnx.Module):
    """Shifts, scales and gates that follow from the time (Peebles and Xie 2023, adaLN-Zero).

    active: b c, the SiLU of the embedded time -> n arrays b 1 c.
    """

    def __init__(self, c: int, n: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.count = n
        self.linear = Linear(c, n * c, bias=bias, rngs=rngs)

    def __call__(self, active: jax.Array) -> list[jax.Array]:
        # A row for each image is little to gather, and the kernels are a quarter of FLUX.1's.
        parts = gather_channels(self.linear(active))[:, None]
        return jnp.split(parts, self.count, axis=-1)


def within_range(x: jax.Array) -> jax.Array:
    """Clips float16 to its range, as diffusers does with what FLUX's blocks return."""
    return jnp.clip(x, -65504, 65504) if x.dtype == jnp.float16 else x


class GELULayer(nnx.Module):
    """A linear layer and the approximate GELU (Hendrycks and Gimpel 2016). x: ... c -> ... d."""

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        self.proj = Linear(c, d, rngs=rngs)

    def __call__(self, x: Tokens) -> jax.Array:
        return approximate_gelu(self.proj(x))


class GELUFeedForward(nnx.Module):
    """A layer with GELU to another width, and a layer back. x: ... c -> ... c.

    inner: the width; four times c by default.
    """

    def __init__(self, c: int, inner: int | None = None, *, rngs: nnx.Rngs):
        inner = inner or 4 * c
        # The checkpoint numbers the layers 0 and 2; 1 is a dropout without parameters.
        layers = [GELULayer(c, inner, rngs=rngs), None, Linear(inner, c, rngs=rngs)]
        self.net: Any = nnx.List(layers)

    def __call__(self, x: Tokens) -> jax.Array:
        return self.net[2](self.net[0](x))


class SwiGLU(nnx.Module):
    """A feed-forward layer gated by SiLU (Shazeer 2020). x: ... c -> ... c."""

    def __init__(self, c: int, inner: int, *, rngs: nnx.Rngs):
        self.w1 = Linear(c, inner, bias=False, rngs=rngs)
        self.w2 = Linear(inner, c, bias=False, rngs=rngs)
        self.w3 = Linear(c, inner, bias=False, rngs=rngs)

    def __call__(self, x: Tokens) -> jax.Array:
        return self.w2(gated_silu(self.w1(x), self.w3(x)))
