"""Puts arrays of images on a mesh, padded to fill it, and takes each process's images from it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from diffusax.runtime.devices.mesh import batch_sharding, batch_size, replicated
from diffusax.runtime.devices.splitting import pad

NO_IMAGES = -1
"""The axis of images of an array that has no images."""


def put(mesh: Mesh | None, x: Any, axis: int = 0) -> Any:
    """Puts an array of this process's images on the mesh, padded along an axis with the last."""
    if mesh is None:
        return x
    x = pad_images(jnp.asarray(x), batch_size(mesh.local_mesh), axis)
    sharding = images_sharding(mesh, axis)
    if mesh == mesh.local_mesh:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from_this_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _from_this_process(sharding, x)


def pad_images(x: jax.Array, parts: int, axis: int = 0) -> jax.Array:
    """Pads like `pad`, but returns an array without images as it is."""
    return x if axis == NO_IMAGES else pad(x, parts, axis)


def own_images(mesh: Mesh | None, x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """Returns the first n images of this process from an array on the mesh."""
    if mesh is None or x.is_fully_addressable:
        return x if x.shape[axis] == n else jax.lax.slice_in_dim(x, 0, n, axis=axis)
    parts = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
    whole = np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis)
    return jnp.asarray(whole[(slice(None),) * axis + (slice(0, n),)])


def images_sharding(mesh: Mesh, axis: int) -> NamedSharding:
    """Returns the sharding of an array whose images are along an axis."""
    return replicated(mesh) if axis == NO_IMAGES else batch_sharding(mesh, axis=axis)


def _from_this_process(sharding: NamedSharding, x: Any) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))
