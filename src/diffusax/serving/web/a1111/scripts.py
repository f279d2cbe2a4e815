"""The scripts that A1111's calls name: ControlNets and their maps, and what is read over."""

import dataclasses
import re
from typing import Any

from PIL import Image, ImageOps

from diffusax.images.conversion import resize
from diffusax.images.edges import canny
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Control
from diffusax.serving.web.a1111.fields import ControlUnit, Preprocessing
from diffusax.serving.web.bodies import as_rgb, image_from_base64
from diffusax.serving.web.fields import read_fields
from diffusax.serving.web.security import WebSettings, check_most

_NAMES = ("controlnet",)
_OF_THE_PAGE = (
    *("comments", "extra options", "refiner", "sampler", "seed", "api payload"),
    "never oom integrated",
)
"""A1111's own scripts whose arguments only its page fills in; its API reads them over."""
_READ_OVER = ("adetailer", "hypertile", "soft inpainting")
"""Scripts that change images a little, and are read over with a warning."""
MODULES = ("none", "canny", "invert")
"""The preprocessors that are here."""
_LEAST_SIDE, _USUAL_SIDE, _THRESHOLDS = 64, 512, (100.0, 200.0)
"""Below the first, the resolution is the second; and canny's thresholds where none are given."""
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
        elif _asks(args) and name.lower() not in (*_OF_THE_PAGE, *_READ_OVER):
            raise Refused(
                f"alwayson_scripts has {name[:60]!r}, which is not here; there is ControlNet",
                param="alwayson_scripts",
            )
    return tuple(unit for unit in found if unit is not None)


def script_warnings(scripts: dict[str, Any]) -> list[str]:
    """Returns a sentence for each script that a call asks for and that is read over."""
    asked = [
        name
        for name, script in scripts.items()
        if name.lower() in _READ_OVER
        and _asks(script.get("args") if isinstance(script, dict) else script)
    ]
    return [f"alwayson_scripts: {name} is read over, as it is not here" for name in asked]


def fit(controls: tuple[tuple[Control, str], ...], width: int, height: int) -> tuple[Control, ...]:
    """Resizes the images of ControlNets to the size to generate."""
    return tuple(
        dataclasses.replace(control, image=resize(control.image, height, width, mode))
        for control, mode in controls
    )


def _asks(args: Any) -> bool:
    """Returns whether a script is asked for; some clients send every script, with False."""
    if isinstance(args, list):
        # Most begin with whether they are on.
        return args[:1] != [False] and any(map(_asks, args))
    if isinstance(args, dict):
        flags = [value for value in args.values() if isinstance(value, bool)]
        return bool(args) and bool(args.get("enabled", any(flags) or not flags))
    return bool(args)


def module_of(name: str | None, param: str) -> str:
    """Returns the preprocessor of a name, one of MODULES.

    Raises:
        Refused: it is not here.
    """
    plain = (name or "none").lower()
    plain = "invert" if plain.startswith("invert") else plain
    if plain not in MODULES:
        raise Refused(
            f"{param} must be one of {', '.join(MODULES)} (got {str(name)[:60]!r}), as there are "
            "no networks for others; send the map that the ControlNet reads, with the module none",
            param=param,
            code="not_supported",
        )
    return plain


def preprocess(image: Image.Image, module: str, settings: Preprocessing) -> Image.Image:
    """Returns the map that a ControlNet reads of an image, of about the image's proportions.

    Source: sd-webui-controlnet, annotator/util.py, resize_image.

    Args:
        image: the image, RGB.
        module: one of MODULES.
        settings: the resolution of the map's shorter side, and canny's thresholds.
    """
    if module == "none":
        return image
    if module == "invert":
        return ImageOps.invert(image)
    side = settings.processor_res if settings.processor_res >= _LEAST_SIDE else _USUAL_SIDE
    scale = side / min(image.size)
    width, height = (max(round(one * scale / 64), 1) * 64 for one in image.size)
    kind = Image.Resampling.LANCZOS if scale > 1 else Image.Resampling.BOX
    low, high = (
        usual if given < 0 else given
        for given, usual in zip((settings.threshold_a, settings.threshold_b), _THRESHOLDS)
    )
    return canny(image.resize((width, height), kind), low, high)


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
    module = module_of(fields.module, f"{place}.module")
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
        image=preprocess(as_rgb(image, f"{place}.image"), module, fields),
        scale=fields.weight,
        start=fields.guidance_start,
        end=fields.guidance_end,
    )
    return control, mode
