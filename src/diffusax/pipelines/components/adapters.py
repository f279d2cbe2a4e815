"""The LoRAs of a pipeline, their stacks on the devices, and what a call takes of them."""

import dataclasses
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusax.boundary.convert import shortened
from diffusax.lora.lora import Lora, check_fits, lora_of_arrays
from diffusax.lora.stacks import Shapes, StackShape, Weight, WeightGroups, stack, stack_shapes
from diffusax.models.adapters.low_rank import Layers
from diffusax.models.network import Params
from diffusax.models.parameter_tree import first_parameter
from diffusax.pipelines.components.merging import merged_params
from diffusax.pipelines.families.placement import device_of, put_params
from diffusax.pipelines.plan.arguments import Call, as_list, match_length
from diffusax.runtime.copies import Copyable
from diffusax.runtime.devices.mesh import mesh_of, replicated
from diffusax.runtime.switches import is_traced

ROLES = ("denoiser", "controlnet", "text_encoder")
"""The components that take adapters."""
_KEPT = 2
"""The number of a component's stacks that stay on the devices."""
_Key = tuple[Any, ...]


class CallAdapters(NamedTuple):
    """The LoRAs of a call that run beside the parameters."""

    loras: Mapping[str, Lora]
    """The LoRAs by name, in the order of the weights' columns."""
    weights: np.ndarray
    """The weights of each prompt, n (m g), float32; see `WeightGroups.table`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Adapters that are no products, and the parameters that a call has them merged into."""

    parts: tuple[tuple[Lora, np.ndarray], ...]
    """The adapters with the weights of their groups of layers."""
    base: Mapping[str, Params]
    """The parameters of the components that they change."""

    def equals(self, other: "Mixture | None") -> bool:
        """Returns whether both give the same parameters."""
        return other is not None and self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        # The parameters themselves are compared, not their numbers.
        own = {name: id(params) for name, params in self.base.items()}
        return own, [(lora, weights.tobytes()) for lora, weights in self.parts]


