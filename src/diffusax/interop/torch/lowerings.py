"""PyTorch operations that run through diffusax's own lowerings, or that torchax lacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch.aliasing import contiguous
from diffusax.interop.torch.assigning import get_item, index_put
from diffusax.interop.torch.compat import UNSAFE_INDEX_PUT, torchax_convolution
from diffusax.models.ops.attention import attention
from diffusax.models.ops.conv import conv2d


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Implements PyTorch's function: query ... h t d, key and value ... h s d -> ... h t d.

    A mask is boolean or added to the scores, ... h t s. Dropout is left out, since modules are not
    trained here.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(x, repeats, axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and query.ndim == 4 and value.shape[-1] == query.shape[-1]:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        return attention(q, k, v, scale=scale, causal=is_causal).transpose(0, 2, 1, 3)
    scores = jnp.einsum("...td,...sd->...ts", query, key, preferred_element_type=jnp.float32)
    scores *= scale
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(jnp.float32)
    # A query whose mask excludes every key gets zeros, as in PyTorch.
    empty = jnp.max(scores, axis=-1, keepdims=True) == -jnp.inf
    weights = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
    return jnp.matmul(weights.astype(value.dtype), value)


def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """Implements aten::convolution; plain two-dimensional ones run `diffusax.models.ops.conv`.

    x: b c h w, weight: d c kh kw, bias: d -> b d h' w'.
    """
    plain = x.ndim == 4 and weight.ndim == 4 and not transposed and groups == 1
    if not (plain and set(dilation) == {1} and len(set(stride)) == 1):
        return torchax_convolution(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    pads = [(p, p) for p in (padding if len(padding) == 2 else [*padding] * 2)]
    y = conv2d(
        x.transpose(0, 2, 3, 1),
        weight.transpose(2, 3, 1, 0),
        stride=stride[0],
        padding=(pads[0], pads[1]),
    )
    y = y if bias is None else y + bias
    return y.transpose(0, 3, 1, 2)


def fill_diagonal_(x: Any, value: float, wrap: bool = False) -> Any:
    """Implements torch.Tensor.fill_diagonal_ in place; torchax writes into a copy."""
    filled = jnp.fill_diagonal(x.jax(), value, wrap=wrap, inplace=False)
    if hasattr(x, "replace_source_jax"):
        x.update(filled)
    else:
        x.apply_jax_(lambda _: filled)
    return x


OPERATORS: dict[Any, tuple[Callable[..., Any], bool]] = {
    torch.nn.functional.scaled_dot_product_attention: (scaled_dot_product_attention, True),
    torch.ops.aten.scaled_dot_product_attention: (scaled_dot_product_attention, True),
    torch.ops.aten.convolution: (convolution, True),
    torch.ops.aten.index_put: (index_put, True),
    UNSAFE_INDEX_PUT: (index_put, True),
    torch.Tensor.__getitem__: (get_item, False),
    torch.Tensor.contiguous: (contiguous, False),
    torch.Tensor.fill_diagonal_: (fill_diagonal_, False),
    torch.ops.aten.fill_diagonal_: (fill_diagonal_, False),
}
"""The implementation of each PyTorch function, and whether it takes arrays or tensors in place."""
