"""Keys and values of a UNet's or ControlNet's context, which a run computes once for all steps.

The GPU's compiler does not move these products out of the sampler's loop by itself.
"""

from collections.abc import Mapping
from typing import Any

import jax

from diffusax.models.image_prompts import cross_attentions
from diffusax.models.matmul import apart
from diffusax.models.network import Network, Params
from diffusax.models.paths import layer_at

ContextKeys = Mapping[str, tuple[Any, Any]]
"""The keys and the values, b s inner each, by the path of the cross-attention."""


def project_context(network: Any, params: Params, context: jax.Array) -> ContextKeys | None:
    """Returns the keys and values of a context, b s k, in all cross-attentions of a network.

    The networks of other libraries have none, for which it returns None.
    """
    paths = cross_attentions(network) if isinstance(network, Network) else {}
    if not paths:
        return None
    module = network.module(params)
    layers = {path: layer_at(module, path) for path in paths}
    context = context.astype(jax.tree.leaves(params)[0].dtype)
    # Side by side, the matrices of all layers would be copied into one first.
    contexts = apart(context, 2 * len(layers))
    pairs = zip(contexts[::2], contexts[1::2], strict=True)
    return {
        path: (layer.to_k(k), layer.to_v(v))
        for (path, layer), (k, v) in zip(layers.items(), pairs, strict=True)
    }
