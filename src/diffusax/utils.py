"""Functions that diffusers' users import from `diffusers.utils`; they are defined elsewhere."""

from diffusax.pictures import load_image
from diffusax.sheets import make_image_grid

__all__ = ["load_image", "make_image_grid"]
