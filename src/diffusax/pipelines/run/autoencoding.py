"""The compiled programs of autoencoders, see `programs`: between pixels and the latents of runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.models.autoencoders.latents import (
    latent_statistics,
    sample_latents,
    scale_folded,
    scale_latents,
    to_unit,
    unscale_latents,
)
from diffusax.models.network import Network, Params, cast_params
from diffusax.models.parameter_tree import first_parameter
from diffusax.pipelines.plan.plan import DecoderCondition
from diffusax.pipelines.run.programs import repeat_to
from diffusax.runtime.devices.splitting import split_images
from diffusax.runtime.programs.program import Program


@functools.partial(Program, static=("vae", "upcast", "scale", "normalize"), shape_of="pixels")
def encode_image(
    vae: Network,
    params: Params,
    pixels: jax.Array,
    noise: jax.Array | None,
    *,
    upcast: bool = False,
    scale: bool = True,
    normalize: bool = False,
) -> jax.Array:
    """Encodes images b H W 3 in [-1, 1] to latents b h w z, float32.

    noise: b h w z, the standard normal noise that samples the autoencoder's distribution; where it
    has more rows than there are images, these are repeated. None takes the mode of the
    distribution. scale, normalize: see `latents.scale_latents`.
    """
    params = _upcast(params) if upcast else params
    moments = _moments(vae, params, pixels)
    return _sampled(vae, params, moments, noise, scale=scale, normalize=normalize)


@functools.partial(Program, static=("vae", "upcast"), shape_of="pixels")
def encode_moments(
    vae: Network, params: Params, pixels: jax.Array, *, upcast: bool = False
) -> jax.Array:
    """Encodes images b H W 3 to the mean and log variance of their latents, b h w 2z, float32."""
    params = _upcast(params) if upcast else params
    return jnp.concatenate(_moments(vae, params, pixels), axis=-1).astype(jnp.float32)


@functools.partial(Program, static=("vae", "scale", "normalize"), shape_of="moments")
def sample_moments(
    vae: Network,
    params: Params,
    moments: jax.Array,
    noise: jax.Array | None,
    *,
    scale: bool = True,
    normalize: bool = False,
) -> jax.Array:
    """Returns the latents of what `encode_moments` returns; see `encode_image`."""
    mean, logvar = jnp.split(moments, 2, axis=-1)
    return _sampled(vae, params, (mean, logvar), noise, scale=scale, normalize=normalize)


def _moments(vae: Network, params: Params, pixels: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the mean of the latents, and their log variance if the autoencoder has one."""
    encoded = vae.apply(params, split_images(pixels), method="encode")
    encoded = jax.tree.map(lambda x: x[: len(pixels)], encoded)
    return encoded if isinstance(encoded, tuple) else (encoded, None)


def _sampled(
    vae: Network,
    params: Params,
    moments: tuple[jax.Array, jax.Array | None],
    noise: jax.Array | None,
    *,
    scale: bool,
    normalize: bool,
) -> jax.Array:
    """Returns latents b h w z; see `encode_image`. moments: the mean, and the log variance."""
    mean, logvar = moments
    z = mean.astype(jnp.float32)
    if noise is not None:
        z = repeat_to(z, noise.shape[0])
        if logvar is not None:
            z = sample_latents(z, repeat_to(logvar.astype(jnp.float32), z.shape[0]), noise)
    if not scale:
        return z
    statistics = latent_statistics(params)
    return scale_latents(vae.config, z, normalize=normalize, statistics=statistics)


@functools.partial(Program, static=("vae", "upcast", "normalize", "skip"), shape_of="latents")
def decode(
    vae: Network,
    params: Params,
    latents: jax.Array,
    condition: DecoderCondition | None = None,
    *,
    upcast: bool,
    normalize: bool,
    skip: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Decodes latents b h w z to images b H W 3 in [0, 1], or b f h w z to videos, float32.

    Also returns whether each image and its latents are finite, b. skip: see `Decoding`.
    """
    options: dict[str, Any] = {"upcast": upcast, "normalize": normalize, "skip": skip}
    images = decode_pixels(vae, params, latents, condition, **options)
    every = tuple(range(1, images.ndim))
    finite = jnp.isfinite(images).all(every) & jnp.isfinite(latents).all(every)
    return to_unit(images), finite


@functools.partial(Program, static=("vae", "upcast", "normalize", "skip"), shape_of="latents")
def decode_pixels(
    vae: Network,
    params: Params,
    latents: jax.Array,
    condition: DecoderCondition | None = None,
    *,
    upcast: bool,
    normalize: bool,
    skip: int = 0,
) -> jax.Array:
    """Decodes latents b h w z to images b H W 3, about [-1, 1] and not clipped, float32.

    skip: see `Decoding`.
    """
    latents = latents[:, skip:] if skip else latents
    params = _upcast(params) if upcast else params
    statistics = latent_statistics(params)
    z = unscale_latents(vae.config, latents, normalize=normalize, statistics=statistics)
    shown = {} if condition is None else condition._asdict()
    return vae.apply(params, z, method="decode", **shown).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("vae", "normalize"))
def own_latents(vae: Network, params: Params, latents: jax.Array, *, normalize: bool) -> jax.Array:
    """Returns the autoencoder's own latents for a diffusion model's, see `unscale_latents`."""
    statistics = latent_statistics(params)
    return unscale_latents(vae.config, latents, normalize=normalize, statistics=statistics)


@functools.partial(jax.jit, static_argnames=("vae",))
def normalized(vae: Network, params: Params, latents: jax.Array) -> jax.Array:
    """Normalises patches of latents, b h w c, by the autoencoder's statistics, if it has some."""
    statistics = latent_statistics(params)
    x = latents.astype(jnp.float32)
    return x if statistics is None else scale_folded(vae.config, x, statistics=statistics)


def _upcast(params: Params) -> Params:
    """Casts float16 parameters to float32 and leaves others as they are."""
    half = first_parameter(params).dtype == jnp.float16
    return cast_params(params, jnp.float32) if half else params
