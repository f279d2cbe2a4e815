"""What a prompt has of A1111's syntax that is not read here."""

import functools
import logging
import re

from diffusax.text.lora_tags import read_tags, unread_tags

logger = logging.getLogger(__name__)

_DYNAMIC = (
    (re.compile(r"\{[^{}]*\|[^{}]*\}"), "choices"),
    (re.compile(r"(?<!\w)__[\w/*-]*\w[\w/*-]*__(?!\w)"), "wildcards"),
)
"""The syntax of the extension sd-dynamic-prompts."""


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
