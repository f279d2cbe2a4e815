"""Merges adapters into a pipeline's parameters, and takes them out again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.lora.weights import Weight, WeightGroups
from diffusax.models.network import Params
from diffusax.pipelines.components.adapters import adaptable_networks
from diffusax.pipelines.components.merging import merged_params
from diffusax.pipelines.plan.arguments import as_list
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import tree_name


@dataclasses.dataclass
class Fused:
    """What was merged into a component."""

    names: tuple[str, ...]
    """The adapters."""
    originals: dict[str, Any]
    """The parameters before, by path, on the host."""


def fuse(
    c: Any,
    components: str | Sequence[str] | None,
    scale: float,
    adapter_names: Sequence[str] | None,
    *,
    finite: bool,
) -> None:
    """Merges adapters into the parameters of components; see `LoraMethods.fuse_lora`.

    Args:
        c: the components.
        components: the names of those to merge into; None for all.
        scale: a factor of the weights.
        adapter_names: the adapters; None for the active ones.
        finite: whether sums must be finite.

    Raises:
        ValueError: a name is unknown, there is nothing to merge, or a sum is not finite.
    """
    networks = adaptable_networks(c)
    targets = check_components(components, networks)
    names = list(c.adapters.active) if adapter_names is None else as_list(adapter_names)
    c.adapters.require(names, "adapter_names")
    if not names:
        raise ValueError("no adapter is active; name those to merge with adapter_names")
    groups = WeightGroups(networks)
    found: dict[str, Params] = {}
    for target in targets:
        already = set(names) & set(c.fused[target].names) if target in c.fused else set()
        if already:
            raise ValueError(f"{min(already)!r} is merged already; unfuse_lora undoes it")
        own = [
            (c.adapters.adapters[name], groups.expand(_active(c, name)) * scale) for name in names
        ]
        own = [(adapter.only(target), weights) for adapter, weights in own]
        found |= merged_params({target: c.params[target]}, networks, own, products=True)
    if not found:
        raise ValueError(f"the adapters change none of {', '.join(targets)}")
    if finite:
        _check_finite(found)
    for target, params in found.items():
        kept = c.fused.setdefault(target, Fused((), {}))
        kept.originals = {**_changed(c.params[target], params), **kept.originals}
        own_names = [n for n in names if target in c.adapters.adapters[n].names]
        kept.names = (*kept.names, *own_names)
        c.params[target] = params


def unfuse(c: Any, components: str | Sequence[str] | None) -> None:
    """Restores the parameters of components; see `LoraMethods.unfuse_lora`."""
    for target in check_components(components, adaptable_networks(c)):
        if target in c.fused:
            originals = c.fused.pop(target).originals
            leaves, structure = jax.tree_util.tree_flatten_with_path(c.params[target])
            restored = [_restored(leaf, originals.get(tree_name(path))) for path, leaf in leaves]
            c.params[target] = jax.tree.unflatten(structure, restored)


def check_components(components: Any, networks: Mapping[str, Any]) -> list[str]:
    """Returns the names of components that take adapters; all for None.

    Raises:
        ValueError: a name is unknown.
    """
    targets = list(networks) if components is None else as_list(components)
    for name in targets:
        if name not in networks:
            raise ValueError(f"components has {name!r}; those here are {', '.join(networks)}")
    return targets


def _active(c: Any, name: str) -> Weight:
    return c.adapters.active.get(name, 1.0)


def _changed(before: Params, after: Params) -> dict[str, Any]:
    """Returns the parameters that differ, as they were, on the host where this process has all."""
    pairs = zip(jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(after))
    return {
        tree_name(path): np.asarray(old) if getattr(old, "is_fully_addressable", True) else old
        for (path, old), new in pairs
        if old is not new
    }


def _restored(leaf: Any, original: Any) -> Any:
    if original is None or isinstance(leaf, np.ndarray):
        return leaf if original is None else original
    return in_order(jax.device_put(original, leaf.sharding))


def _check_finite(found: Mapping[str, Params]) -> None:
    for target, params in found.items():
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
            raise ValueError(f"{target}'s parameters would have numbers that are not finite")
