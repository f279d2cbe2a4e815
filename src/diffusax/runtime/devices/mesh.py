"""Devices as a mesh, and the places of arrays on it.

A mesh has three axes: "data" holds copies of the parameters, "fsdp" splits them (Zhao et al. 2023;
ZeRO stage 3, Rajbhandari et al. 2020), "tensor" splits the layers' work, by rules on the
parameters' names (Shoeybi et al. 2019). A batch is split over the first two. A mesh may have a
fourth, "context", which splits the tokens of an image; each device has all keys and values of
attention (Li et al. 2021, "Sequence Parallelism", without the ring).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from diffusax.runtime.devices.layouts import usual_order
from diffusax.runtime.devices.lowering import platform_of

BATCH_AXES = ("data", "fsdp")
TENSOR_AXIS = "tensor"
AXES = (*BATCH_AXES, TENSOR_AXIS)
CONTEXT_AXIS = "context"
_KNOWN = (*AXES, CONTEXT_AXIS)
# Splitting smaller arrays costs more in messages than it saves in memory.
MIN_SHARDED_SIZE = 2**14


class Rule(NamedTuple):
    """Which axis of a parameter the tensor axis splits."""

    end: str
    """A regular expression for the end of the parameter's name."""
    axis: int
    pieces: int | str = 1
    """The number of equal pieces along the axis, such as attention heads, that are never cut. In
    the rules of a class of networks it may be the name of the layer's attribute that says it."""
    widths: tuple[int, ...] | str = ()
    """The channels of layers, or of inputs, that stand side by side along the axis, of each of
    which a device has a part; see `models.arranged`. They may be named like `pieces`."""


Rules = Sequence[Rule | tuple[str, int]]
"""Rules for the parameters of a network; the first that matches a name holds."""


