"""Images as prompts of a UNet: the cross-attention of IP-Adapters (Ye et al. 2023).

Each cross-attention computes attention(q, K, V) + scale * attention(q, K', V'), where K' and V' are
products of an image's tokens with an IP-Adapter's own matrices. Tokens, scales and masks are data
for each row of the batch: other ones compile nothing.

Upstream: diffusers models/attention_processor.py, IPAdapterAttnProcessor2_0.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.models.adapters.low_rank import layer_at
from diffusax.models.ops.attention import attention
from diffusax.models.ops.matmul import apart, matmul
from diffusax.models.parameter_tree import ordered_leaves, path_name

_BLOCKS = ("down_blocks", "up_blocks", "mid_block")
_TO_K = re.compile(rf"((?:{'|'.join(_BLOCKS)})\..*\.attn2)\.to_k\.kernel")


class KeysValues(NamedTuple):
    """The matrices of an IP-Adapter for one cross-attention, each d inner."""

    to_k: Any
    to_v: Any


ImageLayers = Mapping[str, KeysValues]
"""An IP-Adapter's matrices by the path of the cross-attention in the UNet, joined by dots."""


class ImagePrompt(NamedTuple):
    """The images that one IP-Adapter sees in each row of the network's batch.

    tokens: b n t d, n images of t tokens each. scales: b l n, the scale of each image in each of l
    cross-attentions, in the order of `cross_attentions`; b l 1 without masks. masks: how much each
    query sees of each image, one array b n q for each number of queries; empty where all queries
    see all images. keys: the tokens' keys and values by the path of the cross-attention,
    b (n t) inner each; None where they are still to be computed.
    """

    tokens: Any
    scales: Any
    masks: tuple[Any, ...] = ()
    keys: Mapping[str, tuple[Any, Any]] | None = None


class ImagePrompts(NamedTuple):
    """The IP-Adapters of a UNet, one or several, and the images that they see."""

    layers: tuple[ImageLayers, ...]
    prompts: tuple[ImagePrompt, ...]

    def projected(self) -> tuple[ImagePrompt, ...]:
        """Returns the images with their keys and values, which a run computes before its steps."""
        return tuple(
            prompt if prompt.keys is not None else prompt._replace(keys=_keys(layers, prompt))
            for layers, prompt in zip(self.layers, self.prompts, strict=True)
        )


class LayerImagePrompts(NamedTuple):
    """The IP-Adapters of one cross-attention while it is traced."""

    prompts: tuple[ImagePrompt, ...]
    """The images with their keys and values."""
    path: str
    """The path of the cross-attention."""
    number: int
    """The number of the cross-attention among the scales."""

    def attend(self, q: jax.Array) -> jax.Array:
        """Returns what the images add to an attention's result. q: b t h d -> b t h d.

        Raises:
            ValueError: there are masks, but none for this number of queries.
        """
        return functools.reduce(jnp.add, (self._attend(q, prompt) for prompt in self.prompts))

    def _attend(self, q: jax.Array, prompt: ImagePrompt) -> jax.Array:
        """Returns what the images of one IP-Adapter add."""
        assert prompt.keys is not None
        keys, (n, t) = prompt.keys[self.path], prompt.tokens.shape[1:3]
        scales, mask = prompt.scales[:, self.number], _mask_for(q.shape[1], prompt.masks)
        if mask is None:
            # All images are one sequence, which shares a softmax.
            groups = [(slice(None), scales[:, :1])]
        else:
            each = [slice(i * t, (i + 1) * t) for i in range(n)]
            groups = [(own, scales[:, i, None] * mask[:, i]) for i, own in enumerate(each)]
        total = jnp.zeros(q.shape, jnp.float32)
        for own, scale in groups:
            k, v = (x[:, own].reshape(len(q), -1, *q.shape[2:]) for x in keys)
            total += attention(q, k, v).astype(jnp.float32) * scale[..., None, None]
        return total.astype(q.dtype)


def _keys(layers: ImageLayers, prompt: ImagePrompt) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns the keys and values of an IP-Adapter's images; see `ImagePrompt`."""
    b, n, t, d = prompt.tokens.shape
    # Side by side, the matrices of all layers would be copied into one first.
    tokens = iter(apart(prompt.tokens.reshape(b, n * t, d), 2 * len(layers)))

    def product(kernel: jax.Array) -> jax.Array:
        return matmul(next(tokens).astype(kernel.dtype), kernel)

    return {path: (product(own.to_k), product(own.to_v)) for path, own in layers.items()}


def _mask_for(queries: int, masks: tuple[Any, ...]) -> jax.Array | None:
    if not masks:
        return None
    found = next((mask for mask in masks if mask.shape[-1] == queries), None)
    if found is None:
        known = ", ".join(str(mask.shape[-1]) for mask in masks)
        raise ValueError(f"ip_adapter_masks are for {known} queries; an attention has {queries}")
    return found


def attach_images(module: Any, given: ImagePrompts) -> None:
    """Gives the cross-attentions of a UNet their IP-Adapters, for one trace.

    Raises:
        ValueError: the module lacks a cross-attention of the IP-Adapters.
    """
    prompts = given.projected()
    for number, path in enumerate(in_order(given.layers[0])):
        layer = layer_at(module, path)
        if layer is None:
            raise ValueError(
                f"an IP-Adapter has the layer {path!r}, which {type(module).__name__} lacks"
            )
        own = LayerImagePrompts(prompts, path, number)
        # An attribute of this trace's module alone, which is no part of Flax's state.
        object.__setattr__(layer, "image_prompts", own)


@functools.lru_cache(16)
def cross_attentions(network: Any) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the keys' kernels, d inner, of a UNet's cross-attentions by path.

    They have the order in which IP-Adapters count them: down, up, and then the middle, as
    `attn_processors` of diffusers. Other networks have none.
    """
    leaves = ordered_leaves(network.shapes)
    named = ((_TO_K.fullmatch(path_name(path)), leaf) for path, leaf in leaves)
    found = {match[1]: tuple(leaf.shape) for match, leaf in named if match}
    return {path: found[path] for path in in_order(found)}


def in_order(paths: Iterable[str]) -> list[str]:
    """Sorts the paths of cross-attentions in the order in which IP-Adapters count them."""

    def key(path: str) -> tuple[int, list[int]]:
        block, *rest = path.split(".")
        return _BLOCKS.index(block), [int(part) for part in rest if part.isdecimal()]

    return sorted(paths, key=key)
