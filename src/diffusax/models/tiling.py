"""Autoencoding of large images in overlapping tiles, so that memory does not grow with the image.

The tiles and their blending are those of diffusers' `vae.enable_tiling()`
(models/autoencoders/autoencoder_kl.py, _tiled_encode and tiled_decode).
"""

from collections.abc import Callable

import jax
import numpy as np

OVERLAP = 0.25


def tiled_decode(
    decode: Callable[[np.ndarray], jax.Array], z: np.ndarray, *, tile: int, factor: int
) -> np.ndarray:
    """z: b h w z -> b H W 3 with `decode` called on tiles of at most `tile` latents a side.

    `decode` should be compiled: it sees at most four shapes, one but for the borders. `factor` is
    the number of pixels per latent.
    """
    step = int(tile * (1 - OVERLAP))
    return _tiled(decode, np.asarray(z), tile, step, tile * factor)


def tiled_encode(
    encode: Callable[[np.ndarray], jax.Array], x: np.ndarray, *, tile: int, factor: int
) -> np.ndarray:
    """x: b H W 3 -> b h w c with `encode` called on tiles of at most `tile` pixels a side."""
    step = int(tile * (1 - OVERLAP))
    return _tiled(encode, np.asarray(x), tile, step, tile // factor)


def _tiled(
    apply: Callable[[np.ndarray], jax.Array], x: np.ndarray, tile: int, step: int, out_tile: int
) -> np.ndarray:
    extent = int(out_tile * OVERLAP)
    keep = out_tile - extent
    rows: list[np.ndarray] = []
    above: list[np.ndarray] = []
    for i in range(0, x.shape[1], step):
        row: list[np.ndarray] = []
        for k, j in enumerate(range(0, x.shape[2], step)):
            y = np.array(apply(x[:, i : i + tile, j : j + tile]))
            if above:
                _blend(above[k], y, extent, axis=1)
            if row:
                _blend(row[-1], y, extent, axis=2)
            row.append(y)
        rows.append(np.concatenate([y[:, :keep, :keep] for y in row], axis=2))
        above = row
    return np.concatenate(rows, axis=1)


def _blend(before: np.ndarray, after: np.ndarray, extent: int, axis: int) -> None:
    """Fades in place from the end of `before` to the start of `after` along `axis`."""
    extent = min(before.shape[axis], after.shape[axis], extent)
    if extent == 0:
        return
    shape = [1] * after.ndim
    shape[axis] = extent
    fade = (np.arange(extent, dtype=np.float32) / extent).reshape(shape)
    last = np.take(before, np.arange(-extent, 0), axis=axis)
    index = tuple(slice(extent) if a == axis else slice(None) for a in range(after.ndim))
    after[index] = last * (1 - fade) + after[index] * fade