class AdapterStore(Copyable):
    """Adapters by name, and the stacks of the last calls on the devices.

    Pipelines that share their components share it.
    """

    fresh = ("_lock", "_merging", "_merged", "_stacks")

    def __init__(self) -> None:
        self._adapters: dict[str, Lora] = {}
        self.active: dict[str, Weight] = {}
        """The adapters of calls that name none, and their weights."""
        self.enabled = True
        """Whether these are used."""
        self.least_rank = 0
        """The least total rank that stacks have room for."""
        self._merged: list[tuple[Mixture, dict[str, Params]]] = []
        self._stacks = _Stacks()
        self._lock, self._merging = threading.RLock(), threading.RLock()

    def snapshot(self) -> "AdapterStore":
        """Returns a store with the same adapters, of which later changes are no concern.

        What lies on the devices is shared.
        """
        copy = AdapterStore()
        with self._lock:
            copy._adapters, copy.active = dict(self._adapters), dict(self.active)
            copy.enabled, copy.least_rank = self.enabled, self.least_rank
            copy._merged, copy._stacks = self._merged, self._stacks
            copy._lock, copy._merging = self._lock, self._merging
        return copy

    @property
    def adapters(self) -> Mapping[str, Lora]:
        """The adapters by name, read-only."""
        return MappingProxyType(self._adapters)

    def add(self, name: str, layers: Any, networks: Mapping[str, Any]) -> None:
        """Adds an adapter.

        Args:
            name: the adapter's name.
            layers: a LoRA, or arrays, see `lora_of_arrays`.
            networks: the networks that take adapters, by component.

        Raises:
            ValueError: the name is taken or no text, or the adapter does not fit the networks.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"an adapter's name must be a text that is not empty (got {shortened(name)})"
            )
        if name in self._adapters:
            raise ValueError(f"the adapter {name!r} is there already; delete_adapters removes it")
        if not isinstance(layers, Lora):
            layers = lora_of_arrays(name, layers, networks)
        check_fits(name, layers, networks)
        self._adapters[name] = layers

    def replace(self, name: str, adapter: Lora, networks: Mapping[str, Any]) -> None:
        """Puts an adapter in the place of the one of that name, which keeps its weight.

        Raises:
            ValueError: there is none, or the new one does not fit the networks.
        """
        self.require([name], "adapter_name")
        check_fits(name, adapter, networks)
        self._stacks.forget([self._adapters[name]])
        self._adapters[name] = adapter

    def delete(self, names: Sequence[str]) -> None:
        """Removes adapters, and the stacks that hold them.

        Raises:
            ValueError: there is no such adapter; none is removed then.
        """
        self.require(names, "adapter_names")
        with self._lock:
            gone = [self._adapters.pop(name) for name in dict.fromkeys(names)]
            for name in names:
                self.active.pop(name, None)
            self._merged.clear()
            self._stacks.forget(gone)

    def require(self, names: Iterable[str], argument: str) -> None:
        """Raises ValueError, which names the argument, where there is no adapter of a name."""
        for name in names:
            if name not in self._adapters:
                known = ", ".join(map(repr, self._adapters)) or "none; load_lora_weights loads one"
                raise ValueError(f"{argument} has the name {name!r}; the adapters are {known}")

    def names_of(self, rows: Sequence[Mapping[str, Weight]]) -> tuple[str, ...]:
        """Returns the names in the rows, in the order in which the adapters were added.

        Raises:
            ValueError: there is no adapter of that name.
        """
        used = dict.fromkeys(name for row in rows for name in row)
        self.require(used, "adapters")
        return tuple(name for name in self._adapters if name in used)

    def stacked(
        self,
        c: Any,
        loras: Mapping[str, Lora],
        shapes: Shapes | None = None,
        *,
        components: Collection[str] | None = None,
    ) -> dict[str, Layers]:
        """Returns LoRAs side by side, on the devices of the components that they change.

        A later call for the same LoRAs copies nothing.

        Args:
            c: the components of the pipeline.
            loras: the LoRAs by name, in the order of the weights' columns.
            shapes: see `stack`.
            components: those whose layers are returned; None for all that take adapters.

        Raises:
            ValueError: a LoRA does not fit its network, which was assigned after it.
        """
        networks = adaptable_networks(c)
        if shapes is None:
            shapes = stack_shapes(tuple(loras.values()), networks, rank=self.least_rank)
        wanted = shapes if components is None else [name for name in shapes if name in components]
        return {name: self._stacks.get(c, name, loras, networks, shapes[name]) for name in wanted}

    def merged(self, c: Any, mixture: Mixture) -> dict[str, Params]:
        """Returns the parameters with adapters' changes; those of the last mixture are kept.

        c: the components. mixture: the adapters.
        """
        # It may take seconds, for which nobody else need wait.
        with self._merging:
            for known, found in self._merged:
                if known.equals(mixture):
                    return found
            # The last mixture's copies go before the next one's are made.
            self._merged.clear()
            networks = adaptable_networks(c)
            found = merged_params(mixture.base, networks, mixture.parts, products=False)
            self._merged.append((mixture, found))
        return found


class _Stacks:
    """The stacks of the last calls on the devices, by component."""

    def __init__(self) -> None:
        self._found: dict[str, dict[_Key, Layers]] = {}
        self._lock = threading.RLock()

    def get(
        self,
        c: Any,
        component: str,
        loras: Mapping[str, Lora],
        networks: Mapping[str, Any],
        shape: StackShape,
    ) -> Layers:
        """Returns a component's stack on its devices; that of the same LoRAs is made once."""
        leaf = first_parameter(c.params[component])
        place = c.mesh_for(component)
        if place is None and not is_traced(leaf):
            place = getattr(leaf, "sharding", None)
        key = (tuple(loras.values()), tuple(networks.items()), leaf.dtype, place, shape)
        with self._lock:
            kept = self._found.setdefault(component, {})
            found = kept.pop(key, None)
            if found is None:
                layers = stack(loras, networks, {component: shape})[component]
                found = _put(c, component, layers, leaf)
            # The last to be used is the last of all.
            kept[key] = found
            while len(kept) > _KEPT:
                del kept[next(iter(kept))]
        return found

    def forget(self, loras: Collection[Lora]) -> None:
        """Drops the stacks that hold one of these LoRAs."""
        with self._lock:
            for kept in self._found.values():
                for key in [key for key in kept if not set(key[0]).isdisjoint(loras)]:
                    del kept[key]


def _put(c: Any, name: str, layers: Layers, leaf: Any) -> Layers:
    """Puts a component's stack where its parameters are. leaf: one of these."""
    dtype = leaf.dtype
    cast = {
        path: layer._replace(down=layer.down.astype(dtype), up=layer.up.astype(dtype))
        for path, layer in layers.items()
    }
    # Also where a call is only traced: the stacks that are kept must be arrays.
    with jax.ensure_compile_time_eval():
        if (mesh := c.mesh_for(name)) is not None:
            return put_params(mesh, c.family.role(name), c.networks[name], cast)
        several = mesh_of(leaf)
        return jax.device_put(cast, device_of(leaf) if several is None else replicated(several))


