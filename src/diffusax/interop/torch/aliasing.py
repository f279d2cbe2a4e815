"""Keeps tensors that share memory in PyTorch consistent, where torchax makes copies.

In PyTorch `x.view(-1)`, `x.transpose(0, 1)` and the parts of `x.chunk(2)` share the memory of x: a
write to one of them changes the others. torchax supports this for plain slices only. Here every
such tensor stores its parent and how it was made of it: a write to the tensor is also made in the
parent, and the tensor is computed again before it is read if the parent was written to.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch.compat import Tensor, View, environment_of, is_view, on_host


class Alias(NamedTuple):
    """The parent of a view, and how the view is made of it.

    parent: the tensor that the view was made of. pull: computes the view's array from the parent's.
    layout: a tensor without data that has PyTorch's strides. writes: the number of writes to the
    parent when the view was made.
    """

    parent: Any
    pull: Callable[[jax.Array], jax.Array]
    layout: torch.Tensor
    writes: int


def holder(tensor: Any) -> Any:
    """Returns the tensor whose array a slice of torchax shows."""
    while isinstance(tensor, View):
        tensor = tensor.parent
    return tensor


def hold(tensor: Any, array: jax.Array) -> None:
    """Replaces the array of a tensor that is not a slice."""
    tensor.apply_jax_(lambda _: array)


def refresh(tensor: Any) -> None:
    """Computes a view again if its parent was written to."""
    tensor = holder(tensor)
    alias = _alias(tensor)
    if alias is None:
        return
    refresh(alias.parent)
    writes = _writes(alias.parent)
    if writes != alias.writes:
        hold(tensor, alias.pull(alias.parent.jax()))
        tensor.view_of = alias._replace(writes=writes)
        tensor.times_written = _writes(tensor) + 1


def written(tensor: Any) -> None:
    """Copies what was just written into a view to its parent."""
    tensor = holder(tensor)
    tensor.times_written = _writes(tensor) + 1
    alias = _alias(tensor)
    if alias is None:
        return
    parent = alias.parent
    array = parent.jax()
    places = alias.pull(jnp.arange(array.size, dtype=jnp.int32).reshape(array.shape))
    if places.shape != tensor.jax().shape:
        # squeeze_ and the like: another view of the same tensor, which is not written to.
        tensor.view_of = None
        return
    flat = array.reshape(-1).at[places.reshape(-1)].set(tensor.jax().reshape(-1))
    # See `assigning`.
    new = jax.lax.optimization_barrier(flat.reshape(array.shape))
    if isinstance(parent, View):
        parent.update(new)
    else:
        hold(parent, new)
    written(parent)
    tensor.view_of = alias._replace(writes=_writes(parent))


def link(found: Any, func: Any, args: Any, kwargs: Any, again: Callable[[jax.Array], Any]) -> None:
    """Records which results of an operation are views.

    Args:
        found: the operation's results.
        func: the operation; only those of ATen say whether they make views.
        args: its positional arguments, the first of which is the parent.
        kwargs: its keyword arguments.
        again: computes the results for another array as the first argument.
    """
    if not is_view(func) or not isinstance(args[0], Tensor | View):
        return
    parent, several = args[0], isinstance(found, list | tuple)
    layouts = _layouts(func, parent, args[1:], kwargs)
    if layouts is None:
        return
    for i, (tensor, layout) in enumerate(zip(found if several else [found], layouts)):
        if tensor is parent or not isinstance(tensor, Tensor) or "view_of" in vars(tensor):
            continue
        if tensor.dtype == parent.dtype and layout.shape == tensor.shape:
            pull = lambda array, i=i: (again(array)[i] if several else again(array)).jax()  # noqa: E731
            tensor.view_of = Alias(parent, pull, layout, _writes(parent))


def _layouts(func: Any, parent: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """Returns the results' strides in PyTorch; None where reshape would have copied."""
    with on_host(), contextlib.suppress(RuntimeError):
        found = func(layout_of(parent), *args, **kwargs)
        return list(found) if isinstance(found, list | tuple) else [found]
    return None


def layout_of(tensor: Any) -> torch.Tensor:
    """Returns a tensor without data that has the strides of a tensor in PyTorch."""
    if isinstance(tensor, View):
        return layout_of(tensor.parent)[tensor.view_info.slices]
    alias = _alias(tensor)
    return torch.empty(tensor.shape, device="meta") if alias is None else alias.layout


def contiguous(x: Any, memory_format: Any = None) -> Any:
    """Implements torch.Tensor.contiguous: copies a tensor that is not contiguous."""
    with on_host():
        shares = layout_of(x).is_contiguous()
    return x if shares else Tensor(x.jax(), environment_of(x))


def _alias(tensor: Any) -> Alias | None:
    found: Alias | None = vars(tensor).get("view_of")
    return found


def _writes(tensor: Any) -> int:
    return int(vars(holder(tensor)).get("times_written", 0))
