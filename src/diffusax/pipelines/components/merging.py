"""Adapters merged into parameters: those that are no products, and those that are fused."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from diffusax.lora.adapter import Adapter, as_product
from diffusax.lora.weights import WeightGroups
from diffusax.models.adapters.weight_changes import Difference, merge
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import tree_name

Weighted = tuple[Adapter, np.ndarray]
"""An adapter and the weights of its groups of layers, see `WeightGroups`."""


def merged_params(
    params: Mapping[str, Params],
    networks: Mapping[str, Any],
    adapters: Iterable[Weighted],
    *,
    products: bool,
) -> dict[str, Params]:
    """Returns the parameters of the components that adapters change, with the adapters merged.

    The sums are computed in float32, each parameter on its own devices. A weight of zero changes
    nothing, whatever the kind of change.

    Args:
        params: the parameters by component.
        networks: the networks that take adapters, by component.
        adapters: the adapters with their weights.
        products: whether to merge products, too, which calls compute beside the parameters.

    Raises:
        ValueError: a component lacks a parameter that an adapter changes.
    """
    groups = WeightGroups(networks)
    wanted: dict[str, dict[str, list[tuple[Any, np.float32]]]] = {}
    for adapter, weights in adapters:
        for component, name, change in _changes(adapter, products):
            weight = np.float32(weights[groups.column(0, component, name)])
            if not weight:
                continue
            wanted.setdefault(component, {}).setdefault(name, []).append((change, weight))
    return {name: _merged(params[name], name, own) for name, own in wanted.items()}


def _changes(adapter: Adapter, products: bool) -> Iterable[tuple[str, str, Any]]:
    for component, own in adapter.changes.items():
        for name, change in own.items():
            yield component, name, change
    if products:
        for component, layers in adapter.components.items():
            for path, pair in layers.items():
                yield component, f"{path}.kernel", as_product(pair)
                for bias in pair[2:]:
                    yield component, f"{path}.bias", Difference(bias)


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
