"""Kernels of several layers, which a run arranges for a mesh's tensor axis once for all steps.

They are stored as in checkpoints, where an even split of a kernel gives each device other channels
than it computes. The TPU's compiler moves the exchange out of the sampler's loop by itself, the
GPU's does not.
"""

from typing import Any

from flax import nnx

from diffusax.models.layers.layers import ArrangedLinear
from diffusax.models.network import Network, Params
from diffusax.runtime.devices.mesh import tensor_parts


def arranged(network: Any, params: Params) -> Params:
    """Returns a network's parameters with the kernels that are exchanged between devices arranged.

    The parameters are for calls of the network under the same mesh. Without a tensor axis, and
    those of other libraries' networks, they are returned as they are.
    """
    if tensor_parts() == 1 or not isinstance(network, Network):
        return params
    params = network.fitted(params)
    for path, layer in nnx.iter_modules(network.module(params)):
        if isinstance(layer, ArrangedLinear) and layer.differs:
            params = _replaced(params, (*path, "kernel"), layer.arranged())
    return params


def _replaced(tree: Params, path: tuple[Any, ...], value: Any) -> Params:
    """Returns a copy of a tree with another leaf; what is not on its path is shared."""
    if not path:
        return value
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], value)}
