"""A run's random numbers: from JAX's keys, or the reproduced numbers of PyTorch's generator."""

import dataclasses
import functools
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_numpy, is_tensor
from diffusax.runtime.random.torch_random import TorchGenerator

Shape = tuple[int, ...]
Purpose = Literal["start", "image", "masked", "control"]
# A row's noise has its number + 1, which is far below these.
_INDEX = {
    "start": np.uint32(0),
    "image": np.uint32(2**32 - 1),
    "masked": np.uint32(2**32 - 2),
    "control": np.uint32(2**32 - 3),
}
_LIMIT = 2**64
_WORD = 2**32
_IMPLEMENTATION = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class JaxNoise:
    """One key per image; image i of a seed has the same numbers in every batch."""

    keys: jax.Array

    def draw(self, purpose: Purpose, shape: Shape, rows: int | None = None) -> Any:
        """Returns normal numbers for each image, b h w c; ignores `rows`."""
        return draw_noise(self.keys, shape, _INDEX[purpose])


@dataclasses.dataclass(frozen=True)
class TorchNoise:
    """The numbers of torch.Generator().manual_seed(seed), in the order in which diffusers draws."""

    generators: tuple["TorchGenerator | _Stream", ...]
    images: int
    keys: jax.Array
    """Keys for programs that use no noise, so that they are the same as with JAX's numbers."""

    def draw(self, purpose: Purpose, shape: Shape, rows: int | None = None) -> Any:
        """Draws the next numbers as rows c h w, and returns rows h w c; one row per image by
        default. Those of videos are c f h w.
        """
        *sizes, c = shape
        rows = self.images if rows is None else rows
        if len(self.generators) == 1:
            drawn = self.generators[0].randn((rows, c, *sizes))
        else:
            drawn = np.concatenate([g.randn((1, c, *sizes)) for g in self.generators[:rows]])
        return np.ascontiguousarray(np.moveaxis(drawn, 1, -1))


@dataclasses.dataclass(frozen=True)
class VariedNoise:
    """Noise whose first numbers are turned towards those of other seeds; the rest are its own.

    Source: stable-diffusion-webui, modules/rng.py, ImageRNG.first.
    """

    own: JaxNoise | TorchNoise
    other: JaxNoise | TorchNoise
    strength: float
    """How far they are turned, from 0 to 1."""

    @property
    def keys(self) -> jax.Array:
        """The keys of its images."""
        return self.own.keys

    def draw(self, purpose: Purpose, shape: Shape, rows: int | None = None) -> Any:
        """Draws as the others do, b h w c."""
        drawn = self.own.draw(purpose, shape, rows)
        if purpose != "start":
            return drawn
        return slerp(self.strength, drawn, self.other.draw(purpose, shape, rows))


Noise = JaxNoise | TorchNoise | VariedNoise
_PARALLEL = 0.9995
"""The mean cosine of two noises that are taken to be parallel."""


def slerp(share: float, low: Any, high: Any) -> Any:
    """Interpolates two noises on the spheres of their columns, b h w c.

    Source: stable-diffusion-webui, modules/rng.py, slerp, which is given one image c h w and takes
    its second axis, the height, for the one whose vectors are turned.

    Args:
        share: 0 returns low, and 1 high.
        low: noise.
        high: other noise.
    """
    low, high = jnp.asarray(low), jnp.asarray(high)
    units = [x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (low, high)]
    cosine = jnp.sum(units[0] * units[1], axis=1, keepdims=True)
    angle = jnp.arccos(jnp.clip(cosine, -1, 1))
    turned = jnp.sin((1 - share) * angle) * low + jnp.sin(share * angle) * high
    # There the first noise has the share of the second one, which cannot be told apart from it.
    straight = low * share + high * (1 - share)
    every = tuple(range(1, cosine.ndim))
    parallel = jnp.mean(cosine, axis=every, keepdims=True) > _PARALLEL
    return jnp.where(parallel, straight, turned / jnp.sin(angle))


def noise_source(
    kind: str,
    seed: list[int] | int | None,
    n: int,
    generators: Sequence[Any] = (),
    keys: jax.Array | None = None,
) -> Noise:
    """Makes the noise of n images; a seed of None takes one from the system.

    Args:
        kind: "jax" or "torch", whose numbers they are.
        seed: the seed of all images, or a list of one for each.
        n: the number of images.
        generators: instead of the seed, one for all images or one for each: seeds, or generators of
            PyTorch on the CPU, which go on with every draw.
        keys: instead of the seed, a random key, or one for each image, n; key(s) stands for seed s.

    Raises:
        ValueError: the seed is out of range, or there are not as many as images.
    """
    if keys is not None:
        return JaxNoise(_keys_of_images(keys, n))
    if seed is None:
        seed = secrets.randbits(32)
    if isinstance(seed, list) and len(seed) != n:
        raise ValueError(f"seed has {len(seed)} entries for {n} images; give one or {n}")
    seeds = seed if isinstance(seed, list) else [seed]
    if kind == "torch":
        keys = image_keys(np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))
        return TorchNoise(tuple(map(_stream, generators or seeds)), n, keys)
    for value in seeds:
        if not 0 <= value < _LIMIT:
            raise ValueError(f"seed must be an integer from 0 to {_LIMIT - 1} (got {value})")
    high, low = np.array([divmod(value, _WORD) for value in seeds], np.uint32).T
    many = isinstance(seed, list)
    indices = np.zeros(n, np.uint32) if many else np.arange(n, dtype=np.uint32)
    keys = image_keys(low if many else np.full(n, low[0]), indices)
    if high.any():
        keys = with_high_words(keys, high if many else np.full(n, high[0]))
    return JaxNoise(keys)


