"""Encodes and decodes large images in overlapping tiles, so that memory does not grow with them.

The tiles and their blending are those of diffusers' `vae.enable_tiling()`
(models/autoencoders/autoencoder_kl.py, _tiled_encode and tiled_decode).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

OVERLAP = 0.25
TILED_ENCODERS = (
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLQwenImage",
    "AutoencoderKLQwenImage21",
    "AutoencoderKLWan",
)
"""The autoencoders that encode in tiles, too, in diffusers."""
_SIDE = 512


def tile_of(config: Any, factor: int) -> int:
    """Returns the side of an autoencoder's tiles in latents: its sample_size's, or 512 pixels'.

    config: the autoencoder's. factor: the pixels per latent, in each direction.
    """
    side = getattr(config, "sample_size", _SIDE)
    return (side[0] if isinstance(side, tuple) else side) // factor


def encoder_tiles(config: Any) -> dict[str, int]:
    """Returns the options of `tiled_encode` for an autoencoder with this config.

    Of patches diffusers counts the sides of tiles in patches, and those of images in pixels.
    """
    factor = config.downsampling
    tile = tile_of(config, factor)
    return {"tile": tile * getattr(config, "patch", 1), "whole": tile, "factor": factor}


def tiled_decode(
    decode: Callable[..., jax.Array],
    z: np.ndarray,
    *beside: np.ndarray,
    tile: int,
    factor: int,
    patch: int = 1,
) -> np.ndarray:
    """Decodes z: b h w z -> b H W 3 by calling `decode` on tiles of at most `tile` latents a side.

    Tiles at the bottom and the right are cut off. There are thus at most three heights and three
    widths, and a compiled `decode` compiles at most nine times. Besides the result, one row of
    tiles is in memory. `factor` is the number of pixels per latent. `beside` are further arrays,
    b H W c, which are cut into tiles too and passed to `decode`. `patch` is the side of the squares
    of pixels that are blended alike. Videos have frames before the rows, b f h w z -> b f H W 3.

    Raises:
        ValueError: tile is less than one latent.
    """
    z = np.asarray(z)
    _check_tile(tile)
    if max(z.shape[-3:-1]) <= tile:
        return np.array(decode(z, *beside))

    def tile_at(i: int, j: int) -> jax.Array:
        return decode(*_tiles(i, j, tile, (z, 1), *((p, factor) for p in beside)))

    return _joined(tile_at, z.shape[-3:-1], tile, factor, patch)


def tiled_encode(
    encode: Callable[[np.ndarray], Any],
    x: np.ndarray,
    *,
    tile: int,
    factor: int,
    whole: int | None = None,
) -> np.ndarray:
    """Encodes x: b H W 3 -> b h w c by calling `encode` on tiles of at most `tile` latents a side.

    The counterpart of `tiled_decode`; what is blended are the moments of the latents. Images of at
    most `whole` latents a side, by default `tile`, are encoded in one piece.

    Raises:
        ValueError: tile is less than one latent.
    """
    x = np.asarray(x)
    _check_tile(tile)
    if max(x.shape[-3:-1]) <= (tile if whole is None else whole) * factor:
        return np.array(encode(x))
    height, width = (n // factor for n in x.shape[-3:-1])
    return _joined(
        lambda i, j: encode(*_tiles(i, j, tile, (x, factor))), (height, width), tile, factor=1
    )


def _check_tile(tile: int) -> None:
    if tile < 1:
        raise ValueError(f"tile must be at least one latent (got {tile}); use a larger tile")


def _joined(
    tile_at: Callable[[int, int], Any],
    size: tuple[int, ...],
    tile: int,
    factor: int,
    patch: int = 1,
) -> np.ndarray:
    """Puts tiles together and blends them where they overlap.

    Args:
        tile_at: a function from the first row and column of a tile, in latents, to its result.
        size: the rows and columns of latents of the whole.
        tile: the side of a tile, in latents.
        factor: the rows of the result for a row of latents.
        patch: the rows of the result that are blended alike.
    """
    height, width = size
    # The overlap is rounded in latents, for latents and images alike. diffusers rounds each by
    # itself, and returns an image of another size if a quarter of a tile is not whole.
    step = max(1, int(tile * (1 - OVERLAP)))
    extent, keep = (tile - step) * factor, step * factor

    result: Any = None
    above: list[np.ndarray] = []
    for i in range(0, height, step):
        row: list[np.ndarray] = []
        for k, j in enumerate(range(0, width, step)):
            y = np.array(tile_at(i, j))
            if above:
                _blend(above[k], y, extent, patch, axis=-3)
            if row:
                _blend(row[-1], y, extent, patch, axis=-2)
            row.append(y)
            if result is None:
                shape = *y.shape[:-3], height * factor, width * factor, y.shape[-1]
                result = np.empty(shape, y.dtype)
            top, left = i * factor, j * factor
            kept = result[..., top : top + keep, left : left + keep, :]
            kept[...] = y[..., : kept.shape[-3], : kept.shape[-2], :]
        above = row
    return result


def _tiles(i: int, j: int, tile: int, *maps: tuple[np.ndarray, int]) -> list[np.ndarray]:
    """Cuts latents i to i + tile and j to j + tile out of maps, each with its pixels per latent."""
    return [x[..., i * n : (i + tile) * n, j * n : (j + tile) * n, :] for x, n in maps]


def _blend(before: np.ndarray, after: np.ndarray, extent: int, patch: int, axis: int) -> None:
    """Fades in place from the end of `before` to the start of `after` along `axis`.

    axis: counted from the end. patch: how many rows have one weight.
    """
    extent = min(before.shape[axis], after.shape[axis], extent)
    if extent == 0:
        return
    shape = [1] * after.ndim
    shape[axis] = extent
    steps = np.arange(extent, dtype=np.float32) // patch * patch
    fade = (steps / extent).reshape(shape)
    last = np.take(before, np.arange(-extent, 0), axis=axis)
    index = tuple(slice(extent) if a == axis else slice(None) for a in range(-after.ndim, 0))
    after[index] = last * (1 - fade) + after[index] * fade
