"""LoRA adapters on the host: their checks, and stacks of several side by side.

A stack has the shapes of a bucket, so that other adapters compile nothing: the total rank is
rounded up, and the layers are one of a few groups, with zeros where no adapter changes a layer.
"""

import dataclasses
import difflib
import functools
import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusax.boundary.tensors import as_numpy
from diffusax.lora.keys import Layers, split_key
from diffusax.lora.weights import WeightGroups
from diffusax.models.adapters.low_rank import LowRank, kernel_shapes
from diffusax.models.adapters.weight_changes import Product

Pair = tuple[np.ndarray, ...]
"""A: c r, or kh kw c r for a convolution, and B: r d, which includes alpha / rank; after them the
bias of B, d, which includes it, too, where there is one."""
RANKS = (16, 32, 64, 128, 256)
"""The total ranks that are compiled; above them the multiples of the last."""


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA: a product A B beside the kernels of some layers, as arrays on the host."""

    components: Mapping[str, Mapping[str, Pair]]
    """For each component (unet, text_encoder, ...) the pairs by the layers' paths in the parameter
    tree, joined by dots."""
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """For each component what is no product, by the parameters' paths: changes of
    `models.weight_changes`, which are merged into the parameters."""

    @property
    def rank(self) -> int:
        """The largest rank of a layer's product; 0 without products."""
        pairs = (pair for layers in self.components.values() for pair in layers.values())
        return max(map(_columns, pairs), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The components that it changes."""
        return tuple(dict.fromkeys((*self.components, *self.changes)))

    @property
    def digest(self) -> str:
        """The SHA-256 of its arrays and paths."""
        found = hashlib.sha256()
        for part in (self.components, self.changes):
            for component, own in sorted(part.items()):
                for path, change in sorted(own.items()):
                    found.update(f"{component} {path} {jax.tree.structure(change)}".encode())
                    for leaf in map(np.asarray, jax.tree.leaves(change)):
                        found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        return found.hexdigest()

    def names_in(self, networks: Container[str]) -> bool:
        """Returns whether a product changes one of these components."""
        return any(component in networks for component in self.components)

    def only(self, component: str) -> "Adapter":
        """Returns the part of the adapter that changes a component."""
        both = self.components, self.changes
        return Adapter(*({k: v for k, v in part.items() if k == component} for part in both))


def read_adapter(name: str, layers: Any, networks: Mapping[str, Any]) -> Adapter:
    """Returns an adapter of arrays or tensors, checked against the networks that it changes.

    Args:
        name: the adapter's name, for errors.
        layers: for each component the pairs (A, B), or (A, B, bias), by path, see `Adapter`.
        networks: the networks of the components that may have adapters.

    Raises:
        ValueError: there is no such component or layer, or its shapes do not fit.
    """
    if not isinstance(layers, Mapping) or not all(
        isinstance(own, Mapping) and own for own in layers.values()
    ):
        raise ValueError(
            f"the adapter {name!r} must be a dictionary such as "
            "{'unet': {'mid_block.attentions.0.proj_in': (A, B)}} "
            f"(got {type(layers).__name__})"
        )
    if not layers:
        raise ValueError(f"the adapter {name!r} has no layers; give at least one")
    adapter = Adapter(
        {
            component: {path: _pair(name, component, path, pair) for path, pair in own.items()}
            for component, own in layers.items()
        }
    )
    check_fits(name, adapter, networks)
    return adapter


def adapter_of(changes: Mapping[str, Mapping[str, Any]], networks: Mapping[str, Any]) -> Adapter:
    """Returns an adapter of changes of parameters, whose products become pairs.

    changes: the changes by component and by the parameter's path; they fit the networks.
    """
    pairs: dict[str, dict[str, Pair]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for component, own in changes.items():
        kernels = kernel_shapes(networks[component])
        for name, change in own.items():
            path = name.removesuffix(".kernel")
            if isinstance(change, Product) and path in kernels:
                pairs.setdefault(component, {})[path] = product_pair(change, kernels[path])
            else:
                rest.setdefault(component, {})[name] = change
    return Adapter(pairs, rest)


def product_pair(product: Product, kernel: tuple[int, ...]) -> Pair:
    """Returns a product's A and B for a kernel, kh kw c d or c d, in float32."""
    down, up = (np.asarray(x, np.float32) for x in (product.down, product.up))
    up = up.reshape(len(up), -1).T * np.float32(product.factor)
    if product.core is not None:
        core = np.asarray(product.core, np.float32)
        down = np.einsum("mnhw,nc->mchw", core, down.reshape(len(down), -1))
    size = (*kernel[:-2], kernel[-2], len(down))
    down = down.reshape(len(down), kernel[-2], *kernel[:-2])
    pair = down.transpose(*range(2, len(kernel)), 1, 0).reshape(size), up
    if product.bias is None:
        return pair
    return *pair, np.asarray(product.bias, np.float32) * np.float32(product.factor)


def as_product(pair: Pair) -> Product:
    """Returns A and B as a product in PyTorch's layout."""
    down, up, *bias = pair
    return Product(down.transpose(-1, -2, *range(down.ndim - 2)), up.T, bias=next(iter(bias), None))


def check_fits(name: str, adapter: Adapter, networks: Mapping[str, Any]) -> None:
    """Raises ValueError unless the networks have the layers of the adapter, in its shapes."""
    for component in adapter.changes:
        if component not in networks:
            raise ValueError(
                f"the adapter {name!r} has the component {component!r}; those that take adapters "
                f"here are {', '.join(networks)}"
            )
    for component, layers in adapter.components.items():
        if component not in networks:
            raise ValueError(
                f"the adapter {name!r} has the component {component!r}; those that take adapters "
                f"here are {', '.join(networks)}"
            )
        known = kernel_shapes(networks[component])
        for path, (down, up, *bias) in layers.items():
            if path not in known:
                raise ValueError(
                    f"the adapter {name!r} has the layer {path!r}, which {component} lacks; "
                    f"{_nearest(path, known)}"
                )
            *size, c, d = known[path]
            if bias and bias[0].shape != (d,):
                raise ValueError(
                    f"the adapter {name!r} has a bias of shape {bias[0].shape} for {component}'s "
                    f"{path}, which takes {_text(d)}"
                )
            if down.shape[:-1] != (*size, c) or up.shape[1:] != (d,):
                raise ValueError(
                    f"the adapter {name!r} has A of shape {down.shape} and B of shape {up.shape} "
                    f"for {component}'s {path}, which takes {_text(*size, c, 'rank')} and "
                    f"{_text('rank', d)}"
                )


class StackShape(NamedTuple):
    """The shape of a component's stack, for which programs are compiled."""

    rank: int
    """The total rank."""
    layers: tuple[str, ...]
    """The paths of the layers."""


Shapes = Mapping[str, StackShape]
"""The shapes of the stacks of the components that have one, by component."""


def stack_shapes(
    adapters: Sequence[Adapter], networks: Mapping[str, Any], *, rank: int = 0
) -> dict[str, StackShape]:
    """Returns the shapes of the bucket that holds adapters side by side.

    Args:
        adapters: the adapters.
        networks: the networks by component.
        rank: the least total rank; the bucket that holds the adapters is taken where it is larger.
    """
    found = {}
    for component, network in networks.items():
        parts = [adapter.components.get(component, {}) for adapter in adapters]
        if any(parts):
            total = round_rank(max(rank, _total_rank(parts)))
            found[component] = StackShape(total, group_of(network, set().union(*parts)))
    return found


def covers(shapes: Shapes, others: Shapes) -> bool:
    """Returns whether stacks of these shapes have room for what needs the others."""
    return all(
        name in shapes
        and shapes[name].rank >= other.rank
        and set(other.layers) <= set(shapes[name].layers)
        for name, other in others.items()
    )


def stack(
    adapters: Mapping[str, Adapter], networks: Mapping[str, Any], shapes: Shapes | None = None
) -> dict[str, dict[str, LowRank]]:
    """Puts the ranks of adapters side by side, for each component that one of them changes.

    The columns of `LowRank.which` count the adapters in the order of the mapping, and for each the
    groups of layers that have weights of their own; see `WeightGroups`.

    Args:
        adapters: the adapters by name.
        networks: the networks by component.
        shapes: the shapes of the stacks, which cover those of `stack_shapes`; by default these.

    Returns:
        float32 arrays by component and path, all of a component with the same total rank.

    Raises:
        ValueError: an adapter does not fit its network.
    """
    shapes = stack_shapes(tuple(adapters.values()), networks) if shapes is None else shapes
    return {
        name: stack_component(name, adapters, networks, shape) for name, shape in shapes.items()
    }


def stack_component(
    component: str,
    adapters: Mapping[str, Adapter],
    networks: Mapping[str, Any],
    shape: StackShape,
) -> dict[str, LowRank]:
    """Puts the ranks of adapters side by side for one component; see `stack`."""
    for name, adapter in adapters.items():
        check_fits(name, adapter.only(component), networks)
    groups, kernels = WeightGroups(networks), kernel_shapes(networks[component])
    parts = [adapter.components.get(component, {}) for adapter in adapters.values()]
    return {
        path: _side_by_side(
            [own.get(path) for own in parts],
            kernels[path],
            shape.rank,
            [groups.column(i, component, path) for i in range(len(parts))],
        )
        for path in shape.layers
    }


def round_rank(rank: int) -> int:
    """Rounds a total rank up to one that is compiled."""
    return next((n for n in RANKS if n >= rank), -(-rank // RANKS[-1]) * RANKS[-1])


def group_of(network: Any, changed: set[str]) -> tuple[str, ...]:
    """Returns the smallest group of the network's layers that holds those that are changed."""
    fitting = (group for group, members in _groups(network) if changed <= members)
    return next(fitting, tuple(kernel_shapes(network)))


@functools.lru_cache(64)
def _groups(network: Any) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    """Returns the groups of a network's layers, the smallest first and that of all last."""
    known = tuple(kernel_shapes(network))
    patterns = getattr(network, "adapter_groups", ())
    groups = [tuple(path for path in known if re.fullmatch(p, path)) for p in patterns]
    return [(group, frozenset(group)) for group in (*groups, known)]


def _total_rank(parts: Sequence[Mapping[str, Pair]]) -> int:
    """Returns the largest sum of ranks that a layer has."""
    ranks: dict[str, int] = {}
    for layers in parts:
        for path, pair in layers.items():
            ranks[path] = ranks.get(path, 0) + _columns(pair)
    return max(ranks.values())


def _columns(pair: Pair) -> int:
    """Returns the columns that a pair takes: its rank, and one for a bias."""
    return len(pair[1]) + len(pair) - 2


def _side_by_side(
    pairs: Sequence[Pair | None], kernel: tuple[int, ...], total: int, columns: Sequence[int]
) -> LowRank:
    """Returns the pairs of a layer side by side; columns: that of the weights, for each pair."""
    *size, c, d = kernel
    down = np.zeros((*size, c, total), np.float32)
    up, which = np.zeros((total, d), np.float32), np.zeros(total, np.int32)
    first = 0
    for column, pair in zip(columns, pairs):
        if pair is not None:
            own = slice(first, first + len(pair[1]))
            down[..., own], up[own], which[own] = *pair[:2], column
            first = own.stop
            for bias in pair[2:]:
                up[first], which[first] = bias, -1 - column
                first += 1
    return LowRank(down, up, which)


def _pair(name: str, component: str, path: Any, pair: Any) -> Pair:
    """Returns A and B as arrays of the host, which keep their dtype."""
    arrays = tuple(map(as_numpy, pair)) if isinstance(pair, tuple | list) else ()
    if (
        len(arrays) not in (2, 3)
        or min(array.ndim for array in arrays[:2]) < 2
        or any(a.dtype.kind != "f" and a.dtype.name != "bfloat16" for a in arrays)
        or arrays[0].shape[-1] != len(arrays[1])
        or not len(arrays[1])
    ):
        got = [f"{a.dtype} {a.shape}" for a in arrays] or type(pair).__name__
        raise ValueError(
            f"the adapter {name!r} must have for {component}'s {path} a pair of arrays of floats, "
            f"A: c rank and B: rank d, and for a bias of B a third, d (got {got})"
        )
    return arrays


def _nearest(path: str, known: Mapping[str, Any]) -> str:
    if not known:
        return "it has none that take adapters, as it is no network of diffusax's own"
    near = difflib.get_close_matches(str(path), known, n=3, cutoff=0)
    return f"the nearest are {', '.join(near)}"


def _text(*shape: Any) -> str:
    return f"({', '.join(map(str, shape))})"


def layers_of(component: str, given: Mapping[str, Any]) -> Layers:
    """Returns a component's layers by path.

    given: PEFT's state dictionary, or the pairs (A, B) or (A, B, bias) by path, see `Adapter`.

    Raises:
        ValueError: a key or value is neither.
    """
    found: Layers = {}
    for key, value in given.items():
        if isinstance(value, tuple | list):
            arrays = tuple(map(as_numpy, value))
            product = as_product(arrays)
            # B of a convolution is one of 1x1.
            whole = product.up.reshape(*product.up.shape, *(1,) * (arrays[0].ndim - 2))
            found[component, key] = {"down": product.down, "up": whole}
            if product.bias is not None:
                found[component, key]["bias"] = product.bias
            continue
        path, part = split_key(key.removeprefix(f"{component}."))
        if part not in ("down", "up", "bias", "magnitude", "alpha"):
            raise ValueError(f"{component}'s {key} is no tensor of a LoRA in PEFT's format")
        found.setdefault((component, path), {})[part] = as_numpy(value)
    return found
