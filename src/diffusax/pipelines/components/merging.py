"""Merges LoRAs into parameters: in a call those that are no products, in `fuse_lora` all."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from diffusax.lora.changes import merge
from diffusax.lora.lora import Lora
from diffusax.lora.stacks import WeightGroups
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import tree_name


def merged_params(
    params: Mapping[str, Params],
    networks: Mapping[str, Any],
    loras: Iterable[tuple[Lora, np.ndarray]],
    *,
    products: bool,
) -> dict[str, Params]:
    """Returns the parameters of the components that LoRAs change, with these merged.

    The sums are computed in float32, each parameter on its own devices. A weight of zero changes
    nothing, whatever the kind of change.

    Args:
        params: the parameters by component.
        networks: the networks that take adapters, by component.
        loras: the LoRAs with the weights of their groups of layers, see `WeightGroups`.
        products: whether to merge products, too, which calls compute beside the parameters.

    Raises:
        ValueError: a component lacks a parameter that a LoRA changes.
    """
    groups = WeightGroups(networks)
    wanted: dict[str, dict[str, list[tuple[Any, np.float32]]]] = {}
    for lora, weights in loras:
        for component, name, change in lora.parameter_changes(products=products):
            if component not in params:
                continue
            weight = np.float32(weights[groups.column(0, component, name)])
            if weight:
                wanted.setdefault(component, {}).setdefault(name, []).append((change, weight))
    return {name: _merged(params[name], name, own) for name, own in wanted.items()}


def _merged(
    params: Params, component: str, changes: Mapping[str, list[tuple[Any, np.float32]]]
) -> Params:
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    unknown = set(changes) - {tree_name(path) for path, _ in leaves}
    if unknown:
        raise ValueError(
            f"{component} has no {min(unknown)}, which an adapter changes, so that it cannot be "
            "merged; give it to calls as it is"
        )
    return jax.tree.unflatten(
        structure, [_leaf(leaf, tree_name(path), changes) for path, leaf in leaves]
    )


def _leaf(leaf: Any, name: str, changes: Mapping[str, list[tuple[Any, np.float32]]]) -> Any:
    if name not in changes:
        return leaf
    parts, scales = zip(*changes[name])
    new = merge(leaf, parts, scales, name.endswith(".kernel"))
    if isinstance(leaf, np.ndarray):
        # What is offloaded lies on the host.
        return np.asarray(new)
    return in_order(jax.device_put(new, leaf.sharding))
