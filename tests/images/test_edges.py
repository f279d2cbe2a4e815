"""Canny's edges against a plain loop over the pixels."""

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

from diffusax.images.edges import canny

SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])


def picture():
    image = Image.new("RGB", (40, 32), (200, 180, 160))
    draw = ImageDraw.Draw(image)
    draw.ellipse((4, 4, 24, 26), (30, 60, 220))
    draw.polygon([(20, 30), (38, 4), (39, 30)], (220, 40, 30))
    noise = np.random.default_rng(0).normal(0, 6, (32, 40, 3))
    soft = gaussian_filter(np.asarray(image, np.float64), (1, 1, 0)) + noise
    return Image.fromarray(soft.clip(0, 255).astype(np.uint8))


def edges_of(pixels, low, high):
    """OpenCV's Canny, imgproc/src/canny.cpp, one pixel after the other."""
    padded = np.pad(pixels.astype(int), ((1, 1), (1, 1), (0, 0)), "edge")
    height, width, _ = pixels.shape
    dx, dy = np.zeros((2, height, width), int)
    for y in range(height):
        for x in range(width):
            part = padded[y : y + 3, x : x + 3]
            both = [
                ((part[..., c] * SOBEL).sum(), (part[..., c] * SOBEL.T).sum()) for c in range(3)
            ]
            dx[y, x], dy[y, x] = max(both, key=lambda pair: abs(pair[0]) + abs(pair[1]))
    size = np.pad(abs(dx) + abs(dy), 1)
    weak = np.zeros((height, width), bool)
    for y in range(height):
        for x in range(width):
            own = size[y + 1, x + 1]
            slope = abs(dy[y, x]) / max(abs(dx[y, x]), 1e-9)
            if slope < np.tan(np.pi / 8):
                ridge = own > size[y + 1, x] and own >= size[y + 1, x + 2]
            elif slope > np.tan(3 * np.pi / 8):
                ridge = own > size[y, x + 1] and own >= size[y + 2, x + 1]
            else:
                side = -1 if (dx[y, x] < 0) != (dy[y, x] < 0) else 1
                ridge = own > size[y, x + 1 - side] and own > size[y + 2, x + 1 + side]
            weak[y, x] = ridge and own > low
    found = weak & (size[1:-1, 1:-1] > high)
    while True:
        around = np.pad(found, 1)
        near = sum(around[y : y + height, x : x + width] for y in range(3) for x in range(3)) > 0
        grown = weak & near
        if (grown == found).all():
            return found
        found = grown


def test_edges_are_canny_s():
    image = picture()
    for low, high in ((100, 200), (20, 60), (200, 100)):
        expected = edges_of(np.asarray(image), min(low, high), max(low, high))
        found = canny(image, low, high)
        assert (found.mode, found.size) == ("RGB", image.size)
        assert 40 < expected.sum() < 600
        np.testing.assert_array_equal(np.asarray(found)[..., 0] == 255, expected)


def test_what_is_even_has_none():
    assert not np.asarray(canny(Image.new("L", (16, 16), 90), 100, 200)).any()
