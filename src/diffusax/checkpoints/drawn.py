"""First values of tensors that a checkpoint lacks, where a network is loaded with other options.

They are those of PyTorch's layers, with which diffusers' networks begin (`reset_parameters` of
torch.nn's modules, and `zero_module` of diffusers/models/controlnets/controlnet.py).
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diffusax.checkpoints.tree import KERNELS, StoredTensor, is_misshapen, wanted_leaves
from diffusax.models.network import Params, initialize_params

log = logging.getLogger(__name__)

_ZERO_LAYERS = (
    "controlnet_cond_embedding.conv_out.",
    "controlnet_down_blocks.",
    "controlnet_mid_block.",
    "controlnet_blocks.",
    "controlnet_single_blocks.",
    "controlnet_x_embedder.",
)
"""The beginnings of the names of layers that start at zero."""
_SEED = 0


def drawn_anew(
    shapes: Params, found: Mapping[str, StoredTensor], *, where: str
) -> dict[str, np.ndarray]:
    """Returns first values for tensors that are missing or of another shape, and logs them.

    Weights and biases of linear layers and convolutions are uniform within plus and minus
    1 / sqrt(fan-in), embeddings standard normal, norms one and zero, what ends ControlNets zero,
    and others as `initialize_params` has them. The numbers are the same in every call.

    Args:
        shapes: the network's parameters as shapes.
        found: the stored tensors by the network's names.
        where: the name of what holds them, for the log.

    Returns:
        Arrays of float32 in Flax's layout, by name in the checkpoint.
    """
    wanted = wanted_leaves(shapes)
    why = {name: "missing" for name in wanted if name not in found}
    why |= {
        name: f"has {found[name].shape}"
        for name, (path, shape) in wanted.items()
        if name in found and is_misshapen(found[name], path, shape)
    }
    if why:
        told = ", ".join(f"{name} ({reason})" for name, reason in why.items())
        log.warning("%s: drawn anew, to be trained: %s", where, told)
    rng = np.random.default_rng(_SEED)
    kernels = {n: shape for n, (path, shape) in wanted.items() if path[-1].key in KERNELS}
    fans = {name: math.prod(shape[:-1]) for name, shape in kernels.items()}
    return {name: _first(rng, name, wanted[name], fans) for name in why}


def _first(
    rng: np.random.Generator,
    name: str,
    leaf: tuple[Any, tuple[int, ...]],
    fans: Mapping[str, int],
) -> np.ndarray:
    """Returns the first values of one tensor; fans: the inputs of each output of a layer."""
    path, shape = leaf
    kind = path[-1].key
    fan = fans.get(name) or fans.get(name.removesuffix("bias") + "weight")
    if name.startswith(_ZERO_LAYERS):
        return np.zeros(shape, np.float32)
    if fan is not None:
        return rng.uniform(-(fan**-0.5), fan**-0.5, shape).astype(np.float32)
    if kind == "embedding":
        return rng.standard_normal(shape, np.float32)
    alone = {kind: jax.ShapeDtypeStruct(shape, np.float32)}
    return np.asarray(initialize_params(alone, seed=_SEED)[kind])
