"""The seed of a call: integers, and diffusers' `generator` with PyTorch's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.convert import plain
from diffusax.runtime.random.step_noise import is_stateful


def check_no_key(name: str, value: Any) -> None:
    """Raises ValueError for a random key of JAX in a call's arguments."""
    found = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    is_old = len(found) == 1 and found[0].dtype == np.uint32 and found[0].ndim == 1
    if is_old or any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found):
        raise ValueError(
            f"{name} must be an integer or a list of integers, and not a key of jax.random (got "
            f"{found[0].dtype} of shape {found[0].shape}): image i of seed s draws from "
            "fold_in(key(s), i)"
        )


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
