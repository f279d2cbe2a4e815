"""Images as the Flax pipelines take them: n c h w, with sides that are multiples of pixels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image


def to_unit_arrays(images: Any, multiple: int) -> jax.Array:
    """Converts PIL images of one size to n 3 h w in [0, 1], resized to sides that are multiples.

    Raises:
        ValueError: they are neither a PIL image nor a list of them.
    """
    resized = [_resized(image.convert("RGB"), multiple) for image in listed(images, "image")]
    return jnp.stack([np.asarray(image, np.float32) / 255 for image in resized]).transpose(
        0, 3, 1, 2
    )


def masks(images: Any, multiple: int) -> jax.Array:
    """Converts PIL images to masks n 1 h w, one where an image is lighter than grey, else zero.

    They are resized as by `to_unit_arrays`, and raise the same errors.
    """
    resized = [
        _resized(image, multiple, Image.Resampling.BICUBIC).convert("L")
        for image in listed(images, "mask")
    ]
    grey = jnp.stack([np.asarray(image, np.float32) / 255 for image in resized])
    return (grey[:, None] >= 0.5).astype(jnp.float32)


def listed(images: Any, name: str) -> list[Image.Image]:
    """Returns one PIL image or a list of them as a list.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(images, Image.Image):
        return [images]
    if not isinstance(images, list):
        raise ValueError(
            f"{name} has to be of type `PIL.Image.Image` or list but is {type(images)}"
        )
    return images


def _resized(
    image: Image.Image, multiple: int, filter: Any = Image.Resampling.LANCZOS
) -> Image.Image:
    width, height = (side - side % multiple for side in image.size)
    return image.resize((width, height), resample=filter)
