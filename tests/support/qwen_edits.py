"""Qwen-Image-Edit's pipelines with small images, as their own are of about a megapixel."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import diffusers
from PIL import Image

from diffusax.images import references
from diffusax.pipelines.families import qwen_image_edit
from support.pairs import picture

EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
SMALLER = 100
"""What areas are divided by."""


def make_areas_smaller(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes the pipelines here and in diffusers bring images to small areas.

    put: sets an attribute of a module, such as pytest's monkeypatch.setattr.
    """

    def size_of_area(width: int, height: int, area: int) -> tuple[int, int]:
        return references.size_of_area(width, height, area // SMALLER)

    def of_area(image: Any, area: int) -> Image.Image:
        return references.of_area(image, area // SMALLER)

    put(qwen_image_edit, "size_of_area", size_of_area)
    put(qwen_image_edit, "of_area", of_area)
    for kind in (EDIT, PLUS):
        place = sys.modules[getattr(diffusers, kind).__module__]
        put(place, "calculate_dimensions", functools.partial(_smaller, place.calculate_dimensions))


def _smaller(theirs: Callable[..., Any], area: int, ratio: float) -> Any:
    return theirs(area // SMALLER, ratio)


def with_positions(pipe: Any) -> Any:
    """The pipeline of diffusers, whose text encoder is told which tokens are an image's.

    transformers 4, with which the networks were trained, found it out by itself.
    """
    reader = pipe.text_encoder
    forward = reader.forward

    @functools.wraps(forward)
    def told(input_ids: Any = None, **options: Any) -> Any:
        types = (input_ids == reader.config.image_token_id).int()
        return forward(input_ids=input_ids, mm_token_type_ids=types, **options)

    reader.forward = told
    return pipe


def images(count: int) -> list[Image.Image]:
    """Images of odd sizes."""
    return [picture(i, *size) for i, size in enumerate([(70, 50), (40, 90), (33, 33)])][:count]
