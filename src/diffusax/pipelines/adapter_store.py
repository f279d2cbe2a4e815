"""The adapters of a pipeline, and what a call takes of them."""

import math
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusax.models.adapters import Layers
from diffusax.pipelines.adapters import Adapter, Shapes, read_adapter, stack, stack_weights
from diffusax.pipelines.arguments import Call, as_list, match_length
from diffusax.pipelines.placement import device_of, put_params

KEPT = 2
"""The number of stacks that stay on the devices."""
ROLES = ("denoiser", "controlnet", "text_encoder")
"""The components that take adapters."""


class CallAdapters(NamedTuple):
    """The adapters of a call."""

    layers: dict[str, Layers]
    """Their layers on the devices, by component."""
    weights: np.ndarray
    """The weights of each prompt, n m, float32."""
    order: tuple[Adapter, ...]
    """The adapters in the order of the weights' columns."""


class AdapterStore:
    """Adapters by name, and the stacks of the last calls on the devices.

    Pipelines that share their components share it.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._stacks: dict[Any, dict[str, Layers]] = {}
        self._lock = threading.RLock()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name, read-only."""
        return MappingProxyType(self._adapters)

    def add(self, name: str, layers: Any, networks: Mapping[str, Any]) -> None:
        """Adds an adapter, see `read_adapter`.

        Raises:
            ValueError: the name is taken or no text, or the adapter does not fit the networks.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name must be a text that is not empty (got {name!r})")
        if name in self._adapters:
            raise ValueError(f"the adapter {name!r} is there already; delete_adapters removes it")
        self._adapters[name] = read_adapter(name, layers, networks)

    def delete(self, names: Sequence[str]) -> None:
        """Removes adapters, and the stacks that hold them.

        Raises:
            ValueError: there is no such adapter; none is removed then.
        """
        for name in names:
            self._require(name, "adapter_names")
        with self._lock:
            for name in names:
                self._adapters.pop(name, None)
            for key in [key for key in self._stacks if set(key[0]) & set(names)]:
                del self._stacks[key]

    def names_of(self, rows: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        """Returns the names in the rows, in the order in which the adapters were added.

        Raises:
            ValueError: there is no adapter of that name.
        """
        used = dict.fromkeys(name for row in rows for name in row)
        for name in used:
            self._require(name, "adapters")
        return tuple(name for name in self._adapters if name in used)

    def stacked(
        self, c: Any, adapters: Mapping[str, Adapter], shapes: Shapes | None = None
    ) -> dict[str, Layers]:
        """Returns adapters side by side, on the devices of the components that they change.

        A later call for the same adapters copies nothing.

        Args:
            c: the components of the pipeline.
            adapters: the adapters by name, in the order of the weights' columns.
            shapes: see `stack`.

        Raises:
            ValueError: an adapter does not fit a network, which was assigned after it.
        """
        networks = adaptable_networks(c)
        leaves = {name: jax.tree.leaves(c.params[name])[0] for name in networks}
        places = {name: None if c.mesh is not None else device_of(x) for name, x in leaves.items()}
        of = tuple((name, net, leaves[name].dtype, places[name]) for name, net in networks.items())
        asked = None if shapes is None else tuple(shapes.items())
        key = (tuple(adapters), tuple(adapters.values()), of, c.mesh, asked)
        with self._lock:
            found = self._stacks.pop(key, None)
            if found is None:
                found = {
                    name: self._put(c, name, layers, leaves[name].dtype, places[name])
                    for name, layers in stack(adapters, networks, shapes).items()
                }
            # The last to be used is the last of all.
            self._stacks[key] = found
            while len(self._stacks) > KEPT:
                del self._stacks[next(iter(self._stacks))]
        return found

    def _put(self, c: Any, name: str, layers: Layers, dtype: Any, device: Any) -> Layers:
        cast = {
            path: layer._replace(down=layer.down.astype(dtype), up=layer.up.astype(dtype))
            for path, layer in layers.items()
        }
        # Also where a call is only traced: the stacks that are kept must be arrays.
        with jax.ensure_compile_time_eval():
            if c.mesh is not None:
                return put_params(c.mesh, c.family.role(name), c.networks[name], cast)
            return jax.device_put(cast, device)

    def _require(self, name: str, argument: str) -> None:
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "none; add_adapter adds one"
            raise ValueError(f"{argument} has the name {name!r}; the adapters are {known}")


def adaptable_networks(c: Any) -> dict[str, Any]:
    """Returns the networks of a pipeline's components that take adapters."""
    return {name: net for name, net in c.networks.items() if c.family.role(name) in ROLES}


def call_adapters(c: Any, call: Call, prompts: int) -> CallAdapters | None:
    """Returns the adapters of a call with this number of prompts; None where it has none.

    Raises:
        ValueError: a name is unknown, a weight is no finite number, there are neither one nor as
            many dictionaries as prompts, or an adapter no longer fits its network.
    """
    if call.adapters is None:
        return None
    rows = [_checked(row) for row in as_list(call.adapters)]
    rows = match_length("adapters", rows, prompts)
    names = c.adapters.names_of(rows)
    if not names:
        return None
    adapters = {name: c.adapters.adapters[name] for name in names}
    weights = stack_weights(names, rows)
    return CallAdapters(c.adapters.stacked(c, adapters), weights, tuple(adapters.values()))


def _checked(row: Any) -> dict[str, float]:
    if not isinstance(row, Mapping):
        raise ValueError(
            "adapters must be a dictionary of names and weights such as {'style': 0.8}, or a list "
            f"with one for each prompt (got {row!r})"
        )
    for name, weight in row.items():
        number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise ValueError(f"adapters must give {name!r} a finite number (got {weight!r})")
    return {name: float(weight) for name, weight in row.items()}
