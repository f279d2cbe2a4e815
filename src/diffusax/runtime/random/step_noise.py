"""The random numbers of a run that its caller steps by hand: a generator's, or JAX's."""

import functools
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import is_tensor
from diffusax.runtime.random.brownian import BrownianNoise, Motion
from diffusax.runtime.random.noise import as_key, draw_from, draw_noise, seed_key
from diffusax.runtime.random.torch_random import TorchGenerator

Draw = Callable[[tuple[int, ...]], np.ndarray]


class StepNoise:
    """Draws the noise of a run's rows, in the order in which the rows ask for it."""

    def __init__(self, motion: Motion | None = None):
        """Takes the seed for rows without a generator from the system.

        motion: the Brownian motion of samplers that have one; where it has a seed, all noise comes
        from it.
        """
        self._seed = secrets.randbits(32)
        self._motion = motion if motion is not None and motion.seed is not None else None
        self._brownian: BrownianNoise | None = None
        self._streams: dict[tuple[int, int], TorchGenerator] = {}

    def draw(self, generator: Any, shape: tuple[int, ...], row: int, *, first: int = 0) -> Any:
        """Draws standard normal numbers for a sample.

        Args:
            generator: a torch.Generator, whose stream goes on; an integer, for the stream of
                PyTorch's generator of that seed after the numbers of one sample, which a run's
                initial latents take; a list with one of them for each image; a key of JAX, or None
                for the run's own.
            shape: the sample's, images first.
            row: the row that asks, counted from the row that the run began at. The numbers of keys
                depend on it.
            first: that row, counted from the beginning of a whole run.

        Raises:
            ValueError: a list is of another length than the images, or a seed is no integer.
        """
        if self._motion is not None:
            return self._from_motion(self._motion, shape, first + row)
        if generator is None:
            generator = seed_key(self._seed)
        if isinstance(generator, jax.Array):
            return draw_noise(_keys(generator, shape[0]), shape[1:], np.uint32(row + 1))
        several = generator if isinstance(generator, list | tuple) else [generator]
        if len(several) == 1:
            return self._stream(several[0], 0, shape)(shape)
        if len(several) != shape[0]:
            raise ValueError(
                f"generator has {len(several)} entries for {shape[0]} images; give 1 or {shape[0]}"
            )
        return self._from_several(several, (1, *shape[1:]))

    def _from_several(self, generators: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
        draws = [self._stream(g, place, shape) for place, g in enumerate(generators)]
        return np.concatenate([draw(shape) for draw in draws])

    def _from_motion(self, motion: Motion, shape: tuple[int, ...], row: int) -> np.ndarray:
        if self._brownian is None:
            # Only the number of values of an image matters to the numbers, not their layout.
            flat = (shape[0], int(np.prod(shape[1:])), 1, 1)
            self._brownian = BrownianNoise(motion, flat)
        return self._brownian.row(row).reshape(shape)

    def _stream(self, generator: Any, place: int, shape: tuple[int, ...]) -> Draw:
        """Returns the function that draws a generator's next numbers.

        place: its position in a list. shape: that of the numbers that an integer's stream skips.
        """
        if is_stateful(generator):
            return functools.partial(draw_from, generator)
        seed = generator.initial_seed() if hasattr(generator, "initial_seed") else generator
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise ValueError(
                "generator must be an integer, a torch.Generator, a list of them, or a key of "
                f"jax.random (got {seed!r})"
            )
        if (place, seed) not in self._streams:
            stream = self._streams[place, seed] = TorchGenerator(seed)
            stream.randn(shape)
        return self._streams[place, seed].randn


def default_generator(*arrays: Any) -> Any:
    """Returns PyTorch's default generator where an array is a tensor, and else None."""
    return sys.modules["torch"].default_generator if any(map(is_tensor, arrays)) else None


def is_stateful(generator: Any) -> bool:
    """Returns whether a generator, or those of a list, go on where the last call left them.

    Those of PyTorch's GPUs do not: their seed stands for PyTorch's CPU generator.
    """
    if isinstance(generator, list | tuple):
        return any(map(is_stateful, generator))
    device = getattr(getattr(generator, "device", None), "type", None)
    from_torch = hasattr(generator, "initial_seed") and device == "cpu"
    return from_torch or isinstance(generator, TorchGenerator)


@functools.partial(jax.jit, static_argnums=1)
def _keys(key: jax.Array, images: int) -> jax.Array:
    """Returns one key for each image: key i of several, or fold_in(key, i)."""
    key = as_key(key)
    if key.ndim:
        if key.shape != (images,):
            raise ValueError(
                f"generator must be one random key, or one for each of the {images} images (got "
                f"keys of shape {key.shape})"
            )
        return key
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(images))