def adaptable_networks(c: Any) -> dict[str, Any]:
    """Returns the networks of a pipeline's components that take adapters, unless freed."""
    networks: dict[str, Any] = c.adaptable
    if c.encoded is None:
        return networks
    return {name: net for name, net in networks.items() if name not in c.encoded.encoders}


def resolve_adapters(c: Any, call: Call) -> tuple[Any, Call]:
    """Returns a call that names its adapters, and the components that it runs with.

    A call without `adapters` has the active ones. Adapters that are no products are merged into
    the parameters of these components, which are others than the pipeline's then.

    Raises:
        ValueError: an adapter is unknown, a weight is none, or the prompts of a call have several
            weights of an adapter that is merged.
    """
    call, mixture = choose_adapters(c, call)
    return with_mixture(c, mixture), call


def choose_adapters(c: Any, call: Call) -> tuple[Call, Mixture | None]:
    """Returns a call that names its adapters, and those of them that are to be merged.

    The latter are None where there are none. Raises ValueError, see `resolve_adapters`.
    """
    store: AdapterStore = c.adapters
    if call.adapters is None:
        if not (store.enabled and store.active):
            return call, None
        active = {name: _unfused(c, name, weight) for name, weight in store.active.items()}
        # What is wholly in the parameters needs no program with adapters.
        left = {name: weight for name, weight in active.items() if weight is not None}
        call = dataclasses.replace(call, adapters=left)
    if call.adapters == {}:
        return call, None
    rows = tuple(_checked(c, row) for row in as_list(call.adapters))
    call = dataclasses.replace(call, adapter_rows=rows)
    names = [name for name in store.names_of(rows) if store.adapters[name].changes]
    if not names:
        return call, None
    groups = WeightGroups(adaptable_networks(c))
    mixture = []
    for name in names:
        weights = [groups.expand(row.get(name, 0.0)) * call.lora_scale for row in rows]
        if any((other != weights[0]).any() for other in weights):
            raise ValueError(
                f"adapters give {name!r} several weights in one call; it is merged into the "
                "model's parameters, as it is no product of low rank, so that all prompts of a "
                "call share its weight"
            )
        mixture.append((store.adapters[name], weights[0]))
    changed = {name for adapter, _ in mixture for name in adapter.changes}
    return call, Mixture(tuple(mixture), {name: c.params[name] for name in changed})


def with_mixture(c: Any, mixture: Mixture | None) -> Any:
    """Returns the components with adapters merged into their parameters."""
    merged = {} if mixture is None else c.adapters.merged(c, mixture)
    return c.variant(params={**c.params, **merged}) if merged else c


def _unfused(c: Any, name: str, weight: Weight) -> Weight | None:
    """Returns an adapter's weight, zero for the components that it is merged into already.

    It is None where these are all that the adapter changes.
    """
    merged = {target: 0.0 for target, fused in c.fused.items() if name in fused.names}
    if not merged:
        return weight
    if set(c.adapters.adapters[name].names) <= set(merged):
        return None
    own = weight if isinstance(weight, Mapping) else dict.fromkeys(adaptable_networks(c), weight)
    return {**own, **merged}


def call_adapters(c: Any, call: Call, prompts: int) -> CallAdapters | None:
    """Returns the LoRAs that run beside the parameters in a call with this number of prompts.

    None where it has none, or only LoRAs that are merged.

    Raises:
        ValueError: a name is unknown, a weight is no finite number, or there are neither one nor as
            many dictionaries as prompts.
    """
    if call.adapters is None or call.adapters == {}:
        return None
    rows = call.adapter_rows
    if rows is None:
        rows = [_checked(c, row) for row in as_list(call.adapters)]
    rows = match_length("adapters", rows, prompts)
    known = c.adapters.adapters
    loras = {name: known[name] for name in c.adapters.names_of(rows) if known[name].components}
    if not loras:
        return None
    own = [{name: row[name] for name in loras if name in row} for row in rows]
    table = WeightGroups(adaptable_networks(c)).table(tuple(loras), own)
    return CallAdapters(loras, table * np.float32(call.lora_scale))


def _checked(c: Any, row: Any) -> dict[str, Weight]:
    if not isinstance(row, Mapping):
        raise ValueError(
            "adapters must be a dictionary of names and weights such as {'style': 0.8}, or a list "
            f"with one for each prompt (got {shortened(row)})"
        )
    groups = WeightGroups(adaptable_networks(c))
    return {name: groups.check("adapters", name, weight) for name, weight in row.items()}
