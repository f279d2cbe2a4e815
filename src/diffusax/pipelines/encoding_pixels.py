"""Encodes pictures to latents, in overlapping tiles where the autoencoder has them."""

from typing import Any

import jax
import numpy as np

from diffusax.models.autoencoders.tiling import TILED_ENCODERS, tile_of, tiled_encode
from diffusax.pipelines import programs
from diffusax.pipelines.components import Components


def encode_pixels(
    c: Components, pixels: Any, noise: Any, *, upcast: bool, **options: Any
) -> jax.Array:
    """Encodes images b H W 3 in [-1, 1] to latents b h w z; see `programs.encode_image`.

    Args:
        c: the components; their autoencoder's switches say whether there are tiles.
        pixels: the images.
        noise: what samples the latents; None takes their mode.
        upcast: whether float16 parameters are cast to float32.
        **options: scale and normalize.
    """
    vae, params = c.autoencoder, c.autoencoder_params
    factor = vae.config.downsampling if _in_tiles(c) else 0
    tile = tile_of(vae.config, factor) if factor else 0
    if max(pixels.shape[1:3]) <= tile * factor or not factor:
        given = vae, params, pixels, noise
        whole: jax.Array = programs.encode_image(*given, upcast=upcast, **options)
        return whole

    def encode_tile(part: np.ndarray) -> jax.Array:
        moments: jax.Array = programs.encode_moments(vae, params, part, upcast=upcast)
        return moments

    moments = tiled_encode(encode_tile, pixels, tile=tile, factor=factor)
    latents: jax.Array = programs.sample_moments(vae, params, moments, noise, **options)
    return latents


def _in_tiles(c: Components) -> bool:
    return c.autoencoder.class_name in TILED_ENCODERS and c.autoencoder_model.switches.tiling
