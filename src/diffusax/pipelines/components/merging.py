"""Merges LoRAs into parameters: in a call those that are no products, in `fuse_lora` all."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.lora.changes import merge
from diffusax.lora.lora import Lora
from diffusax.lora.stacks import WeightGroups
from diffusax.models.network import Params
from diffusax.models.parameter_tree import replaces
from diffusax.pipelines.plan.arguments import as_list
from diffusax.runtime.devices.host import on_device
from diffusax.runtime.devices.layouts import place_of
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


@dataclasses.dataclass
class Fused:
    """What was merged into a component."""

    names: tuple[str, ...]
    """The adapters."""
    originals: dict[str, Any]
    """The parameters before, by path, on the host."""


def fuse(
    c: Any,
    networks: Mapping[str, Any],
    components: str | Sequence[str] | None,
    scale: float,
    adapter_names: Sequence[str] | None,
    *,
    finite: bool,
) -> None:
    """Merges adapters into the parameters of components; see `LoraMethods.fuse_lora`.

    Args:
        c: the components.
        networks: those of them that take adapters, by name.
        components: the names of those to merge into; None for all.
        scale: a factor of the weights.
        adapter_names: the adapters; None for the active ones.
        finite: whether sums must be finite.

    Raises:
        ValueError: a name is unknown, there is nothing to merge, or a sum is not finite.
    """
    targets = _targets(components, networks)
    names = list(c.adapters.active) if adapter_names is None else as_list(adapter_names)
    c.adapters.require(names, "adapter_names")
    if not names:
        raise ValueError("no adapter is active; name those to merge with adapter_names")
    for target in targets:
        already = set(names) & set(c.fused[target].names) if target in c.fused else set()
        if already:
            raise ValueError(f"{min(already)!r} is merged already; unfuse_lora undoes it")
    groups, store = WeightGroups(networks), c.adapters
    weights = [groups.expand(store.active.get(name, 1.0)) * scale for name in names]
    loras = zip((store.adapters[name] for name in names), weights)
    params = {target: c.params[target] for target in targets}
    found = merged_params(params, networks, loras, products=True)
    if not found:
        raise ValueError(f"the adapters change none of {', '.join(targets)}")
    if finite:
        _check_finite(found)
    for target, own in found.items():
        kept = c.fused.setdefault(target, Fused((), {}))
        kept.originals = {**_changed(c.params[target], own), **kept.originals}
        own_names = [name for name in names if target in store.adapters[name].names]
        kept.names = (*kept.names, *own_names)
        c.params[target] = own


def unfuse(c: Any, networks: Mapping[str, Any], components: str | Sequence[str] | None) -> None:
    """Restores the parameters of components; see `LoraMethods.unfuse_lora`."""
    for target in _targets(components, networks):
        if target in c.fused:
            originals = c.fused.pop(target).originals
            leaves, structure = jax.tree_util.tree_flatten_with_path(
                c.params[target], is_leaf=replaces
            )
            restored = [_restored(leaf, originals.get(tree_name(path))) for path, leaf in leaves]
            c.params[target] = jax.tree.unflatten(structure, restored)


def _merged(
    params: Params, component: str, changes: Mapping[str, list[tuple[Any, np.float32]]]
) -> Params:
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=replaces)
    names = [tree_name(path) for path, _ in leaves]
    if unknown := set(changes) - set(names):
        raise ValueError(
            f"{component} has no {min(unknown)}, which an adapter changes, so that it cannot be "
            "merged; give it to calls as it is"
        )
    merged = []
    for name, (_, leaf) in zip(names, leaves):
        if name in changes:
            own, scales = zip(*changes[name])
            new = merge(on_device(leaf), own, scales, name.endswith(".kernel"))
            leaf = jax.tree.map(_placed_like, leaf, new)
        merged.append(leaf)
    return jax.tree.unflatten(structure, merged)


def _targets(components: Any, networks: Mapping[str, Any]) -> list[str]:
    """Returns the names of components that take adapters; all for None.

    Raises:
        ValueError: a name is unknown.
    """
    targets = list(networks) if components is None else as_list(components)
    for name in targets:
        if name not in networks:
            raise ValueError(f"components has {name!r}; those here are {', '.join(networks)}")
    return targets


def _changed(before: Params, after: Params) -> dict[str, Any]:
    """Returns the parameters that differ, as they were, on the host where this process has all."""
    flat = jax.tree_util.tree_flatten_with_path(before, is_leaf=replaces)[0]
    pairs = zip(flat, jax.tree.leaves(after, is_leaf=replaces))
    return {
        tree_name(path): jax.tree.map(_on_host, old) for (path, old), new in pairs if old is not new
    }


def _on_host(leaf: Any) -> Any:
    return np.asarray(leaf) if getattr(leaf, "is_fully_addressable", True) else leaf


def _restored(leaf: Any, original: Any) -> Any:
    return leaf if original is None else jax.tree.map(_placed_like, leaf, original)


def _placed_like(leaf: Any, new: Any) -> Any:
    """Returns an array where another one lies; what is offloaded lies on the host."""
    if isinstance(leaf, np.ndarray):
        return np.asarray(new)
    return jax.device_put(new, place_of(new, leaf.sharding))


def _check_finite(found: Mapping[str, Params]) -> None:
    for target, params in found.items():
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
            raise ValueError(f"{target}'s parameters would have numbers that are not finite")
