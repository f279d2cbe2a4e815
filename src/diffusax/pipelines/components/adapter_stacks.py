"""Stacks of adapters on the devices, made when a component's is first asked for."""

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from diffusax.lora.adapter import Adapter, Shapes, StackShape, stack_component
from diffusax.models.adapters.low_rank import Layers
from diffusax.pipelines.families.placement import device_of, put_params
from diffusax.runtime.devices.mesh import mesh_of, replicated

KEPT = 2
"""The number of a component's stacks that stay on the devices."""
_Key = tuple[Any, ...]


class Stacks:
    """The stacks of the last calls, by component."""

    def __init__(self) -> None:
        self._found: dict[str, dict[_Key, Layers]] = {}
        self._lock = threading.RLock()

    def get(
        self,
        c: Any,
        component: str,
        adapters: Mapping[str, Adapter],
        networks: Mapping[str, Any],
        shape: StackShape,
    ) -> Layers:
        """Returns a component's stack on its devices; that of the same adapters is made once.

        Args:
            c: the components of the pipeline.
            component: the name of the component.
            adapters: the adapters by name, in the order of the weights' columns.
            networks: the networks that take adapters, by component.
            shape: the shape of the stack.

        Raises:
            ValueError: an adapter does not fit the network, which was assigned after it.
        """
        leaf = jax.tree.leaves(c.params[component])[0]
        mesh = c.mesh_for(component)
        place = None if mesh is not None else _device_of(leaf)
        key = (tuple(adapters.values()), tuple(networks.items()), leaf.dtype, place, mesh, shape)
        with self._lock:
            kept = self._found.setdefault(component, {})
            found = kept.pop(key, None)
            if found is None:
                layers = stack_component(component, adapters, networks, shape)
                found = _put(c, component, layers, leaf.dtype, place)
            # The last to be used is the last of all.
            kept[key] = found
            while len(kept) > KEPT:
                del kept[next(iter(kept))]
        return found

    def forget(self, adapters: Collection[Adapter]) -> None:
        """Drops the stacks that hold one of these adapters."""
        with self._lock:
            for kept in self._found.values():
                for key in [key for key in kept if not set(key[0]).isdisjoint(adapters)]:
                    del kept[key]


class Stacked(Mapping[str, Layers]):
    """Adapters side by side, by component. A component's come to its devices when asked for."""

    def __init__(
        self,
        stacks: Stacks,
        c: Any,
        adapters: Mapping[str, Adapter],
        networks: Mapping[str, Any],
        shapes: Shapes,
    ):
        """Holds what `Stacks.get` needs for each component of the shapes."""
        self._stacks, self._c, self._shapes = stacks, c, shapes
        self._adapters, self._networks = adapters, networks
        self._found: dict[str, Layers] = {}

    def __getitem__(self, component: str) -> Layers:
        if component not in self._found:
            shape = self._shapes[component]
            given = self._c, component, self._adapters, self._networks, shape
            self._found[component] = self._stacks.get(*given)
        return self._found[component]

    def __contains__(self, component: object) -> bool:
        return component in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _device_of(leaf: Any) -> Any:
    """Returns the device of a component, or all of them where it lies on several."""
    mesh = mesh_of(leaf)
    return device_of(leaf) if mesh is None else replicated(mesh)


def _put(c: Any, name: str, layers: Layers, dtype: Any, device: Any) -> Layers:
    cast = {
        path: layer._replace(down=layer.down.astype(dtype), up=layer.up.astype(dtype))
        for path, layer in layers.items()
    }
    # Also where a call is only traced: the stacks that are kept must be arrays.
    with jax.ensure_compile_time_eval():
        if (mesh := c.mesh_for(name)) is not None:
            return put_params(mesh, c.family.role(name), c.networks[name], cast)
        return jax.device_put(cast, device)
