"""The functions of `diffusax.images.masks`, under the path that they had before."""

from diffusax.images.masks import *  # noqa: F403
