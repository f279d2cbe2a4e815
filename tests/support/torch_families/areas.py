"""Pipelines that scale pictures to a fixed size are made to use a small one."""

import functools
import sys
from typing import Any

AREA = 64 * 64


def small_area(pipe: Any) -> None:
    """Makes the module of the pipeline's class scale to 64x64 whatever area it asks for."""
    module = sys.modules[type(pipe).__module__]
    original = module.calculate_dimensions
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def calculate_dimensions(area: int, ratio: float) -> Any:
        return original(AREA, ratio)

    module.calculate_dimensions = calculate_dimensions


def small_sample(pipe: Any) -> None:
    """Sets the size in latents that pictures are scaled to, 128 otherwise."""
    pipe.default_sample_size = 8


def small_resolution(pipe: Any) -> None:
    """Sets the only resolution that the pipeline makes."""
    pipe.resolutions = [(64, 64)]


def small_buckets(pipe: Any) -> None:
    """Leaves one size of pictures to those that JoyImage's pipelines choose from."""
    from diffusers.pipelines.joyimage import image_processor

    image_processor.BUCKETS[1024] = [(64, 64)]