def make_mesh(
    shape: str | Mapping[str, int] | Mesh | None = None, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Makes a mesh of the devices with the axes data, fsdp and tensor, and context if it is given.

    Args:
        shape: the axes' sizes, as in "data=4,tensor=2". Those left out are 1, except data, which
            takes the devices that remain; -1 means all that remain. Of a mesh, axes of these names
            are kept, and those of other names split batches, as data does.
        devices: the devices; by default those of all processes.

    Raises:
        ValueError: an axis is unknown, or the sizes do not multiply to the number of devices.
    """
    if isinstance(shape, Mesh):
        return _own_mesh(shape)
    devices = jax.devices() if devices is None else list(devices)
    sizes = parse_mesh(shape) if isinstance(shape, str) else dict(shape or {})
    for axis, size in sizes.items():
        if axis not in _KNOWN or not isinstance(size, int) or not (size > 0 or size == -1):
            raise ValueError(
                f"mesh must give sizes to {', '.join(_KNOWN)}, such as 'data=4,tensor=2' "
                f"(got {axis}={size})"
            )
    sizes = {"data": -1 if -1 not in sizes.values() else 1, "fsdp": 1, TENSOR_AXIS: 1, **sizes}
    known = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or len(devices) % known or (not open_axes and known != len(devices)):
        asked = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {asked} does not fit {len(devices)} devices")
    sizes |= dict.fromkeys(open_axes, len(devices) // known)
    axes = _KNOWN if sizes.get(CONTEXT_AXIS, 1) > 1 else AXES
    return Mesh(np.asarray(devices).reshape([sizes[axis] for axis in axes]), axes)


def _own_mesh(mesh: Mesh, split: Sequence[str] = ()) -> Mesh:
    """Returns a mesh of the same devices with our axes, all of which XLA partitions by itself.

    split: the mesh's axes over which parameters are split, besides one that is called fsdp.
    """
    places = {name: [n for n in mesh.axis_names if n == name] for name in _KNOWN}
    places["fsdp"] += [n for n in split if n not in _KNOWN]
    kept = set().union(*places.values())
    places["data"] = [n for n in mesh.axis_names if n not in kept] + places["data"]
    order = [mesh.axis_names.index(name) for names in places.values() for name in names]
    sizes = {name: math.prod(mesh.shape[n] for n in names) for name, names in places.items()}
    axes = _KNOWN if sizes[CONTEXT_AXIS] > 1 or CONTEXT_AXIS in mesh.axis_names else AXES
    return Mesh(mesh.devices.transpose(order).reshape([sizes[axis] for axis in axes]), axes)


def check_processes(mesh: Mesh) -> None:
    """Raises ValueError where devices of several processes would share images.

    Each process brings its own images, and JAX would take them for the same ones.
    """
    for axis in (TENSOR_AXIS, CONTEXT_AXIS):
        if axis not in mesh.axis_names:
            continue
        shares = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
        for devices in shares.reshape(-1, shares.shape[-1]):
            if len({device.process_index for device in devices}) > 1:
                raise ValueError(
                    f"mesh must have its {axis} axis within a process, as each has images of its "
                    f"own (got {dict(mesh.shape)}); use fsdp between processes"
                )


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the axes' sizes from a text such as "data=4,tensor=2".

    Raises:
        ValueError: the text does not have this form.
    """
    sizes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if not re.fullmatch(r"-?\d+", size) or axis in sizes:
            raise ValueError(f"mesh must be sizes such as 'data=4,tensor=2' (got {text!r})")
        sizes[axis] = int(size)
    return sizes


def batch_size(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts that a batch is split into."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh, *, axis: int = 0) -> NamedSharding:
    """Returns the sharding of a batch: an axis over all devices that do not share an image."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(
    mesh: Mesh, name: str, shape: tuple[int, ...], rules: Rules = (), *, is_arranged: bool = False
) -> NamedSharding:
    """Returns a parameter's sharding: one axis on "tensor" by the rules, the largest other on
    "fsdp", or on NVIDIA's GPUs the one that is slowest in memory.

    Small arrays are not split, and neither are axes that the devices do not divide, or whose
    pieces they do not divide.

    Args:
        mesh: the mesh of the devices.
        name: the path through the tree, joined by dots; an adapter's ends with down or up.
        shape: the parameter's shape.
        rules: the network's rules.
        is_arranged: whether its channels are in the order of the devices; otherwise what a rule
            with widths is for is split along its other axis, as no device has a part of each.
    """
    axes: list[str | None] = [None] * len(shape)
    if math.prod(shape) >= MIN_SHARDED_SIZE:
        parts = mesh.shape.get(TENSOR_AXIS, 1)
        split = rule_for(name, rules)
        if split is not None and not is_arranged:
            split = _across(split)
        if split is not None and parts > 1 and _divides(parts, split, shape):
            axes[split.axis] = TENSOR_AXIS
        parts = mesh.shape.get("fsdp", 1)
        free = [i for i, n in enumerate(shape) if axes[i] is None and n % parts == 0]
        if free and parts > 1:
            axes[_axis_to_gather(shape, free, _platform(mesh))] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*axes) if any(axes) else PartitionSpec())


def spread_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns a parameter's sharding on all axes of a mesh that another sharding names.

    They split one axis of the parameter, chosen as `param_sharding` chooses that for "fsdp".
    """
    mesh, names = sharding.mesh, axes_of(sharding)
    parts, axes = math.prod(mesh.shape[name] for name in names), [None] * len(shape)
    free = [i for i, n in enumerate(shape) if n % parts == 0]
    if parts == 1 or not free or math.prod(shape) < MIN_SHARDED_SIZE:
        return NamedSharding(mesh, PartitionSpec())
    chosen = _axis_to_gather(shape, free, _platform(mesh))
    return NamedSharding(mesh, PartitionSpec(*axes[:chosen], tuple(names), *axes[chosen + 1 :]))


def axes_of(sharding: NamedSharding) -> list[str]:
    """Returns the axes of the mesh over which a sharding splits arrays."""
    parts = [part for part in sharding.spec if part]
    return [n for part in parts for n in ([part] if isinstance(part, str) else part)]


def _platform(mesh: Mesh | AbstractMesh) -> str:
    """Returns `platform_of` the devices; "" where they are not known."""
    return "" if isinstance(mesh, AbstractMesh) else platform_of(mesh.devices.flat[0])


def _axis_to_gather(shape: Sequence[int], free: Sequence[int], platform: str) -> int:
    """Returns which of some axes is split by devices that gather the whole array.

    On NVIDIA's GPUs it is the slowest in memory, as its parts lie one behind the other already; on
    other devices the largest.
    """
    if platform != "cuda":
        return max(free, key=lambda i: shape[i])
    order = usual_order(shape, platform) or range(len(shape))
    return next(i for i in order if i in free)


def _divides(parts: int, rule: Rule, shape: tuple[int, ...]) -> bool:
    pieces = rule.pieces if isinstance(rule.pieces, int) else 1
    return shape[rule.axis] % parts == 0 and (pieces == 1 or pieces % parts == 0)


def _across(rule: Rule) -> Rule:
    """Returns the rule for a matrix whose channels of several layers are in no order of devices."""
    return Rule(rule.end, -3 - rule.axis) if rule.widths else rule


def rule_for(name: str, rules: Rules) -> Rule | None:
    """Returns the first rule for a parameter's name.

    An adapter has A (down: ... c R) and B (up: R d) beside a kernel ... c d: where the kernel's
    rows are split, A's are, and where its columns are split, B's are.
    """
    layer, _, kind = name.rpartition(".")
    adapted = {"down": -2, "up": -1}.get(kind)
    if adapted is None:
        found = (rule for rule in rules if re.search(rf"(^|\.){rule[0]}$", name))
        return next((Rule(*rule) for rule in found), None)
    split = rule_for(f"{layer}.kernel", rules)
    split = split and _across(split)
    # A kernel has two or four axes, so that its rows have an even number.
    return split._replace(axis=adapted) if split and split.axis % 2 == adapted % 2 else None


def counted_rules(rules: Rules, counts: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Returns rules with pieces and widths in the place of attributes' names.

    Layers below one another that have the same numbers share a rule, so that there are few.

    Args:
        rules: the rules of a class of networks.
        counts: for each attribute, its values by the paths of the layers that have it.
    """
    counted: list[Rule | tuple[str, int]] = []
    for rule in (Rule(*rule) for rule in rules):
        named = [name for name in ("pieces", "widths") if isinstance(getattr(rule, name), str)]
        if not named:
            counted.append(rule)
            continue
        (name,) = named
        values = counts.get(getattr(rule, name), {})
        found = {tuple(path.split(".")): n for path, n in values.items()}
        if name == "widths":
            found = dict(_above(rule.end, values))
        for prefix, value in _shared(found):
            start = "".join(rf"{re.escape(part)}\." for part in prefix)
            start += rf"(.*\.)?{rule.end}" if prefix else rule.end
            counted.append(rule._replace(end=start, **{name: value}))
    return tuple(counted)


def _above(end: str, counts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields what stands before the end of a rule in the paths of the layers that it is for."""
    for path, value in counts.items():
        if match := re.search(rf"(^|\.){end}$", f"{path}.kernel"):
            yield tuple(filter(None, path[: match.start()].split("."))), value


def _shared(counts: Mapping[tuple[str, ...], Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Lists the shortest beginnings of paths below which all layers have the same numbers."""
    if len(set(counts.values())) == 1:
        yield (), next(iter(counts.values()))
        return
    for first in dict.fromkeys(path[0] for path in counts if path):
        below = {path[1:]: n for path, n in counts.items() if path[:1] == (first,)}
        for prefix, pieces in _shared(below):
            yield (first, *prefix), pieces


def rules_below(name: str, rules: Rules) -> Rules:
    """Returns a network's rules for a tree that holds its parameters under a name."""
    return tuple(
        rule._replace(end=rf"{re.escape(name)}\.(.*\.)?{rule.end}")
        for rule in (Rule(*rule) for rule in rules)
    )


def turned_sharding(sharding: NamedSharding, axes: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array after its axes are transposed."""
    spec = (*sharding.spec, *[None] * (len(axes) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes)))


def tree_sharding(mesh: Mesh, tree: Any, rules: Rules = ()) -> Any:
    """Returns `param_sharding` for each array (or shape) of a tree.

    What stands for one parameter and consists of several arrays says itself where those lie, by a
    method `places`.
    """

    def one(path: Sequence[Any], x: Any) -> Any:
        arranged = getattr(x, "is_arranged", False)
        place = param_sharding(mesh, tree_name(path), x.shape, rules, is_arranged=arranged)
        return x.places(place) if hasattr(x, "places") else place

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: hasattr(x, "places"))


def tree_name(path: Sequence[Any]) -> str:
    """Joins the keys of a path through a tree by dots."""
    keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path)
    return ".".join(map(str, keys))


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """Makes an array of the whole batch on the mesh from this process's part of it."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def to_host(tree: Any) -> Any:
    """Returns the whole tree as NumPy arrays on every process; all of them must call it.

    It goes array by array, so that no device ever holds more than one whole array.
    """

    def one(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(one, tree)


def mesh_of(params: Any) -> Mesh | None:
    """Returns the mesh of several devices that parameters are on; None for one device."""
    sharding = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    several = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    return sharding.mesh if several else None  # type: ignore[union-attr,return-value]


def beside(parameter: Any, tree: Any) -> Any:
    """Returns a tree whose arrays on other meshes than a parameter's are on the latter, as batches.

    JAX compiles no program for arrays on different meshes. Arrays without a mesh stay as they are.
    """
    mesh = mesh_of(parameter)
    if mesh is None:
        return tree

    def moved(x: Any) -> Any:
        found = mesh_of(x) if isinstance(x, jax.Array) else None
        if found is None or found == mesh:
            return x
        rows = set(BATCH_AXES) <= set(mesh.axis_names) and x.ndim
        whole = not rows or x.shape[0] % batch_size(mesh)
        return jax.device_put(x, replicated(mesh) if whole else batch_sharding(mesh))

    return jax.tree.map(moved, tree)


def mesh_on(place: Any, name: str) -> Mesh:
    """Returns the mesh of a device, or a mesh as it is.

    Raises:
        ValueError: the argument of this name is neither.
    """
    _check_device(place, name)
    return make_mesh(place) if isinstance(place, Mesh) else make_mesh(devices=[place])


def _check_device(place: Any, name: str) -> None:
    if not isinstance(place, Mesh | Sharding) and not hasattr(place, "process_index"):
        raise ValueError(
            f"{name} must be a device, such as jax.devices()[0], or a mesh (got {place!r:.200})"
        )


def devices_for(device: Any, mesh: Mesh | str | None, *, without: Mesh | None = None) -> Any:
    """Returns the device, or the mesh of several, that a pipeline is loaded on.

    without: the devices to leave out where neither is named one by one.

    Raises:
        ValueError: both are given, the device is none, or the mesh does not fit the devices.
    """
    if device is not None and mesh is not None:
        raise ValueError("only one of device and mesh can be given")
    if device is not None:
        _check_device(device, "device")
        if isinstance(device, NamedSharding) and isinstance(device.mesh, Mesh):
            return _own_mesh(device.mesh, axes_of(device))
    taken = () if without is None else tuple(without.devices.flat)
    left = [d for d in jax.local_devices() if d not in taken] or jax.local_devices()
    if mesh is None and (device is not None or jax.local_device_count() == 1):
        return device
    every = left if taken or not mesh else None
    made = make_mesh(mesh, devices=every)
    return made if made.size > 1 else made.devices.flat[0]
