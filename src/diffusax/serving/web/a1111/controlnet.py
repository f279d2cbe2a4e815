"""ControlNet units of `alwayson_scripts`, in the form of A1111's extension."""

import dataclasses
import re
from typing import Any

from PIL import Image

from diffusax.images.conversion import resize
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Control
from diffusax.serving.web.a1111.fields import ControlUnit
from diffusax.serving.web.fields import read_fields
from diffusax.serving.web.images import as_rgb, image_from_base64
from diffusax.serving.web.settings import WebSettings, check_most

_NAMES = ("controlnet",)
_BALANCED = (0, None, "Balanced", "balanced")
_RESIZE = {0: "default", "Just Resize": "default", "Scale to Fit (Inner Fit)": "crop"}
_RESIZE |= {1: "crop", "Crop and Resize": "crop", 2: "fill", "Resize and Fill": "fill"}


def read_controls(
    scripts: dict[str, Any], settings: WebSettings, own: Image.Image | None = None
) -> tuple[tuple[Control, str], ...]:
    """Returns the ControlNets that scripts name, each with the way to resize its image.

    Arguments:
        scripts: the request's alwayson_scripts.
        settings: the most ControlNets, and the most pixels of an image.
        own: the image for units without one.

    Raises:
        Refused: a unit asks for a preprocessor, or for what the pipelines lack; or another script
            is asked for.
    """
    found = []
    for name, script in scripts.items():
        args = script.get("args") if isinstance(script, dict) else script
        if name.lower() in _NAMES:
            units = args if isinstance(args, list) else []
            check_most("alwayson_scripts", len(units), settings.most_controls, "ControlNets")
            most = settings.most_pixels
            found += [_read(unit, i, most, own) for i, unit in enumerate(units)]
        elif _asks(args):
            raise Refused(
                f"alwayson_scripts has {name[:60]!r}, which is not here; there is ControlNet",
                param="alwayson_scripts",
            )
    return tuple(unit for unit in found if unit is not None)


def fit(controls: tuple[tuple[Control, str], ...], width: int, height: int) -> tuple[Control, ...]:
    """Resizes the images of ControlNets to the size to generate."""
    return tuple(
        dataclasses.replace(control, image=resize(control.image, height, width, mode))
        for control, mode in controls
    )


def _asks(args: Any) -> bool:
    """Returns whether a script is asked for; some clients send every script, with False."""
    if isinstance(args, list):
        return any(map(_asks, args))
    if isinstance(args, dict):
        return bool(args) and args.get("enabled", True) is not False
    return bool(args)


def _read(
    unit: Any, index: int, most_pixels: int, own: Image.Image | None
) -> tuple[Control, str] | None:
    place = f"alwayson_scripts.ControlNet.args[{index}]"
    if not isinstance(unit, dict):
        if not unit:
            return None
        raise Refused(f"{place} must be an object (got {type(unit).__name__})", param=place)
    fields = read_fields(ControlUnit, unit, strict=False, tolerant=True)
    if not fields.enabled or fields.model in (None, "", "None", "none"):
        return None
    if fields.module not in (None, "", "None", "none"):
        raise Refused(
            f'{place}.module must be "none" (got {fields.module[:60]!r}); send the map that the '
            "ControlNet reads, as there are no preprocessors",
            param=place,
        )
    if fields.control_mode not in _BALANCED:
        raise Refused(
            f'{place}.control_mode must be "Balanced" (got {str(fields.control_mode)[:60]!r})',
            param=place,
        )
    mode = _RESIZE.get(fields.resize_mode) if isinstance(fields.resize_mode, int | str) else None
    if mode is None:
        known = ", ".join(name for name in _RESIZE if isinstance(name, str))
        got = str(fields.resize_mode)[:60]
        raise Refused(f"{place}.resize_mode must be one of {known} (got {got!r})", param=place)
    value = fields.image or fields.input_image
    value = value.get("image") if isinstance(value, dict) else value
    image = image_from_base64(value, f"{place}.image", most_pixels) if value else own
    if image is None:
        raise Refused(f"{place}.image must be given", param=place)
    # The extension writes a hash behind the name.
    model = re.sub(r" \[[0-9a-f]+\]$", "", fields.model)
    control = Control(
        model=model,
        image=as_rgb(image, f"{place}.image"),
        scale=fields.weight,
        start=fields.guidance_start,
        end=fields.guidance_end,
    )
    return control, mode
