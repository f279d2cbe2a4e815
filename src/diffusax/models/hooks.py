"""Hooks: functions that read or change what passes through the layers of a network.

A hook belongs to points of a network, each of which has a name: that of a layer in the checkpoint
for what the layer returns, and within a layer that attends, `query`, `key`, `value` and
`attention_probs` behind it. They are called while a network is traced, and so are part of the
compiled program.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.boundary.convert import shortened
from diffusax.models.ops.attention import watched_attention
from diffusax.models.ops.attention_kernels import Operands
from diffusax.models.ops.attention_maps import attention_probs, weighted_values
from diffusax.models.ops.layer_input import LayerInput
from diffusax.runtime.functions import function_tree

HookFunctions = Mapping[str, Any]
"""Hooks by regular expressions of the names of their points, as `as_hooks` returns them."""
Form = Callable[[Operands], jax.Array]
"""Computes an attention."""


class HookPoint(NamedTuple):
    """Where a hook is called."""

    name: str
    """The name of the point, such as "mid_block.attentions.0.transformer_blocks.0.attn2"."""
    branches: int = 1
    """The branches of guidance in a pipeline's call. The rows of arrays are images times branches,
    with those of an image beside each other and the prompt's first: `x[::at.branches]`."""
    row: Any = None
    """The number of the evaluation in the run, counted from 0, a scalar; None in a network called
    by itself."""
    timestep: Any = None
    """The scheduler's timestep, one for each row of arrays; None in a network called by itself."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hooks:
    """The hooks of one evaluation of a network."""

    functions: HookFunctions
    row: Any = None
    timestep: Any = None
    branches: int = dataclasses.field(default=1, metadata={"static": True})


def as_hooks(hooks: Any) -> HookFunctions | None:
    """Returns hooks as a tree whose leaves are their numbers; None for none.

    Args:
        hooks: by regular expressions, each of which is to match the whole name of a point,
            functions (value, at: `HookPoint`) -> (value, kept). The first of the pair goes on in
            the place of the value, and has its shape; the second, a tree of arrays, is returned
            beside the network's result, and None keeps nothing. A function may be an instance of
            a class that is a tree of JAX, see `function_tree`.

    Raises:
        ValueError: they are not that.
    """
    if hooks is None:
        return None
    if not isinstance(hooks, Mapping):
        raise ValueError(
            "hooks must be a dictionary of functions by regular expressions of names of layers "
            f"(got {shortened(hooks)})"
        )
    for pattern in hooks:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"hooks must have regular expressions as keys (got {pattern!r}: {error})"
            ) from None
    return {
        pattern: function_tree(f"hooks[{pattern!r}]", "(value, at)", function, _leaf)
        for pattern, function in hooks.items()
    }


def _leaf(x: Any) -> Any:
    """Returns a number or an array of a hook; numbers of 64 bits become ones of 32."""
    if isinstance(x, jax.Array):
        return x
    x = np.asarray(x)
    if x.dtype.kind not in "biuf":
        raise TypeError("not a number")
    return x.astype(f"{x.dtype.kind}4") if x.dtype.itemsize == 8 else x


@dataclasses.dataclass
class _Frame:
    """A call of a layer, while it is traced."""

    name: str
    has_attended: bool = False


class HookSession:
    """The hooks of a network while it is traced once."""

    def __init__(self, hooks: Hooks):
        """Begins. hooks: those of the evaluation."""
        self._hooks = hooks
        self._frames: list[_Frame] = []
        self._used, self._seen = set[str](), set[str]()
        self._kept: dict[str, Any] = {}

    def run(self, module: Any, call: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """Returns a network's result, and what hooks have kept, by the names of points.

        Args:
            module: the network's module, which is of this trace alone.
            call: calls a module.

        Raises:
            ValueError: a hook is called nowhere, returns no such pair, or its layer is called more
                than once.
        """
        names = list[str]()
        for path, layer in list(nnx.iter_modules(module)):
            names.append(".".join(map(str, path)))
            # Of this trace's module alone, and no part of Flax's state.
            object.__setattr__(layer, "hook_place", (self, names[-1]))
            object.__setattr__(layer, "__class__", _hooked_class(type(layer)))
        with watched_attention(self._attend):
            y = call(module)
        self._check_used(names)
        return y, self._kept

    def call(self, name: str, method: str, run: Callable[[], Any]) -> Any:
        """Calls a method of a layer, whose result a hook may read and change.

        A layer that calls methods of its own is seen once.
        """
        if self._frames and self._frames[-1].name == name:
            return run()
        with self._within(_Frame(name)):
            y = run()
        return self._visit(name, y) if method == "__call__" else y

    @contextlib.contextmanager
    def _within(self, frame: _Frame) -> Any:
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()

    def _attend(self, of: Operands, form: Form) -> jax.Array:
        """Computes the attention of the layer that is being called."""
        frame = self._frames[-1]
        if frame.has_attended:
            # An IP-Adapter attends beside its layer.
            return form(of)
        frame.has_attended = True
        inputs = zip(("query", "key", "value"), of)
        q, k, v = (self._visit(f"{frame.name}.{own}", x) for own, x in inputs)
        of, name = of._replace(q=q, k=k, v=v), f"{frame.name}.attention_probs"
        if not self._matching(name):
            return form(of)
        probs = attention_probs(of)
        changed = self._visit(name, probs)
        # A hook that only reads changes no bit, and leaves the result to the faster form.
        return form(of) if changed is probs else weighted_values(changed, of)

    def _matching(self, name: str) -> list[str]:
        # JAX sorts the keys of dictionaries.
        return [key for key in sorted(self._hooks.functions) if re.fullmatch(key, name)]

    def _visit(self, name: str, value: Any) -> Any:
        """Returns a value at a point after its hooks."""
        matching = self._matching(name)
        if not matching:
            return value
        if name in self._seen:
            raise ValueError(
                f"hooks has a pattern for {name!r}, which is called more than once in one "
                "evaluation; hook another layer"
            )
        self._seen.add(name)
        hooks = self._hooks
        at = HookPoint(name, hooks.branches, hooks.row, hooks.timestep)
        value = value.dense if isinstance(value, LayerInput) else value
        for pattern in matching:
            self._used.add(pattern)
            value, kept = _called(pattern, hooks.functions[pattern], value, at)
            if kept is None:
                continue
            if name in self._kept:
                raise ValueError(f"hooks has two functions that keep something of {name!r}")
            self._kept[name] = jax.tree.map(jnp.asarray, kept)
        return value

    def _check_used(self, names: list[str]) -> None:
        unused = sorted(set(self._hooks.functions) - self._used)
        if not unused:
            return
        known = [name for name in names if re.fullmatch(unused[0], name)]
        reason = (
            f"{known[0]!r} is not called as a layer of its own here; hook a layer in it or around "
            "it, or the .query, .key and .value of an attention"
            if known
            else "it matches no whole name of a layer, such as "
            f"{', '.join(map(repr, [name for name in names if name][:3]))}, and no layer that "
            "attends followed by .query, .key, .value or .attention_probs"
        )
        raise ValueError(f"hooks[{unused[0]!r}] is never called: {reason}")


def _called(pattern: str, function: Any, value: Any, at: HookPoint) -> tuple[Any, Any]:
    """Calls a hook.

    Raises:
        ValueError: it does not return a pair, or what goes on has another form.
    """
    result = function(value, at)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"hooks[{pattern!r}] must return a pair (value, kept), with None to keep nothing (got "
            f"{shortened(result)})"
        )
    new, kept = result
    if new is value:
        return value, kept
    wanted, found = (jax.tree.map(jnp.shape, tree) for tree in (value, new))
    if wanted != found:
        raise ValueError(
            f"hooks[{pattern!r}] must return a value of the shape that it is given at {at.name!r}, "
            f"{wanted} (got {found})"
        )
    return jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), new, value), kept


@functools.lru_cache(None)
def _hooked_class(kind: Any) -> Any:
    """Returns a class of layers whose public methods tell a `HookSession` of their calls."""
    flax = {*dir(nnx.Module)}
    methods = {
        name: _hooked_method(name, function)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if (name == "__call__" or not name.startswith("_")) and name not in flax
    }
    return type(kind)(kind.__name__, (kind,), methods)


def _hooked_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        session, path = self.hook_place
        return session.call(path, name, functools.partial(function, self, *args, **kwargs))

    return method
