"""The edges of a picture, which steer the ControlNet inside the package."""

import numpy as np
from PIL import Image, ImageFilter

SHARPEST = 40
"""From which step of brightness on, of 255, there is an edge."""


def edges(picture: Image.Image) -> Image.Image:
    """White lines on black where the brightness changes."""
    found = np.array(picture.convert("L").filter(ImageFilter.FIND_EDGES)) > SHARPEST
    found[[0, -1]] = found[:, [0, -1]] = False
    return Image.fromarray(np.uint8(found) * 255).convert("RGB")
