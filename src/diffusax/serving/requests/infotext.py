"""Writes settings as text into images and reads them back, in stable-diffusion-webui's form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffusax.boundary.convert import Mismatch, convert
from diffusax.infotext import text as infotext
from diffusax.infotext.files import texts_of
from diffusax.infotext.others import webui_text
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import (
    EDIT,
    FIELDS,
    INPAINT,
    TEXT,
    Generation,
    settings_of,
)

_LONGEST, _LONGEST_OWN = 100_000, 1_000_000
"""The most characters of a text, and of one that diffusax wrote; a file may hold millions."""


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """What a file says of its image."""

    settings: dict[str, Any]
    """The fields of `Generation` that it states."""
    left_out: list[str]
    """What it states and the fields lack, such as "Variation seed: 5"."""
    text: str
    """The settings as webui writes them."""


def write_infotext(generation: Generation, seed: int, more: Mapping[str, Any] | None = None) -> str:
    """Returns the text `parameters` for the file of one image.

    Args:
        generation: what was generated, with its model's values, as `Catalogue.check` returns it.
        seed: the image's own seed.
        more: further settings by webui's names.
    """
    task = generation.task
    fields = {**settings_of(generation), "seed": seed}
    del fields["num_images"]
    if task in (TEXT, EDIT):
        fields["strength"] = None
    if task != INPAINT:
        fields["mask_blur"] = None
    return infotext.write(fields, more)


def read_text(text: str) -> ImageSettings:
    """Reads a text `parameters`, of this server, of webui, or of a program with its form.

    LoRAs that webui's prompts name stay in the prompt. Lists as left out what has no field here,
    is out of its range or names an unknown sampler, and ControlNets, whose images the text lacks.

    Raises:
        Refused: the text is longer than any that diffusax writes.
    """
    own = f", {infotext.EXACT}: " in text[:_LONGEST_OWN]
    if len(text) > (_LONGEST_OWN if own else _LONGEST):
        raise Refused(
            f"image must have at most {_LONGEST} characters of settings (got {len(text)}); "
            "give them as fields",
            param="image",
        )
    found = infotext.read(text)
    settings: dict[str, Any] = {}
    left_out = list(found.left_out)
    for name, value in found.fields.items():
        if name == "controls" and isinstance(value, list):
            left_out += [f"ControlNet: {one.get('model')}" for one in value]
        elif name not in FIELDS:
            left_out += [f"{name}: {value}"]
        else:
            try:
                settings[name] = convert(value, FIELDS[name], strict=False)
            except Mismatch:
                left_out.append(found.stated.get(name, f"{name}: {value!r}"[:80]))
    return ImageSettings(settings, list(dict.fromkeys(left_out)), text)


def read_image(image: Any) -> ImageSettings:
    """Reads the settings in an image's file, whichever program wrote them.

    image: a PIL image that was opened from a file.

    Raises:
        Refused: the file says nothing of settings, or too much.
    """
    text = text_in(image)
    if not text:
        raise Refused(
            "image must have settings in its file, as diffusax, A1111's web UI, ComfyUI, InvokeAI, "
            "NovelAI and others write them; this one has none",
            param="image",
        )
    return read_text(text)


def text_in(image: Any) -> str:
    """Returns the settings in an image's file as webui writes them; "" where there are none."""
    return webui_text(texts_of(image), image.size)
