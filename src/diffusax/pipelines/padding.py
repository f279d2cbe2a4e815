"""Calls of several images with a power of two of them, so that other numbers compile nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import PIL.Image

from diffusax.pipelines.arguments import Call

_TEXTS = tuple(f"{prefix}prompt{end}" for prefix in ("", "negative_") for end in ("", "_2", "_3"))
_PICTURES = (
    *("prompt_embeds", "negative_prompt_embeds", "latents", "masked_image_latents"),
    *("pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    *("image", "image_reference", "mask_image", "control_image"),
    *("ip_adapter_image", "ip_adapter_image_embeds", "ip_adapter_masks"),
    *("negative_ip_adapter_image", "negative_ip_adapter_image_embeds"),
)
"""The arguments that may have an entry for each image."""


def padded(call: Call) -> tuple[Call, int | None]:
    """Returns a call with further images, up to a power of two, and how many are its own.

    These are the first ones, and what they are does not depend on the others. Each image has an
    entry of its own in the lists of prompts. A call that cannot have more is returned as it is,
    with None: one of a single image, with an array or a list for its pictures, with PyTorch's
    numbers, or with lists whose lengths do not fit.
    """
    n = len(call.prompt) if isinstance(call.prompt, list) else 1
    m = call.num_images_per_prompt or 1
    lists = {
        name: value for name in (*_TEXTS, "adapters") if _is_list(value := getattr(call, name))
    }
    seeds = call.seed if isinstance(call.seed, list) else None
    if (
        call.prompt is None
        or call.noise != "jax"
        or call.own_arguments
        or not all(_is_single(getattr(call, name)) for name in _PICTURES)
        or any(len(value) != n for value in lists.values())
        or (seeds is not None and len(seeds) != n * m)
        or n * m < 2
    ):
        return call, None
    size = 1 << (n * m - 1).bit_length()
    changes: dict[str, Any] = {"prompt": [call.prompt], **lists}
    for name, value in changes.items():
        one_each = [entry for entry in value for _ in range(m)]
        changes[name] = one_each + one_each[-1:] * (size - n * m)
    if seeds is not None:
        changes["seed"] = seeds + seeds[-1:] * (size - n * m)
    return dataclasses.replace(call, **changes, num_images_per_prompt=1), n * m


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_single(value: Any) -> bool:
    """Returns whether a value is one picture, which all images share, or none."""
    return value is None or isinstance(value, str | Path | PIL.Image.Image)
