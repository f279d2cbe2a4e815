"""The settings of an image as text, in the form that stable-diffusion-webui writes into PNGs."""

import json
from collections.abc import Mapping
from typing import Any

from diffusax._version import __version__
from diffusax.printable import escaped


def parameters_text(prompt: str, negative_prompt: str | None, settings: Mapping[str, Any]) -> str:
    """Returns what image tools read: the prompt, the negative prompt, and a line of settings.

    Arguments:
        prompt: the prompt of the image.
        negative_prompt: the negative prompt, which is left out where it is empty.
        settings: values by webui's names for them; those that are None are left out.
    """
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    texts = {name: escaped(value) for name, value in settings.items() if value is not None}
    texts["Version"] = f"diffusax {__version__}"
    lines.append(", ".join(f"{name}: {_quoted(text)}" for name, text in texts.items()))
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # webui quotes values that would otherwise end the setting.
    return json.dumps(text) if {*text} & {",", ":"} else text


def webui_clip_skip(clip_skip: int | None) -> int | None:
    """Returns "Clip skip" as webui counts it: 1 leaves out no layer, where diffusers says 0."""
    return None if clip_skip is None else clip_skip + 1
