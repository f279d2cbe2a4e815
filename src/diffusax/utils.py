"""Functions that diffusers' users import from `diffusers.utils`; they are defined elsewhere."""

from diffusax.images.reading import load_image
from diffusax.images.sheets import make_image_grid

__all__ = ["load_image", "make_image_grid"]
