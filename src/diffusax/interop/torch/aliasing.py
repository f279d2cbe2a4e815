"""Tensors that share memory in PyTorch, where torchax makes copies.

In PyTorch `x.view(-1)`, `x.transpose(0, 1)` and the parts of `x.chunk(2)` are x itself, seen
otherwise: what is written into one of them is read in all others. Of these torchax knows plain
slices only. Here every such tensor knows what it was made of and how: what is written into it is
written there as well, and it is made again before it is read when something was written there.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch.compat import Tensor, View, environment_of, is_view, on_host


class Alias(NamedTuple):
    """What a tensor is a view of.

    parent: the tensor that it was made of.
    pull: makes its array of the parent's.
    layout: a tensor without numbers that has PyTorch's strides.
    writes: how often the parent had been written to.
    """

    parent: Any
    pull: Callable[[jax.Array], jax.Array]
    layout: torch.Tensor
    writes: int


def holder(tensor: Any) -> Any:
    """The tensor that holds the array which a slice of torchax shows."""
    while isinstance(tensor, View):
        tensor = tensor.parent
    return tensor


def hold(tensor: Any, array: jax.Array) -> None:
    """Puts another array into a tensor that is no slice."""
    tensor.apply_jax_(lambda _: array)


def refresh(tensor: Any) -> None:
    """Makes a view again if what it is a view of was written to."""
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
    """Writes what was just written into a view to what it is a view of."""
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
    """Notes what the results of an operation are views of, if they are.

    Args:
        found: the operation's results.
        func: the operation; only those of ATen say whether they make views.
        args: its arguments, the first of which is looked at.
        kwargs: more of its arguments.
        again: makes the results of another array in the place of the first argument.
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
    """The results' strides in PyTorch; None where reshape would have copied."""
    with on_host(), contextlib.suppress(RuntimeError):
        found = func(layout_of(parent), *args, **kwargs)
        return list(found) if isinstance(found, list | tuple) else [found]
    return None


def layout_of(tensor: Any) -> torch.Tensor:
    """A tensor without numbers with the strides that a tensor has in PyTorch."""
    if isinstance(tensor, View):
        return layout_of(tensor.parent)[tensor.view_info.slices]
    alias = _alias(tensor)
    return torch.empty(tensor.shape, device="meta") if alias is None else alias.layout


def contiguous(x: Any, memory_format: Any = None) -> Any:
    """torch.Tensor's: a copy of what is not contiguous, which shares nothing any more."""
    with on_host():
        shares = layout_of(x).is_contiguous()
    return x if shares else Tensor(x.jax(), environment_of(x))


def _alias(tensor: Any) -> Alias | None:
    found: Alias | None = vars(tensor).get("view_of")
    return found


def _writes(tensor: Any) -> int:
    return int(vars(holder(tensor)).get("times_written", 0))