def _keys_of_images(keys: jax.Array, n: int) -> jax.Array:
    if keys.shape not in ((), (n,)):
        raise ValueError(f"seed has keys of shape {keys.shape} for {n} images; give one or {n}")
    indices = np.zeros(n, np.uint32) if keys.ndim else np.arange(n, dtype=np.uint32)
    return jax.vmap(jax.random.fold_in)(jnp.broadcast_to(keys, (n,)), indices)


def _stream(generator: Any) -> "TorchGenerator | _Stream":
    """Returns the numbers of a seed, or those of a generator of PyTorch from where it stands."""
    if isinstance(generator, int):
        return TorchGenerator(generator)
    return _Stream(generator)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The numbers of a generator of PyTorch, which goes on with every draw."""

    generator: Any

    def randn(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns standard normal numbers, as `TorchGenerator` does."""
        return np.asarray(draw_from(self.generator, shape))


def seed_key(seed: Any) -> jax.Array:
    """Returns the random key of a seed, of the one implementation that all numbers come from."""
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def as_key(key: jax.Array) -> jax.Array:
    """Returns one or several random keys; keys of the older kind are arrays of integers, ... k.

    Raises:
        ValueError: it is neither.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if key.dtype != jnp.uint32 or key.ndim == 0 or key.shape[-1] not in (2, 4):
        raise ValueError(
            "a random key must be one of jax.random.key, or an older one, integers uint32 of shape "
            f"(..., 2) or (..., 4) (got {key.dtype} of shape {key.shape})"
        )
    return jax.random.wrap_key_data(key, impl=_IMPLEMENTATION if key.shape[-1] == 2 else "rbg")


def as_threefry(keys: jax.Array) -> jax.Array:
    """Returns keys of the implementation that all numbers come from: others draw their words."""
    if str(jax.random.key_impl(keys)) == _IMPLEMENTATION:
        return keys
    draw = functools.partial(jax.random.bits, shape=(2,), dtype=jnp.uint32)
    words = jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, 2)
    return jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)


@jax.jit
def image_keys(seeds: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns one key per image: fold_in(key(seed), index), whatever else is in the batch."""
    return jax.vmap(lambda s, i: jax.random.fold_in(seed_key(s), i))(seeds, indices)


@jax.jit
def with_high_words(keys: jax.Array, words: jax.Array) -> jax.Array:
    """Returns keys for seeds of 64 bits: fold_in(key, word) for words above zero.

    Seeds below 2**32 have the keys that they always had.
    """

    def one(key: jax.Array, word: jax.Array) -> jax.Array:
        own, more = jax.random.key_data(key), jax.random.key_data(jax.random.fold_in(key, word))
        return jnp.where(word > 0, more, own)

    impl = jax.random.key_impl(keys)
    return jax.random.wrap_key_data(jax.vmap(one)(keys, words), impl=impl)


@functools.partial(jax.jit, static_argnums=1)
def draw_noise(keys: jax.Array, shape: tuple[int, ...], index: Any) -> jax.Array:
    """Compiles and calls `draw_rows`."""
    return draw_rows(keys, shape, index)


def draw_rows(keys: jax.Array, shape: tuple[int, ...], index: Any) -> jax.Array:
    """Draws standard normal numbers for each key, b ...; they differ for each index.

    index: one for all keys, or b.
    """
    indices = jnp.broadcast_to(index, keys.shape)

    def draw(key: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)

    return jax.vmap(draw)(keys, indices)


def draw_like(x: Any, generator: Any = None) -> Any:
    """Draws standard normal numbers, float32 of the shape of x, as diffusers' `randn_tensor`.

    Args:
        x: an array or a tensor of PyTorch.
        generator: a seed, a torch.Generator, which goes on where it is a CPU's, or a
            `TorchGenerator`, or a list of one of these for each image, for PyTorch's numbers; or a
            JAX random key. None draws from PyTorch's default generator where x is a tensor, and
            else takes a seed from the system.

    Raises:
        ValueError: generator is none of these, or a list of another length.
    """
    shape = tuple(x.shape)
    if isinstance(generator, list | tuple):
        if len(generator) != shape[0]:
            raise ValueError(
                f"generator has {len(generator)} entries for {shape[0]} images; give one or "
                f"{shape[0]}"
            )
        return np.concatenate([draw_from(g, (1, *shape[1:])) for g in generator])
    if generator is None and is_tensor(x):
        return as_numpy(sys.modules["torch"].randn(shape))
    return draw_from(secrets.randbits(32) if generator is None else generator, shape)


def draw_from(generator: Any, shape: tuple[int, ...]) -> Any:
    """Draws standard normal numbers from one of the generators of `draw_like`.

    Raises:
        ValueError: generator is none of these.
    """
    if isinstance(generator, TorchGenerator):
        return generator.randn(shape)
    if hasattr(generator, "initial_seed"):
        # The numbers of a GPU's generator are those of a CPU's with its seed, as in calls.
        if generator.device.type != "cpu":
            return TorchGenerator(generator.initial_seed()).randn(shape)
        torch: Any = sys.modules["torch"]
        return as_numpy(torch.randn(shape, generator=generator))
    if isinstance(generator, jax.Array) and (
        jnp.issubdtype(generator.dtype, jax.dtypes.prng_key) or generator.dtype == jnp.uint32
    ):
        return jax.random.normal(as_key(generator), shape, jnp.float32)
    if isinstance(generator, int | np.integer) and not isinstance(generator, bool):
        return TorchGenerator(int(generator)).randn(shape)
    raise ValueError(
        "generator must be a seed, a torch.Generator, a JAX random key or a list of them (got "
        f"{type(generator).__name__})"
    )
