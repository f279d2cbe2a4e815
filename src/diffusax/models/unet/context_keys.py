"""Keys and values of a UNet's or ControlNet's context, which a run computes once for all steps.

The GPU's compiler does not move these products out of the sampler's loop by itself.
"""

from collections.abc import Mapping
from typing import Any

import jax

from diffusax.models.adapters.image_prompts import cross_attentions
from diffusax.models.adapters.low_rank import Attachable, attach, layer_at
from diffusax.models.layers.inputs import check_tokens
from diffusax.models.network import Network, Params
from diffusax.models.ops.matmul import apart
from diffusax.models.parameter_tree import first_parameter

ContextKeys = Mapping[str, tuple[Any, Any]]
"""The keys and the values by the path of the cross-attention: b s inner each."""


def project_context(
    network: Any, params: Params, context: jax.Array, adapters: Attachable | None = None
) -> ContextKeys | None:
    """Returns the keys and values of a context, b s k, in all cross-attentions of a network.

    The networks of other libraries have none, for which it returns None. adapters: those of the
    network.
    """
    paths = cross_attentions(network) if isinstance(network, Network) else {}
    if not paths:
        return None
    module = network.module(params)
    if adapters is not None:
        attach(module, adapters)
    layers = {path: layer_at(module, path) for path in paths}
    for layer in layers.values():
        check_tokens("encoder_hidden_states", context, {layer.to_k.kernel.shape[0]})
    context = context.astype(first_parameter(params).dtype)
    # Side by side, the matrices of all layers would be copied into one first.
    contexts = iter(apart(context, 2 * len(layers)))
    return {
        path: (layer.to_k(next(contexts)), layer.to_v(next(contexts)))
        for path, layer in layers.items()
    }
