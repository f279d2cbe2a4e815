"""A network as a pure function of (parameters, inputs)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Params = Any
"""A plain nested dict of arrays, keyed by the names in the checkpoint (list indices are ints)."""


@dataclasses.dataclass(frozen=True)
class Network:
    """`apply(params, *inputs, method="__call__")` beside the parameters it starts from.

    `apply` holds no arrays, so it can be closed over by `jax.jit` while `params` stay an argument.
    A network that comes from elsewhere (PyTorch through torchax) has the same attributes.
    """

    config: Any
    apply: Callable[..., Any]
    params: Params
    class_name: str

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.params)[0].dtype


def abstract(module_class: type[nnx.Module], config: Any) -> tuple[Callable[..., Any], Params]:
    """The pure function of a network and the shapes of its parameters; computes nothing."""
    module = nnx.eval_shape(lambda: module_class(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(module)

    def apply(params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        return getattr(nnx.merge(graphdef, params), method)(*args, **kwargs)

    return apply, nnx.to_pure_dict(state)


def initialize(module_class: type[nnx.Module], config: Any, *, seed: int = 0) -> Network:
    """A network with freshly drawn parameters."""

    @jax.jit
    def draw(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(module_class(config, rngs=nnx.Rngs(key))))

    apply, _ = abstract(module_class, config)
    return Network(config, apply, draw(jax.random.key(seed)), module_class.__name__)
