"""LoRAs and other extra networks that a prompt names, as in A1111: `a cat <lora:style:0.8>`.

And warnings of what else a prompt has of A1111's syntax, which is not read here.
"""

import functools
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_TAG = re.compile(r"<(\w+):([^>]+)>")
"""An extra network, as in stable-diffusion-webui's extra_networks.py."""
_LORA = ("lora", "lyco")
_ENCODERS = ("text_encoder", "text_encoder_2")
_DENOISERS = ("unet", "transformer")
_KEYWORDS = ("te", "unet")
_MOST = 100.0
"""The largest weight of a LoRA."""
_DYNAMIC = (
    (re.compile(r"\{[^{}]*\|[^{}]*\}"), "choices"),
    (re.compile(r"(?<!\w)__[\w/*-]*\w[\w/*-]*__(?!\w)"), "wildcards"),
)
"""The syntax of the extension sd-dynamic-prompts."""


def read_tags(prompt: str) -> tuple[str, dict[str, Any]]:
    """Returns a prompt without its extra networks, and the weights of its LoRAs by name.

    `<lora:NAME>` has a weight of 1. `<lora:NAME:A>` has the weight A, and `<lora:NAME:A:B>` has A
    for the text encoders and B for the rest; these may also be given as `te=A` and `unet=B`, of
    which `unet` is what `te` is where it is missing. The weights of a LoRA that is named twice are
    added, and `lyco` is another word for `lora` (stable-diffusion-webui, extra_networks_lora.py).
    Other extra networks, such as `<hypernet:NAME:1>`, are cut out; see `unread_tags`.

    Raises:
        ValueError: a LoRA has no name, or a weight that is no number from -100 to 100.
    """
    found: dict[str, Any] = {}

    def take(tag: re.Match[str]) -> str:
        if tag[1] in _LORA:
            name, weight = _lora(tag[0], tag[2].split(":"))
            found[name] = add_weights(found[name], weight) if name in found else weight
        return ""

    text, count = _TAG.subn(take, prompt)
    return (re.sub(r"  +", " ", text).strip() if count else prompt), found


def unread_tags(prompt: str) -> list[str]:
    """Returns what of a prompt's extra networks `read_tags` does not apply, as it is written."""
    found = []
    for tag in _TAG.finditer(prompt):
        if tag[1] not in _LORA:
            found.append(tag[0])
            continue
        found += [f"{word} of {tag[0]}" for word in _named(tag[2].split(":")) - {*_KEYWORDS, "dyn"}]
    return found


def add_weights(first: Any, second: Any) -> Any:
    """Returns the sum of two weights of a LoRA: numbers, or numbers by component."""
    if not isinstance(first, Mapping) and not isinstance(second, Mapping):
        return first + second

    def of(weight: Any, name: str) -> float:
        own: float = weight[name] if isinstance(weight, Mapping) else weight
        return own

    named = first if isinstance(first, Mapping) else second
    return {name: of(first, name) + of(second, name) for name in named}


def _lora(tag: str, items: list[str]) -> tuple[str, Any]:
    """Returns the name and the weight that a tag gives a LoRA."""
    named = {word: item.partition("=")[2] for item in items for word in _named([item])}
    name, *given = [item for item in items if not _named([item])] or [""]
    if not name.strip():
        raise ValueError(f"{tag} must have the name of a LoRA")
    if len(given) > 2 or "dyn" in named:
        raise ValueError(
            f"{tag} must have at most two weights, of the text encoders and the rest; there are no "
            "dynamic ranks"
        )
    te = _number(tag, named.get("te", given[0] if given else "1"))
    unet = _number(tag, named.get("unet", given[1] if len(given) > 1 else str(te)))
    if te == unet:
        return name.strip(), te
    return name.strip(), {**dict.fromkeys(_DENOISERS, unet), **dict.fromkeys(_ENCODERS, te)}


def _named(items: list[str]) -> set[str]:
    """Returns the keywords among the items of a tag."""
    pairs = (item.split("=") for item in items)
    return {pair[0].strip() for pair in pairs if len(pair) == 2}


def _number(tag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _MOST:
        raise ValueError(
            f"{tag} must have a number from -{_MOST:g} to {_MOST:g} as weight (got {text!r})"
        )
    return value


def prompt_warnings(prompt: str, negative_prompt: str = "") -> tuple[str, ...]:
    """Returns a sentence for everything in a prompt that is not applied as A1111's users mean it.

    Raises:
        ValueError: a tag of a LoRA cannot be read.
    """
    found = [
        f"the prompt names {tag}, which is left out, as nothing here applies it"
        for tag in unread_tags(prompt)
    ]
    for name, text in (("prompt", read_tags(prompt)[0]), ("negative prompt", negative_prompt)):
        for pattern, kind in _DYNAMIC:
            if match := pattern.search(text):
                found.append(
                    f"the {name} has {_shortened(match[0])}, which is read as words, as there are "
                    f"no {kind} here"
                )
    found += [
        f"the negative prompt names {_shortened(tag)}, which is read as words, as in A1111; write "
        "it into the prompt"
        for tag in re.findall(r"<(?:lora|lyco):[^>]+>", negative_prompt)
    ]
    return tuple(dict.fromkeys(found))


def log_prompt_warnings(prompt: str) -> None:
    """Logs the warnings of a prompt, the same one once.

    Raises:
        ValueError: a tag of a LoRA cannot be read.
    """
    for sentence in prompt_warnings(prompt):
        _warn(sentence)


@functools.lru_cache(1024)
def _warn(sentence: str) -> None:
    logger.warning("%s", sentence)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
