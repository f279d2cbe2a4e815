"""torchax's environment, with what diffusers' modules need besides."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch.importing import require_torchax
from diffusax.interop.torch.lowerings import OPERATORS

require_torchax()

from torchax.ops.ops_registry import Operator
from torchax.tensor import Environment, Tensor
from torchax.view import View


class MixedEnvironment(Environment):
    """Takes tensors of the host beside JAX's, as constants.

    Modules keep tables in plain attributes and make tensors without saying where; these stay on
    the host, where Python may look at their values, until they meet an array.
    """

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives, as `Environment.dispatch`."""
        given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        ours = [isinstance(x, Tensor | View) for x in given if isinstance(x, torch.Tensor)]
        if any(ours) and not all(ours):
            lift = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, self._lift)
            args, kwargs = lift((args, kwargs or {}))
        return super().dispatch(func, types, args, kwargs)

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> Any:
        """A key for random numbers.

        Raises:
            RuntimeError: a generator is asked, whose numbers only PyTorch knows.
        """
        if generator is not None:
            raise RuntimeError("random numbers of a torch.Generator are drawn inside the module")
        return super().get_and_rotate_prng_key()

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Tensor | View):
            return tensor
        with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
            return Tensor(jnp.asarray(self.t2j_copy(tensor)), self)


@functools.cache
def environment() -> MixedEnvironment:
    """The one environment of this process; torchax's own default is left alone."""
    env = MixedEnvironment()
    for torch_function, (implementation, takes_jax) in OPERATORS.items():
        env._ops[torch_function] = Operator(
            torch_function, implementation, takes_jax, True, False, False
        )
    return env


def is_traced(value: Any) -> bool:
    """Whether a leaf is a tensor in a function that is being traced."""
    return isinstance(value, Tensor | View)


def wrap(array: jax.Array) -> torch.Tensor:
    """An array as a tensor of the environment."""
    return Tensor(array, environment())


def unwrap(value: Any) -> jax.Array:
    """The inverse of `wrap`; tensors of the host become constants."""
    if is_traced(value):
        return value.jax()
    if isinstance(value, torch.Tensor):
        return jnp.asarray(environment().t2j_copy(value))
    return jnp.asarray(value)
