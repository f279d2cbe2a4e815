"""LoRAs that a prompt names, as in A1111's web UI: `a cat <lora:style:0.8>`."""

import math
import re
from typing import Any

_TAG = re.compile(r"<lora:([^<>:]+)((?::[^<>:]*)*)>")


def read_tags(prompt: str) -> tuple[str, dict[str, Any]]:
    """Returns a prompt without its LoRAs, and their weights by name.

    `<lora:NAME>` has a weight of 1. `<lora:NAME:A>` has the weight A, and `<lora:NAME:A:B>` has A
    for the text encoders and B for the rest; these may also be given as `te=A` and `unet=B`
    (stable-diffusion-webui, extra_networks_lora.py).

    Raises:
        ValueError: a weight is no number, or a LoRA is named twice.
    """
    found: dict[str, Any] = {}

    def take(tag: re.Match[str]) -> str:
        name, weights = tag[1], tag[2].split(":")[1:]
        if name in found:
            raise ValueError(f"the prompt names the LoRA {name!r} twice")
        found[name] = _weight(tag[0], weights)
        return ""

    text = _TAG.sub(take, prompt)
    return (re.sub(r"  +", " ", text).strip(), found) if found else (prompt, {})


def _weight(tag: str, texts: list[str]) -> Any:
    named = dict(text.split("=", 1) for text in texts if "=" in text)
    given = [text for text in texts if "=" not in text]
    if len(given) > 2 or set(named) - {"te", "unet"}:
        raise ValueError(f"{tag} must have at most two weights, of the text encoders and the rest")
    first = _number(tag, named.get("te", given[0] if given else "1"))
    second = named.get("unet", given[1] if len(given) > 1 else None)
    if second is None and "te" not in named:
        return first
    unet = _number(tag, given[0] if given else "1") if second is None else _number(tag, second)
    encoders = dict.fromkeys(("text_encoder", "text_encoder_2"), first)
    return {"unet": unet, "transformer": unet, **encoders}


def _number(tag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{tag} must have a number as weight (got {text!r})")
    return value
