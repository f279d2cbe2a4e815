"""The seed of a call: integers, JAX's keys, and diffusers' `generator` with PyTorch's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.convert import plain
from diffusax.runtime.random.noise import as_key, as_threefry
from diffusax.runtime.random.step_noise import is_stateful


def take_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a call's arguments with random keys of JAX as `keys`, from seed or generator.

    They are one key, or a list or an array of one for each image; keys of the older kind are arrays
    of integers, ... 2 or ... 4.

    Raises:
        ValueError: both arguments are given, or the noise is to be PyTorch's.
    """
    for name in ("seed", "generator"):
        found = [x for x in jax.tree.leaves(values.get(name)) if isinstance(x, jax.Array)]
        if not found or not all(map(_is_key, found)):
            continue
        rest = {key: value for key, value in values.items() if key not in ("seed", "generator")}
        if {key for key in ("seed", "generator") if values.get(key) is not None} != {name}:
            raise ValueError("only one of generator and seed can be given")
        if values.get("noise", "jax") != "jax":
            raise ValueError(f"noise must be 'jax' where {name} is a key of jax.random")
        keys = [as_threefry(as_key(x)) for x in found]
        many = isinstance(values[name], list | tuple)
        return {**rest, "keys": jnp.stack(keys) if many else keys[0]}
    return values


def _is_key(x: jax.Array) -> bool:
    """Returns whether an array is a random key, or several; numbers of one axis are older keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == np.uint32 and x.ndim > 0)


def seed_of(generator: Any, seed: Any) -> dict[str, Any]:
    """Returns the arguments of a call that stand for diffusers' `generator`.

    They are the seeds, whose numbers are PyTorch's, and the generators. seed: the call's own.

    Raises:
        ValueError: generator is not valid, or seed is given, too.
    """
    if seed is not None:
        raise ValueError("only one of generator and seed can be given")
    many = isinstance(generator, list | tuple)
    several = list(generator) if many else [generator]
    seeds = [_initial_seed(one) for one in several]
    ongoing = tuple(one if is_stateful(one) else own for one, own in zip(several, seeds))
    return {"seed": seeds if many else seeds[0], "noise": "torch", "generators": ongoing}


def _initial_seed(generator: Any) -> int:
    seed = generator.initial_seed() if hasattr(generator, "initial_seed") else plain(generator)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(
            f"generator must be an integer, a torch.Generator, or a list of them (got {seed!r})"
        )
    return seed
