"""Settings of drawings as stable-diffusion-webui writes them into PNG files, both directions."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from diffusax.parameters import parameters_text, webui_clip_skip
from diffusax.serving.drawing import EDIT, INPAINT, TEXT, Control, Drawing
from diffusax.serving.errors import Refused
from diffusax.serving.fields import FIELDS
from diffusax.serving.samplers import from_webui, to_webui
from diffusax.typed.convert import Mismatch, convert

_SETTING = re.compile(r'(\w[\w \-/]{1,60}):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
"""A setting in the last line, as in webui's infotext_utils.py, but names are bounded: without that,
a line without a colon takes time that grows with the square of its length."""
_LONGEST = 100_000
"""The most characters of a text; a file may hold millions."""
_FEWEST = 3
"""A last line of fewer settings belongs to the prompt, as there."""
_NEGATIVE = "Negative prompt:"
_NUMBERS = {
    "Steps": "num_inference_steps",
    "CFG scale": "guidance_scale",
    "Image CFG scale": "image_guidance_scale",
    "CFG rescale": "guidance_rescale",
    "Seed": "seed",
    "Denoising strength": "strength",
    "Strength rule": "strength_rule",
    "Eta DDIM": "eta",
    "Mask blur": "mask_blur",
    "Masked area padding": "padding_mask_crop",
}
"""Fields of drawings by webui's names for them."""


def write_infotext(drawing: Drawing, seed: int, more: Mapping[str, Any] | None = None) -> str:
    """Returns the text `parameters` for the file of one image.

    Args:
        drawing: the drawing with all values that its model gives, as `Catalogue.check` returns it.
        seed: the image's own seed.
        more: further settings by webui's names, such as those of a second pass.
    """
    sampler, schedule = to_webui(drawing.sampler or "")
    task = drawing.task
    settings = {
        "Steps": drawing.num_inference_steps,
        "Sampler": sampler or None,
        "Schedule type": schedule,
        "CFG scale": _number(drawing.guidance_scale),
        "Image CFG scale": _number(drawing.image_guidance_scale),
        "CFG rescale": _number(drawing.guidance_rescale or None),
        "Seed": seed,
        "Size": f"{drawing.width}x{drawing.height}",
        "Model": drawing.model or None,
        "Denoising strength": None if task in (TEXT, EDIT) else _number(drawing.strength),
        "Strength rule": None if task in (TEXT, EDIT) else _rule(drawing),
        "Eta DDIM": _number(drawing.eta or None),
        "Clip skip": webui_clip_skip(drawing.clip_skip),
        "Mask blur": _number(drawing.mask_blur) if task == INPAINT else None,
        "Inpaint area": None if drawing.padding_mask_crop is None else "Only masked",
        "Masked area padding": drawing.padding_mask_crop,
        "Prompt weighting": None if drawing.prompt_weighting else False,
        "Long prompt": None if drawing.long_prompt else False,
        "RNG": "jax",
    }
    settings |= more or {}
    settings |= {f"ControlNet {i}": _control(c) for i, c in enumerate(drawing.controls)}
    tags = "".join(f" <lora:{name}:{weight:g}>" for name, weight in drawing.adapters.items())
    return parameters_text(f"{drawing.prompt}{tags}".strip(), drawing.negative_prompt, settings)


def read_infotext(text: str) -> dict[str, Any]:
    """Reads the fields of `Drawing` from a text `parameters`, of this server or of webui.

    The adapters stay in the prompt. What has no field here, is out of its range or names an unknown
    sampler is left out, and so are ControlNets, whose images the text does not hold.

    Raises:
        Refused: the text is longer than any drawing's.
    """
    if len(text) > _LONGEST:
        raise Refused(
            f"image must have at most {_LONGEST} characters of settings (got {len(text)}); "
            "give them as fields",
            param="image",
        )
    *lines, last = text.strip().split("\n")
    found = dict(_settings(last))
    if len(found) < _FEWEST:
        lines, found = [*lines, last], {}
    begin = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    negative = "\n".join(lines[begin:]).removeprefix(_NEGATIVE)
    fields: dict[str, Any] = {
        "prompt": "\n".join(lines[:begin]).strip(),
        "negative_prompt": negative.strip(),
        **{field: found.get(name) for name, field in _NUMBERS.items()},
        "model": found.get("Model"),
        "sampler": _sampler(found),
        "prompt_weighting": found.get("Prompt weighting"),
        "long_prompt": found.get("Long prompt"),
    }
    if size := re.fullmatch(r"(\d{1,6})x(\d{1,6})", found.get("Size", "")):
        fields |= {"width": size[1], "height": size[2]}
    if found.get("Clip skip", "").isdecimal():
        # There, 1 leaves no layer out.
        fields["clip_skip"] = str(int(found["Clip skip"][:4]) - 1)
    given = {name: _typed(name, value) for name, value in fields.items()}
    return {name: value for name, value in given.items() if value is not None}


def read_settings(image: Any) -> dict[str, Any]:
    """Reads the fields of `Drawing` from an image's file.

    image: a PIL image that was opened from a PNG file.

    Raises:
        Refused: the file says nothing of settings, or too much.
    """
    text = getattr(image, "text", {}).get("parameters")
    if not text:
        raise Refused(
            "image must be a PNG file with settings in its text 'parameters'; this one has none",
            param="image",
        )
    return read_infotext(text)


def _settings(line: str) -> Iterator[tuple[str, str]]:
    for name, value in _SETTING.findall(line):
        if value.startswith('"'):
            with contextlib.suppress(ValueError):
                value = str(json.loads(value))
        yield name, value.strip()


def _sampler(found: Mapping[str, str]) -> str | None:
    with contextlib.suppress(Refused):
        if "Sampler" in found:
            return from_webui(found["Sampler"], found.get("Schedule type"))
    return None


def _typed(name: str, value: Any) -> Any:
    """Returns a field's value in its type; None where it has none, or not that type."""
    try:
        return None if value is None else convert(value, FIELDS[name], strict=False)
    except Mismatch:
        return None


def _rule(drawing: Drawing) -> str | None:
    """Returns the name of a rule that is not diffusers'."""
    return None if drawing.strength_rule == "diffusers" else drawing.strength_rule


def _number(value: float | None) -> str | None:
    """Writes a number as webui does: 7 and 7.5, not 7.0."""
    return None if value is None else f"{value:.10g}"


def _control(control: Control) -> str:
    """Writes a ControlNet as webui's extension does."""
    return (
        f"Model: {control.model}, Weight: {control.scale:g}, Guidance Start: {control.start:g}, "
        f"Guidance End: {control.end:g}"
    )
