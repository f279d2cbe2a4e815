"""Implements assignments to parts of tensors as PyTorch does, where torchax differs."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax.interop.torch.aliasing import hold, refresh, written
from diffusax.interop.torch.compat import NarrowInfo, Tensor, View, environment_of, map_leaves
from diffusax.interop.torch.session import current
from diffusax.interop.torch.tensors import to_array


def put(array: jax.Array, key: Any, value: Any, accumulate: bool = False) -> jax.Array:
    """Returns the array after array[key] = value, or += with `accumulate`.

    Args:
        array: of any shape.
        key: as in PyTorch, with arrays in the place of tensors.
        value: as in PyTorch: a number, or an array that broadcasts, which may have more axes of
            length one in front.
        accumulate: whether values are added.
    """
    keys = key if isinstance(key, tuple) else (key,)
    masks = [i for i, k in enumerate(keys) if _is_mask(k)]
    others = [k for i, k in enumerate(keys) if i not in masks]
    if len(masks) == 1 and all(_is_everything(k) for k in others):
        axis = _axis_of(masks[0], keys, array.ndim)
        return _put_masked(array, keys[masks[0]], axis, value, accumulate)
    shape = jax.eval_shape(lambda x: x[key], array).shape
    value = jnp.asarray(value, array.dtype)
    extra = max(value.ndim - len(shape), 0)
    if set(value.shape[:extra]) == {1}:
        value = value.reshape(value.shape[extra:])
    place = array.at[key]
    return place.add(value) if accumulate else place.set(value)


def _put_masked(
    array: jax.Array, mask: jax.Array, axis: int, value: Any, accumulate: bool
) -> jax.Array:
    """Writes where a mask of the axes from `axis` on is true, one row of the value after another.

    torchax 0.0.13 fills all rows but the first with zeros where the value has a single row.
    """
    before, after = array.shape[:axis], array.shape[axis + mask.ndim :]
    rows = math.prod(mask.shape)
    flat, where = array.reshape(*before, rows, *after), mask.reshape(rows)
    value = jnp.asarray(value, array.dtype)
    value = value.reshape((1,) * (flat.ndim - value.ndim) + value.shape)
    if value.shape[axis] == 0:
        return array
    if value.shape[axis] != 1:
        order = jnp.clip(jnp.cumsum(where) - 1, 0, value.shape[axis] - 1)
        value = jnp.take(value, order, axis=axis)
    new = flat + value if accumulate else value
    return jnp.where(where.reshape(rows, *(1 for _ in after)), new, flat).reshape(array.shape)


def _is_mask(key: Any) -> bool:
    return hasattr(key, "dtype") and key.dtype == bool and key.ndim > 0


def _is_everything(key: Any) -> bool:
    return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


def _axis_of(place: int, keys: tuple[Any, ...], ndim: int) -> int:
    """Returns the first axis that the key at a place indexes; other keys stand for whole axes."""
    if Ellipsis not in [k for k in keys[:place] if k is Ellipsis]:
        return place
    behind = sum(k is not Ellipsis for k in keys[place + 1 :])
    return ndim - behind - int(keys[place].ndim)


def index_put(x: jax.Array, indices: Any, values: jax.Array, accumulate: bool = False) -> jax.Array:
    """Implements aten::index_put."""
    key = tuple(slice(None) if index is None else index for index in indices)
    return put(x, key, values, accumulate)


def get_item(x: Any, key: Any) -> Any:
    """Implements torch.Tensor.__getitem__, also for parts of tensors."""
    if isinstance(key, list):
        key = (key,) if key and isinstance(key[0], int) else tuple(key)
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(k, list | torch.Tensor | jax.Array) for k in keys):
        return View(x, view_info=NarrowInfo(key), env=environment_of(x))
    keys = tuple(np.asarray(k) if isinstance(k, list) else k for k in keys)
    return Tensor(x.jax()[_keys(environment_of(x), keys)], environment_of(x))


def _arrays(env: Any, value: Any) -> Any:
    """Returns the value with arrays in the place of tensors, also of tensors on the host."""
    return env.t2j_iso(map_leaves(torch.Tensor, env.lift, value))


def _keys(env: Any, key: Any) -> Any:
    """Returns a key with arrays in the place of tensors.

    Masks and numbers on the host keep their values, so that programs may depend on how many are
    true, outside of recorded loops.
    """
    session = current()
    if session is not None and session.watches:
        return _arrays(env, key)

    def to_key(tensor: Any) -> Any:
        return tensor.jax() if isinstance(tensor, Tensor | View) else to_array(tensor)

    return map_leaves(torch.Tensor, to_key, key)


@contextlib.contextmanager
def assigning() -> Iterator[None]:
    """Makes tensors of torchax, inside the context, take assignments as PyTorch does.

    It also keeps XLA from merging a write to a slice with the read that follows it: XLA's CPU
    backend (jaxlib 0.10.2) merges an update of a slice with an attention's product, and some
    results are wrong then, those of CogView4's rotary embedding.
    """
    guard = jax.lax.optimization_barrier

    def set_item(self: Any, key: Any, value: Any) -> None:
        env = environment_of(self)
        key, value = _keys(env, key), _arrays(env, value)
        refresh(self)
        hold(self, guard(put(self.jax(), key, value)))
        written(self)

    def set_item_of_view(self: Any, key: Any, value: Any) -> None:
        env = environment_of(self)
        key, value = _keys(env, key), _arrays(env, value)
        refresh(self)
        self.update(value, [*self.get_transformation_chain(), NarrowInfo(key)])
        written(self)

    def update_tensor(self: Any, value: Any, array: Any) -> Any:
        return guard(put(array, self.slices, value))

    def to_list(self: Any) -> Any:
        return self.torch().tolist()

    def flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        end = end_dim % max(self.ndim, 1)
        sizes = self.shape
        return self.reshape(*sizes[:start_dim], -1, *sizes[end + 1 :])

    def type_as(self: Any, other: Any) -> Any:
        return self.to(other.dtype)

    with (
        mock.patch.object(Tensor, "__setitem__", set_item),
        mock.patch.object(Tensor, "type_as", type_as),
        mock.patch.object(Tensor, "flatten", flatten),
        mock.patch.object(View, "__setitem__", set_item_of_view),
        mock.patch.object(View, "tolist", to_list),
        mock.patch.object(NarrowInfo, "update_tensor", update_tensor),
    ):
        yield
