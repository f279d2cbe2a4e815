"""Between an autoencoder's latents and those that a diffusion model works on; pixels likewise."""

from typing import Any

import jax
import jax.numpy as jnp


def sample_latents(mean: jax.Array, logvar: jax.Array, noise: jax.Array) -> jax.Array:
    """Latents of the distribution that an encoder gives (Kingma and Welling 2014). b h w z each."""
    return mean + jnp.exp(0.5 * logvar) * noise


def scale_latents(config: Any, z: jax.Array, *, normalize: bool = False) -> jax.Array:
    """The autoencoder's latents as a diffusion model sees them: about unit variance. b h w z.

    config: the autoencoder's. normalize: use its latents_mean and latents_std, as SDXL does and
    Stable Diffusion does not.
    """
    mean, std = _moments(config, normalize)
    return (z - mean) * config.scaling_factor / std


def unscale_latents(config: Any, z: jax.Array, *, normalize: bool = False) -> jax.Array:
    """The inverse of `scale_latents`."""
    mean, std = _moments(config, normalize)
    return z * std / config.scaling_factor + mean


def to_unit(x: jax.Array) -> jax.Array:
    """Pixels from [-1, 1] to [0, 1], clipped."""
    return jnp.clip(x / 2 + 0.5, 0.0, 1.0)


def from_bytes(x: jax.Array) -> jax.Array:
    """Pixels from 0..255 to [-1, 1], float32."""
    return x.astype(jnp.float32) / 127.5 - 1


def _moments(config: Any, normalize: bool) -> tuple[Any, Any]:
    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if normalize and mean is not None and std is not None:
        return jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return config.shift_factor or 0.0, 1.0
