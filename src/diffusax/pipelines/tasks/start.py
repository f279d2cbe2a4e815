"""Checks the number and size of a call's images, and whether the networks fit them."""

import jax
import numpy as np

from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.prompts import count_prompts
from diffusax.runtime.devices.memory import host_memory


def count_images(call: Call) -> int:
    """Returns the number of images that the call generates."""
    return count_prompts(call) * (call.num_images_per_prompt or 1)


def image_size(c: Components, call: Call) -> tuple[int, int]:
    """Returns height and width in pixels, by default those of the family, see `default_size`.

    Raises:
        ValueError: one is not a multiple of the autoencoder's factor, or of a token's size.
    """
    own, factor = c.family.default_size, c.latents.multiple
    size = call.height or 0, call.width or 0
    if not all(size):
        height, width = c.default_size if own is None else own(c, call)
        size = call.height or height, call.width or width
    for name, value in zip(("height", "width"), size):
        if value < factor or value % factor:
            low = max(value // factor, 1) * factor
            raise ValueError(
                f"{name} must be divisible by {factor} (got {value}); use {low} or {low + factor}"
            )
    _check_memory(c, count_images(call), *size)
    return size


def pixel_range(c: Components) -> tuple[int, int] | None:
    """Returns the pixels between which a model generates well: a quarter to four times its own.

    None for networks without a size of their own, which were trained at many.
    """
    network = c.models[c.denoiser.components[0]]
    if getattr(network.config, "sample_size", None) is None:
        return None
    height, width = c.default_size
    return height * width // 4 + 1, height * width * 4 - 1


def size_warning(c: Components, height: int | None, width: int | None) -> str | None:
    """Returns a sentence about a size at which the model generates poor images, or None."""
    bounds, own = pixel_range(c), c.default_size
    height, width = height or own[0], width or own[1]
    if bounds is None or bounds[0] <= height * width <= bounds[1]:
        return None
    return (
        f"the model was trained on images of {own[1]}x{own[0]}, and those of {width}x{height} may "
        "be poor; choose a width and a height nearer to its own"
    )


def _check_memory(c: Components, b: int, height: int, width: int) -> None:
    """Raises ValueError for images that exceed the memory of a CPU, before any program runs."""
    if jax.default_backend() != "cpu" or (total := host_memory()) is None:
        return
    # The decoder's last level, its input and output in float32: a lower bound.
    config = getattr(c.models.get(c.autoencoder_name or ""), "config", None)
    channels = getattr(config, "block_out_channels", (64,))[0]
    needed = b * height * width * channels * 8
    if needed > total:
        raise ValueError(
            f"{b} pictures of {height}x{width} need more than {needed / 1e9:.0f} GB of memory at "
            f"once, and this machine has {total / 1e9:.0f} GB; draw fewer or smaller ones at a time"
        )


def pixel_size(c: Components, pixels: np.ndarray) -> tuple[int, int]:
    """Returns height and width in pixels of images, or of the images that latents represent."""
    _, height, width, _ = pixels.shape
    factor = c.latents.factor if are_latents(pixels) else 1
    return height * factor, width * factor


def are_latents(pixels: np.ndarray) -> bool:
    """Returns whether the result of `to_pixels` is latents instead of images."""
    return pixels.shape[-1] != 3


def require_channels(c: Components, expected: int, task: str) -> None:
    """Raises ValueError unless the denoiser has the input channels that the task feeds."""
    actual = c.denoiser.in_channels
    if actual == expected:
        return
    latent = c.latents.channels
    made_for = {
        latent: "text to image",
        2 * latent + 1: "inpainting",
        2 * latent: "InstructPix2Pix",
    }
    hint = f"; it is made for {made_for[actual]}" if actual in made_for else ""
    name = c.denoiser.components[0]
    raise ValueError(f"{task} needs a {name} with {expected} input channels (got {actual}){hint}")
