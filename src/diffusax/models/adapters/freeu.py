"""FreeU (Si et al. 2023) reweights the backbone and the skip connections in a UNet's decoder."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEVELS = 2
"""The number of levels on the way up that have their own numbers, the smallest maps first."""


class FreeU(NamedTuple):
    """FreeU's numbers under diffusers' names: s1, b1 for the smallest maps, s2, b2 for the next.

    s: the factor of the skip connections' low frequencies. b: that of half the backbone's channels.
    """

    s1: float
    s2: float
    b1: float
    b2: float


def check_freeu(s1: float, s2: float, b1: float, b2: float) -> FreeU | None:
    """Returns the numbers, or None (no FreeU) if one of them is zero, like diffusers.

    Raises:
        ValueError: one of them is not a finite number.
    """
    values = FreeU(s1, s2, b1, b2)
    for name, value in values._asdict().items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ValueError(f"{name} must be a number (got {value!r})")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite (got {value})")
    return FreeU(*map(float, values)) if all(values) else None


def freeu_rows(freeu: FreeU | None, *shape: int) -> np.ndarray | None:
    """Returns the numbers as an array of this shape and 4; None without FreeU."""
    return None if freeu is None else np.tile(np.array(freeu, np.float32), (*shape, 1))


def of_level(freeu: jax.Array, level: int) -> jax.Array | None:
    """Returns the s and b of a level on the way up, 2 or b 2; None if FreeU does not change it.

    freeu: 4 or b 4, in `FreeU`'s order.
    """
    return None if level >= LEVELS else freeu[..., level::LEVELS]


def apply_freeu(x: jax.Array, skip: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies FreeU to a resnet's inputs: the backbone's map and a skip connection, b h w c each.

    The factor b is the same for all pixels, as in diffusers (utils/torch_utils.py, apply_freeu).
    It computes in float32.

    numbers: the level's s and b, 2 or b 2.
    """
    s, b = (numbers[..., i].astype(jnp.float32).reshape(-1, 1, 1, 1) for i in range(2))
    # diffusers scales x in place, and without a middle block the first skip connection is x itself.
    same, c = skip is x, x.shape[-1]
    x = (x * jnp.where(jnp.arange(c) < c // 2, b, 1)).astype(x.dtype)
    return x, _scale_low_frequencies(x if same else skip, s)


def _scale_low_frequencies(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales the frequencies 0 and -1 of x, in each direction. b h w c, scale: b 1 1 1.

    Like diffusers' `fourier_filter` with a threshold of 1, it takes the real part of the changed
    spectrum. The result is x plus a multiple of its projection on four waves, without a transform.
    """
    waves, x32 = jnp.asarray(_low_waves(*x.shape[1:3])), x.astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    spectrum = jnp.einsum("bhwc,nhw->bnc", x32, waves, precision=exact)
    low = jnp.einsum("bnc,nhw->bhwc", spectrum, waves, precision=exact)
    return (x32 + (scale - 1) * low).astype(x.dtype)


@functools.lru_cache(64)
def _low_waves(height: int, width: int) -> np.ndarray:
    """Returns cosines and sines of the frequencies 0 and -1 over a map, n h w, over sqrt(h w)."""
    # A side of one pixel has only one frequency.
    phases = [
        2 * np.pi * (u * np.arange(height)[:, None] / height + v * np.arange(width) / width)
        for u in range(min(height, 2))
        for v in range(min(width, 2))
    ]
    waves = [wave(phase) for phase in phases for wave in (np.cos, np.sin)]
    return np.stack(waves).astype(np.float32) / np.float32(math.sqrt(height * width))
