"""Several LoRAs side by side as layers of a program, and the weights that calls give them.

A stack has the shapes of a bucket, so that other LoRAs compile nothing: the total rank is rounded
up, and the layers are one of a few groups, with zeros where no LoRA changes a layer. A weight is
one for all layers, or by component and by block of attention.
"""

import collections
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusax.boundary.convert import shortened
from diffusax.lora.lora import Lora, Pair, check_fits, columns
from diffusax.models.adapters.low_rank import LowRank, kernel_shapes

RANKS = (16, 32, 64, 128, 256)
"""The total ranks that are compiled; above them the multiples of the last."""
COUNTS = 8
"""There is room for the weights of a multiple of as many adapters."""
Weight = float | Mapping[str, Any]
"""A number, or numbers by component: {"unet": 0.5}. That of a UNet may be by block, as in
diffusers: {"unet": {"down": 0.2, "mid": 1.0, "up": {"block_0": 0.5, "block_1": [0.1, 0.2, 0.3]}}}.
Components and blocks that are left out have a weight of 1."""
_BLOCK = re.compile(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.attentions\.(\d+)\.")
# As in diffusers (utils/peft_utils.py, set_weights_and_activate_adapters), resnets and samplers
# have the weight of the attention of the same number in their block, if there is one.
_BESIDE = re.compile(r"((?:down|up)_blocks\.\d+)\.\w+\.(\d+)\.")


class StackShape(NamedTuple):
    """The shape of a component's stack, for which programs are compiled."""

    rank: int
    """The total rank."""
    layers: tuple[str, ...]
    """The paths of the layers."""


Shapes = Mapping[str, StackShape]
"""The shapes of the stacks of the components that have one, by component."""


def stack_shapes(
    loras: Sequence[Lora], networks: Mapping[str, Any], *, rank: int = 0
) -> dict[str, StackShape]:
    """Returns the shapes of the bucket that holds LoRAs side by side.

    Args:
        loras: the LoRAs.
        networks: the networks by component.
        rank: the least total rank; the bucket that holds the LoRAs is taken where it is larger.
    """
    found = {}
    for component, network in networks.items():
        parts = [lora.components.get(component, {}) for lora in loras]
        if any(parts):
            ranks: collections.Counter[str] = collections.Counter()
            for layers in parts:
                ranks.update({path: columns(pair) for path, pair in layers.items()})
            total = round_rank(max(rank, *ranks.values()))
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
    loras: Mapping[str, Lora], networks: Mapping[str, Any], shapes: Shapes | None = None
) -> dict[str, dict[str, LowRank]]:
    """Puts the ranks of LoRAs side by side, for each component that one of them changes.

    The columns of `LowRank.which` count the LoRAs in the order of the mapping, and for each the
    groups of layers that have weights of their own; see `WeightGroups`.

    Args:
        loras: the LoRAs by name.
        networks: the networks by component.
        shapes: the shapes of the stacks, which cover those of `stack_shapes`; by default these.

    Returns:
        float32 arrays by component and path, all of a component with the same total rank.

    Raises:
        ValueError: a LoRA does not fit its network.
    """
    shapes = stack_shapes(tuple(loras.values()), networks) if shapes is None else shapes
    groups = WeightGroups(networks)
    found: dict[str, dict[str, LowRank]] = {}
    for component, shape in shapes.items():
        kernels = kernel_shapes(networks[component])
        parts = [lora.components.get(component, {}) for lora in loras.values()]
        for name, own in zip(loras, parts):
            check_fits(name, Lora({component: own}), networks)
        found[component] = {
            path: _side_by_side(
                [own.get(path) for own in parts],
                kernels[path],
                shape.rank,
                [groups.column(i, component, path) for i in range(len(parts))],
            )
            for path in shape.layers
        }
    return found


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


def _side_by_side(
    pairs: Sequence[Pair | None], kernel: tuple[int, ...], total: int, weights: Sequence[int]
) -> LowRank:
    """Returns a layer's pairs side by side; weights: the column of the weight of each pair."""
    *size, c, d = kernel
    down = np.zeros((*size, c, total), np.float32)
    up, which = np.zeros((total, d), np.float32), np.zeros(total, np.int32)
    first = 0
    for column, pair in zip(weights, pairs):
        if pair is not None:
            own = slice(first, first + len(pair[1]))
            down[..., own], up[own], which[own] = *pair[:2], column
            first = own.stop
            for bias in pair[2:]:
                up[first], which[first] = bias, -1 - column
                first += 1
    return LowRank(down, up, which)


