"""TaylorSeer: in most steps layers' outputs are foretold by Taylor series (Liu et al. 2025).

The derivatives are differences between the steps that were computed. Upstream: diffusers
hooks/taylorseer_cache.py.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.adapters.low_rank import layer_at
from diffusax.models.caches.step_cache import Build, Call, Memory, counted, select
from diffusax.models.streaming import reordered, unordered


class Series(NamedTuple):
    """The Taylor series of layers' outputs, for each lane."""

    last: jax.Array
    """The evaluation that was computed last, m, int32."""
    computed: jax.Array
    """The evaluations that were computed so far, m, int32; so many derivatives are known."""
    factors: dict[str, tuple[tuple[jax.Array, ...], ...]]
    """By the layer's name, for each of its outputs the derivatives of each order from 0, m ...."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TaylorSeerCache:
    """The method with its numbers; see `StepCache`."""

    interval: Any
    """One in so many evaluations is computed."""
    before: Any
    """The first so many evaluations are computed."""
    after: Any
    """From this evaluation on all are computed."""
    order: int = dataclasses.field(metadata={"static": True})
    """The highest derivative of the series."""
    dtype: str | None = dataclasses.field(metadata={"static": True})
    """The dtype in which derivatives are kept; None for that of the outputs."""
    foretold: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Regular expressions for the whole names of layers whose outputs are foretold."""
    skipped: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """The same for layers of which zeros take the place."""

    def run(
        self, build: Build, call: Call, memory: Memory | None, active: jax.Array
    ) -> tuple[jax.Array, Memory]:
        """Returns a network's prediction and what is kept; see `StepCache.run`."""
        if memory is None:
            return self._first(build, call, active)
        calls, series = memory.calls, memory.values
        wanted = active & self._wants(calls)

        def computed() -> tuple[jax.Array, Any]:
            def output(name: str, own: Callable[[], Any]) -> Any:
                outputs = own()
                return select(wanted, outputs, self._known(name, outputs, memory))

            y, outputs = self._evaluate(build, call, output)
            new = {
                name: self._updated(series.factors[name], own, memory)
                for name, own in outputs.items()
            }
            return y, {**series.factors, **select(wanted, new, {n: series.factors[n] for n in new})}

        def left_out() -> tuple[jax.Array, Any]:
            def output(name: str, own: Callable[[], Any]) -> Any:
                return self._known(name, jax.eval_shape(own), memory)

            with unordered():
                return self._evaluate(build, call, output)[0], series.factors

        y, factors = jax.lax.cond(wanted.any(), lambda: reordered(computed), left_out)
        last = jnp.where(wanted, calls, series.last)
        after = Series(last, series.computed + wanted, factors)
        return y, Memory(counted(memory, active), after)

    def check(self, network: Any) -> None:
        """Raises ValueError where no layer of a network is foretold."""
        names = [name for name, _ in self.layers(network.skeleton)]
        if all(map(self._is_skipped, names)):
            raise ValueError(
                f"no layer of a {network.class_name} has a name that cache_identifiers describe; "
                f"give some that do, such as cache_identifiers=[r'{_example(network.skeleton)}']"
            )

    def layers(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yields the layers of a network that are foretold or skipped, with their names."""
        for path, layer in list(nnx.iter_modules(module)):
            name = ".".join(map(str, path))
            if callable(layer) and any(map(name_matches(name), self.foretold + self.skipped)):
                yield name, layer

    def _first(self, build: Build, call: Call, active: jax.Array) -> tuple[jax.Array, Memory]:
        """Returns the prediction and what is kept where nothing is kept yet."""
        y, outputs = self._evaluate(build, call, lambda name, own: own())
        factors = {
            name: tuple((self._stored(x), *[0 * self._stored(x)] * self.order) for x in own)
            for name, own in outputs.items()
        }
        calls = counted(None, active)
        return y, Memory(calls, Series(0 * calls, calls, factors))

    def _wants(self, calls: jax.Array) -> jax.Array:
        """Returns whether the next evaluation is computed. calls: those so far, m."""
        regular = (calls - self.before - 1) % self.interval == 0
        return (calls == 0) | (calls < self.before) | regular | (calls >= self.after)

    def _evaluate(
        self, build: Build, call: Call, output: Callable[[str, Callable[[], Any]], Any]
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, ...]]]:
        """Returns a network's prediction, and the outputs of the layers that are foretold.

        output: a function (name, own) -> the output of a layer, whose own output is own().
        """
        module, outputs = build(), dict[str, tuple[jax.Array, ...]]()

        def note(name: str, own: Callable[[], Any]) -> Any:
            found = output(name, own)
            if not self._is_skipped(name):
                outputs[name] = found if isinstance(found, tuple) else (found,)
            return found

        for name, layer in list(self.layers(module)):
            above, _, last = name.rpartition(".")
            parent = layer_at(module, above) if above else module
            # An attribute of this trace's module alone, which is no part of Flax's state.
            object.__setattr__(parent, last, _Replaced(layer, functools.partial(note, name)))
        return call(module), outputs

    def _is_skipped(self, name: str) -> bool:
        return any(map(name_matches(name), self.skipped))

    def _known(self, name: str, shapes: Any, memory: Memory) -> Any:
        """Returns what is known of a layer's output without computing it.

        shapes: the output or its shapes.
        """
        leaves, tree = jax.tree.flatten(shapes)
        if self._is_skipped(name):
            found = [jnp.zeros(x.shape, x.dtype) for x in leaves]
        else:
            series: Series = memory.values
            steps = (memory.calls - series.last).astype(jnp.float32)
            pairs = zip(leaves, series.factors[name], strict=True)
            found = [_taylor(factors, steps).astype(x.dtype) for x, factors in pairs]
        return jax.tree.unflatten(tree, found)

    def _updated(
        self,
        factors: tuple[tuple[jax.Array, ...], ...],
        outputs: tuple[jax.Array, ...],
        memory: Memory,
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """Returns the derivatives of a layer's outputs after one more evaluation."""
        series: Series = memory.values
        steps = jnp.maximum(memory.calls - series.last, 1).astype(jnp.float32)

        def one(x: jax.Array, old: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            new = [x.astype(jnp.float32)]
            for order in range(self.order):
                change = (new[order] - old[order].astype(jnp.float32)) / _spread(steps, x)
                new.append(jnp.where(_spread(series.computed > order, x), change, 0))
            return tuple(y.astype(z.dtype) for y, z in zip(new, old))

        return tuple(map(one, outputs, factors))

    def _stored(self, x: jax.Array) -> jax.Array:
        return x if self.dtype is None else x.astype(self.dtype)


class _Replaced:
    """A layer whose output another function gives, which is told how to compute its own."""

    def __init__(self, layer: Any, output: Callable[[Callable[[], Any]], Any]):
        self._layer, self._output = layer, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output(functools.partial(self._layer, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _example(module: Any) -> str:
    """Returns a regular expression for the names of the attentions of a network's blocks."""
    names = (".".join(map(str, path)) for path, _ in nnx.iter_modules(module))
    found = collections.Counter(
        re.sub(r"\.\d+\.", r"\\.\\d+\\.", name)
        for name in names
        if re.fullmatch(r"\w+\.\d+\.(attn\d?|attention)", name)
    )
    return found.most_common(1)[0][0] if found else ".*attn"


def name_matches(name: str) -> Callable[[str], bool]:
    """Returns the function that says whether a regular expression is of the whole name."""
    return lambda pattern: re.fullmatch(pattern, name) is not None


def _taylor(factors: tuple[jax.Array, ...], steps: jax.Array) -> jax.Array:
    """Returns the value of a Taylor series after so many steps, m ..., float32. steps: m."""
    terms = (
        factor.astype(jnp.float32) * (_spread(steps, factor) ** order / math.factorial(order))
        for order, factor in enumerate(factors)
    )
    return functools.reduce(jnp.add, terms)


def _spread(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns one number for each lane as an array that broadcasts to x. values: m."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
