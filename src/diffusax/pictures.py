"""The functions of `diffusax.images.pictures`, under the path that they had before."""

from diffusax.images.pictures import *  # noqa: F403
