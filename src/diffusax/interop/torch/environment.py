"""torchax's environment, with the further operations that diffusers' modules use."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax.interop.torch.aliasing import hold, holder, link, refresh, written
from diffusax.interop.torch.assigning import assigning
from diffusax.interop.torch.compat import (
    Environment,
    OperatorNotFound,
    Tensor,
    View,
    map_leaves,
    on_host,
    tree_leaves,
    writes_in_place,
)
from diffusax.interop.torch.lowerings import OPERATORS
from diffusax.interop.torch.session import Session, current, takes_scale
from diffusax.interop.torch.structures import flatten
from diffusax.interop.torch.tensors import to_array


class MixedEnvironment(Environment):
    """An environment that accepts tensors on the host beside JAX's, as constants.

    Modules keep tables in plain attributes and make tensors without naming a device; these stay on
    the host, where Python may read their values, until they meet an array.
    """

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation and returns its result, see `Environment.dispatch`."""
        given = tree_leaves((args, kwargs or {}))
        ours = [isinstance(x, Tensor | View) for x in given if isinstance(x, torch.Tensor)]
        if ours and not any(ours):
            if func is torch.Tensor.to:
                return super().dispatch(func, types, args, kwargs)
            with on_host():
                return func(*args, **(kwargs or {}))
        session = current()
        session = session if ours and session is not None and session.watches else None
        name = str(getattr(func, "__name__", func))
        if session is not None and takes_scale(name):
            args = tuple(self._as_data(session, x, args) for x in args)
        # Keys of the host keep their values, see get_item.
        indexes = func is torch.Tensor.__getitem__ and ours[0]
        if not all(ours) and not indexes:
            args, kwargs = map_leaves(torch.Tensor, self.lift, (args, kwargs or {}))
        if session is not None:
            session.operation(name, _settings((args, kwargs or {})))
        return self._shared(func, types, args, kwargs or {})

    def _shared(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, with its arguments and results that share memory kept consistent."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor | View)]
        for tensor in tensors:
            refresh(tensor)
        before = [holder(tensor).jax() for tensor in tensors]
        dispatch = self._write if writes_in_place(func) else super().dispatch
        found = dispatch(func, types, args, kwargs)
        for tensor, array in zip(tensors, before):
            if holder(tensor).jax() is not array:
                written(tensor)

        def again(array: jax.Array) -> Any:
            return super(MixedEnvironment, self).dispatch(
                func, types, (Tensor(array, self), *args[1:]), kwargs
            )

        link(found, func, args, kwargs, again)
        return found

    def _write(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation in place; torchax may write a slice's into a copy."""
        copies: dict[int, tuple[Any, Any, Any]] = {}

        def copy(view: Any) -> Any:
            made = view.torch()
            return copies.setdefault(id(view), (view, made, made.jax()))[1]

        given = map_leaves(View, copy, (args, kwargs))
        try:
            found = super().dispatch(func, types, *given)
        except OperatorNotFound:
            found = self._write_result(func, types, *given)
        for view, made, array in copies.values():
            if made.jax() is not array:
                view.update(made.jax())
            found = view if found is made else found
        return found

    def _write_result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation in place that torchax has only in its form with a result."""
        name, _, overload = func.name().removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        plain = getattr(packet, overload or "default", None)
        if not name.endswith("_") or plain is None:
            raise OperatorNotFound(f"Operator with name {name} has no lowering")
        with self.dispatching():
            result = plain(*args, **kwargs)
        target = args[0]
        hold(target, jnp.broadcast_to(result.jax(), target.shape).astype(target.jax().dtype))
        return target

    def _as_data(self, session: Session, value: Any, args: Any) -> Any:
        """Returns a number beside a tensor of the loop as an array, so that it is data."""
        if type(value) is not float:
            return value
        dtype = next(x.jax().dtype for x in args if isinstance(x, Tensor | View))
        return Tensor(session.lift(np.asarray(value, dtype)), self)

    def cast_device(self, tensor: Any, device: Any) -> Any:
        """Returns the device that a moved or cast tensor goes to.

        Traced tensors stay where they are, and tables stay on the host until they are used.
        """
        return None if isinstance(tensor, Tensor | View) or "jax" in str(device) else device

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> Any:
        """Returns a key for random numbers.

        Raises:
            RuntimeError: a generator is given, whose numbers only PyTorch can compute, or a network
                in a loop draws numbers, which would be the same in all rows.
        """
        session = current()
        if session is not None and not session.draws:
            raise RuntimeError("random numbers are drawn in the loop")
        if generator is not None:
            raise RuntimeError("random numbers of a torch.Generator are drawn inside the module")
        return super().get_and_rotate_prng_key()

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor of the host to one of JAX's."""
        if isinstance(tensor, Tensor | View):
            return tensor
        session = current()
        if session is not None and session.watches:
            return Tensor(session.lift(tensor), self)
        with on_host():
            return Tensor(jnp.asarray(to_array(tensor)), self)


def _settings(value: Any) -> Any:
    """Returns the arguments of an operation without its data, hashable."""
    leaves, structure = flatten(value)
    return tuple((tuple(x.shape), x.dtype) for x in leaves), structure


@functools.cache
def environment() -> MixedEnvironment:
    """Returns the one environment of this process; torchax's own default is not changed."""
    env = MixedEnvironment()
    for torch_function, (implementation, takes_jax) in OPERATORS.items():
        env.register(torch_function, implementation, takes_jax)
    return env


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Computes PyTorch's operations on traced tensors in JAX, inside the context."""
    with assigning(), environment():
        yield


def is_traced(value: Any) -> bool:
    """Returns whether a leaf is a tensor in a function that is being traced."""
    return isinstance(value, Tensor | View)


def wrap(array: jax.Array) -> torch.Tensor:
    """Wraps an array as a tensor of the environment."""
    return Tensor(array, environment())


def unwrap(value: Any) -> jax.Array:
    """Returns the array of a wrapped tensor; tensors of the host become constants."""
    if is_traced(value):
        refresh(value)
        return value.jax()
    if isinstance(value, torch.Tensor):
        return jnp.asarray(to_array(value))
    return jnp.asarray(value)
