"""Finds edges in images, as ControlNets for edges were trained with."""

import numpy as np
import scipy.ndimage
from PIL import Image

_STEEP = np.tan(np.pi / 8)
"""Below this slope a gradient counts as horizontal, and above its inverse as vertical."""


def canny(image: Image.Image, low: float, high: float) -> Image.Image:
    """Returns the edges of an image, white on black, RGB of its size (Canny 1986).

    Gradients are those of Sobel's filters of 3x3 pixels, and their size is |dx| + |dy|, of the
    channel in which it is largest, as in OpenCV's Canny. An edge is a line of pixels whose gradient
    is larger than those beside it and than `low`, and somewhere than `high`.

    Args:
        image: any PIL image.
        low: the least size of a gradient on an edge.
        high: the size that an edge has somewhere.
    """
    low, high = sorted((low, high))
    pixels = np.asarray(image.convert("RGB"), np.int32)
    dx, dy = (_slope(pixels, axis) for axis in (1, 0))
    size = abs(dx) + abs(dy)
    channel = size.argmax(-1)[..., None]
    dx, dy, size = (np.take_along_axis(x, channel, -1)[..., 0] for x in (dx, dy, size))
    candidates = _is_ridge(dx, dy, size) & (size > low)
    lines, _ = scipy.ndimage.label(candidates, np.ones((3, 3)))
    strong = np.unique(lines[candidates & (size > high)])
    edges = candidates & np.isin(lines, strong)
    return Image.fromarray((255 * edges).astype(np.uint8)).convert("RGB")


def _slope(pixels: np.ndarray, axis: int) -> np.ndarray:
    """Returns Sobel's derivative along an axis of each channel, h w c."""
    across = scipy.ndimage.correlate1d(pixels, (1, 2, 1), 1 - axis, mode="nearest")
    found: np.ndarray = scipy.ndimage.correlate1d(across, (-1, 0, 1), axis, mode="nearest")
    return found


def _is_ridge(dx: np.ndarray, dy: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Returns whether the gradient of each pixel is larger than those before and behind it."""
    around = np.pad(size, 1)

    def beside(down: int, right: int) -> np.ndarray:
        height, width = size.shape
        return around[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    flat, upright = abs(dy) < _STEEP * abs(dx), abs(dx) < _STEEP * abs(dy)
    falls = (dx < 0) != (dy < 0)
    # Of two equal neighbours, the one at the right or below is on the edge.
    horizontal = (size > beside(0, -1)) & (size >= beside(0, 1))
    vertical = (size > beside(-1, 0)) & (size >= beside(1, 0))
    down = (size > beside(-1, -1)) & (size > beside(1, 1))
    up = (size > beside(-1, 1)) & (size > beside(1, -1))
    diagonal = np.where(falls, up, down)
    return np.where(flat, horizontal, np.where(upright, vertical, diagonal))
