"""Masks that say which part of an image an IP-Adapter's image prompts change."""

import functools
import math
from typing import Any

import numpy as np

from diffusax.images.masks import to_mask

# PyTorch's parameter of the cubic kernel (Keys 1981).
_CUBIC = -0.75


class IPAdapterMaskProcessor:
    """Prepares masks for `cross_attention_kwargs={"ip_adapter_masks": ...}`, as in diffusers."""

    def __init__(self, vae_scale_factor: int = 8):
        """vae_scale_factor: the sides of the masks are multiples of it."""
        self.vae_scale_factor = vae_scale_factor

    def preprocess(
        self, image: Any, height: int | None = None, width: int | None = None
    ) -> np.ndarray:
        """Returns masks as 1 where they are white and 0 where they are black, n 1 H W float32.

        Args:
            image: a mask or a list of them: paths, PIL images or arrays.
            height: the height in pixels, by default the first mask's own.
            width: the width in pixels, by default the first mask's own.

        Raises:
            ValueError: one is not a mask.
        """
        masks = to_mask(image, height, width, factor=self.vae_scale_factor)
        return masks.transpose(0, 3, 1, 2)


def downsample_mask(mask: np.ndarray, queries: int) -> np.ndarray:
    """Returns masks for an attention of this number of queries, ... H W -> ... q.

    It guesses the height and width of the attention's map from the mask's own proportions. Where
    these are not the image's, it cuts off or adds black, as `IPAdapterMaskProcessor.downsample` of
    diffusers.
    """
    rows, columns = mask.shape[-2:]
    height = int(math.sqrt(queries / (columns / rows))) or 1
    height += int(queries % height != 0)
    width = max(queries // height, 1)
    small = _cubic_weights(rows, height) @ mask @ _cubic_weights(columns, width).T
    flat = small.reshape(*mask.shape[:-2], -1)[..., :queries]
    missing = queries - flat.shape[-1]
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, missing)]
    return np.pad(flat, padding).astype(np.float32)


@functools.lru_cache(64)
def _cubic_weights(size: int, new: int) -> np.ndarray:
    """Returns the matrix that resizes an axis as torch's `interpolate(mode="bicubic")`, new size.

    That takes four values around each new one and does not smooth what it makes smaller.
    """
    position = (np.arange(new) + 0.5) * (size / new) - 0.5
    first = np.floor(position).astype(int)
    share = position - first
    weights = np.zeros((new, size))
    for offset in range(-1, 3):
        source = np.clip(first + offset, 0, size - 1)
        np.add.at(weights, (np.arange(new), source), _cubic(np.abs(offset - share)))
    return weights


def _cubic(x: np.ndarray) -> np.ndarray:
    """Returns the cubic convolution kernel at distances of up to two."""
    near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
    far = ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC
    return np.where(x <= 1, near, far)
