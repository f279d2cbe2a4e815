"""A network as a pure function of (parameters, inputs)."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def abstract(module_class: Any, config: Any) -> tuple[Callable[..., Any], Params]:
    """The pure function of a network and the shapes of its parameters; computes nothing."""
    module = nnx.eval_shape(lambda: module_class(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(module)

    def apply(params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        return getattr(nnx.merge(graphdef, params), method)(*args, **kwargs)

    return apply, nnx.to_pure_dict(state)


def initialize(
    module_class: type[nnx.Module], config: Any, *, seed: int = 0, dtype: Any = np.float32
) -> Network:
    """A network with freshly drawn parameters, see `initialize_params`."""
    apply, shapes = abstract(module_class, config)
    params = initialize_params(shapes, seed=seed, dtype=dtype)
    return Network(config, apply, params, module_class.__name__)


def initialize_params(
    shapes: Params, *, seed: int = 0, dtype: Any = np.float32, zero: Collection[str] = ()
) -> Params:
    """Freshly drawn parameters for a tree of arrays or shapes.

    Kernels are normal with variance 1 / fan-in (LeCun et al. 1998), embeddings with deviation 0.02,
    norms one, biases zero. On the host: compiling each layer's initialiser would take far longer.

    Args:
        shapes: a tree whose leaves have a shape.
        seed: of NumPy's generator.
        dtype: of the result.
        zero: names of layers whose kernels start at zero, as those that end residual branches do.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        kind = path[-1].key
        if kind in ("scale", "bias"):
            return jnp.full(leaf.shape, kind == "scale", dtype)
        deviation = 0.02 if kind == "embedding" else math.prod(leaf.shape[:-1]) ** -0.5
        if path[-2].key in zero:
            deviation = 0.0
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * deviation, dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
