"""The functions of `diffusax.images.conversion`, under the path that they had before."""

from diffusax.images.conversion import *  # noqa: F403
