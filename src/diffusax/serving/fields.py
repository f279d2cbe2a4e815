"""The types and ranges of a drawing's fields."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from diffusax.serving.drawing import Drawing
from diffusax.serving.errors import Refused
from diffusax.typed.convert import Words, convert_fields, in_words, shortened
from diffusax.typed.options import Seed
from diffusax.typed.ranges import Count, Fraction, Pixels, Scale, Steps

Blur = Annotated[float, Meta(ge=0, le=1024)]
Padding = Annotated[int, Meta(ge=0, le=32_768)]
Layers = Annotated[int, Meta(ge=0, le=100)]

FIELDS: Mapping[str, Any] = {
    "prompt": str,
    "negative_prompt": str,
    "model": str,
    "width": Pixels | None,
    "height": Pixels | None,
    "num_inference_steps": Steps | None,
    "guidance_scale": Scale | None,
    "image_guidance_scale": Scale | None,
    "guidance_rescale": Fraction,
    "sampler": str | None,
    "seed": Seed | None,
    "num_images": Count,
    "strength": Fraction | None,
    "mask_blur": Blur,
    "padding_mask_crop": Padding | None,
    "clip_skip": Layers | None,
    "prompt_weighting": bool,
    "long_prompt": bool,
    "adapters": dict[str, Scale],
}
"""The types of the fields that are no images, by name."""
_CONTROL: Mapping[str, Any] = {"model": str, "scale": Scale, "start": Fraction, "end": Fraction}
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict[str, Scale]: "weights by name",
    type(None): "nothing",
}
_WORDS = Words("{where}{name} must be {must} (got {value})", (in_words(_NAMES),), shortened)


def typed(drawing: Drawing) -> Drawing:
    """Returns a drawing whose fields have their types.

    Raises:
        Refused: one has another type or is out of its range; names it, its value and what is valid.
    """
    fields = _converted(FIELDS, drawing, "", None)
    controls = tuple(
        dataclasses.replace(control, **_converted(_CONTROL, control, "controls: ", "controls"))
        for control in drawing.controls
    )
    return dataclasses.replace(drawing, **fields, controls=controls)


def _converted(
    hints: Mapping[str, Any], given: Any, where: str, param: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in hints:
        value = getattr(given, name)
        values = {name: dict(value) if isinstance(value, Mapping) else value}
        try:
            found |= convert_fields(hints, values, _WORDS, where=where)
        except ValueError as error:
            raise Refused(str(error), param=param or name) from None
    return found