class WeightGroups:
    """The groups of layers that have a weight of their own.

    They are the components, and in a UNet each module of its attention. A table of weights has one
    column for each group of each adapter, whether its weight is one number or many, so that other
    weights compile nothing.
    """

    def __init__(self, networks: Mapping[str, Any]):
        """Makes the groups of the networks that take adapters, which are given by component."""
        self._first: dict[str, int] = {}
        self._blocks: dict[str, dict[str, int]] = {}
        self.count = 0
        """The number of groups, the columns of each adapter."""
        for name, network in networks.items():
            self._first[name], self._blocks[name] = self.count, _blocks(network)
            self.count += 1 + len(self._blocks[name])

    def column(self, number: int, component: str, path: str) -> int:
        """Returns the column of a layer's weight; number: that of the adapter."""
        blocks = self._blocks[component]
        block, beside = _BLOCK.match(path), _BESIDE.match(path)
        name = block[0] if block else f"{beside[1]}.attentions.{beside[2]}." if beside else ""
        return number * self.count + self._first[component] + blocks.get(name, 0)

    def expand(self, weight: Weight) -> np.ndarray:
        """Returns the weights of an adapter's groups, float32; see `Weight`."""
        expanded = np.zeros(self.count, np.float32)
        for component, first in self._first.items():
            blocks = self._blocks[component]
            own = weight.get(component, 1.0) if isinstance(weight, Mapping) else weight
            # Layers that belong to no block's attention have a weight of 1, as in diffusers.
            expanded[first] = 1.0 if isinstance(own, Mapping) else own
            for block, inside in blocks.items():
                expanded[first + inside] = _of_block(own, block)
        return expanded

    def table(self, names: Sequence[str], rows: Sequence[Mapping[str, Weight]]) -> np.ndarray:
        """Returns the weights of adapters in each row, n (m g), float32, for g groups.

        Args:
            names: the names in the order of the stack; m is their number, rounded up to a multiple
                of eight.
            rows: n dictionaries of names and weights; a name that is left out weighs nothing.
        """
        found = np.zeros((len(rows), room_for(len(names)), self.count), np.float32)
        for i, row in enumerate(rows):
            for name, weight in row.items():
                found[i, names.index(name)] = self.expand(weight)
        return found.reshape(len(rows), -1)

    def check(self, argument: str, name: str, weight: Any) -> Weight:
        """Returns the weight of the adapter of that name with plain numbers.

        Raises:
            ValueError: it is no number, or names a component or block that is not there.
        """
        where = f"{argument} must give {name!r}"
        if not isinstance(weight, Mapping):
            return _number(where, weight)
        return {
            component: self._check_component(f"{where}, for {component},", component, own)
            for component, own in weight.items()
        }

    def _check_component(self, where: str, component: Any, weight: Any) -> Any:
        if component not in self._first:
            raise ValueError(f"{where} no weight: the components are {', '.join(self._first)}")
        if not isinstance(weight, Mapping):
            return _number(where, weight)
        blocks = self._blocks[component]
        if not blocks:
            raise ValueError(f"{where} one number: it has no blocks of attention")
        return _check_blocks(where, weight, list(blocks))


def room_for(adapters: int) -> int:
    """Returns the number of adapters whose weights a table has room for."""
    return -(-max(adapters, 1) // COUNTS) * COUNTS


@functools.lru_cache(64)
def _blocks(network: Any) -> dict[str, int]:
    """Returns the number, from 1, of each module of attention by the beginning of its paths."""
    found = (_BLOCK.match(path) for path in kernel_shapes(network))
    return {name: i + 1 for i, name in enumerate(dict.fromkeys(m[0] for m in found if m))}


def _number(where: str, value: Any) -> float:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{where} a finite number (got {shortened(value)})")
    return float(value)


def _check_blocks(where: str, weights: Mapping[Any, Any], blocks: list[str]) -> dict[str, Any]:
    counts: dict[tuple[str, int], int] = {}
    for block in blocks:
        parsed = _BLOCK.match(block)
        assert parsed
        key = parsed[1] or parsed[3], int(parsed[2] or 0)
        counts[key] = counts.get(key, 0) + 1
    unknown = [part for part in weights if part not in ("down", "mid", "up")]
    if unknown:
        raise ValueError(f"{where} weights of down, mid and up (got {unknown[0]!r})")
    checked: dict[str, Any] = {}
    for part, own in weights.items():
        if not isinstance(own, Mapping) or part == "mid":
            checked[part] = _numbers(f"{where} for {part}", own, counts.get((part, 0), 1))
            continue
        checked[part] = {}
        for name, value in own.items():
            numbered = re.fullmatch(r"block_(\d+)", str(name))
            count = counts.get((part, int(numbered[1])), 0) if numbered else 0
            if not count:
                known = ", ".join(f"block_{i}" for kind, i in counts if kind == part)
                raise ValueError(f"{where} for {part} weights of {known} (got {name!r})")
            checked[part][name] = _numbers(f"{where} for {part}.{name}", value, count)
    return checked


def _numbers(where: str, value: Any, count: int) -> Any:
    if not isinstance(value, list | tuple):
        return _number(where, value)
    if len(value) not in (1, count):
        raise ValueError(f"{where} 1 or {count} numbers (got {len(value)})")
    return [_number(where, one) for one in value]


def _of_block(weight: Any, block: str) -> float:
    """Returns the weight of a module of attention; see `Weight`."""
    if not isinstance(weight, Mapping):
        return weight
    parsed = _BLOCK.match(block)
    assert parsed
    own = weight.get(parsed[1] or parsed[3], 1.0)
    if isinstance(own, Mapping):
        own = own.get(f"block_{parsed[2]}", 1.0)
    if isinstance(own, list):
        own = own[0] if len(own) == 1 else own[int(parsed[4])]
    return own
