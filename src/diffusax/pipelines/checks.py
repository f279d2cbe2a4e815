"""What a call may ask for; each mistake is one sentence that names the argument and the mend."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_size(height: int, width: int, factor: int) -> None:
    """Raises ValueError unless both are positive multiples of the autoencoder's factor."""
    for name, value in (("height", height), ("width", width)):
        if value < factor or value % factor:
            low = max(value // factor, 1) * factor
            raise ValueError(
                f"{name} must be divisible by {factor} (got {value}); use {low} or {low + factor}"
            )


def as_list(name: str, prompt: str | Sequence[str]) -> list[str]:
    """A prompt or prompts as a list.

    Raises:
        ValueError: neither a string nor a list of strings, or empty.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not all(isinstance(p, str) for p in prompts):
        raise ValueError(
            f"{name} must be a string or a list of strings (got {type(prompt).__name__})"
        )
    if not prompts:
        raise ValueError(f"{name} is an empty list; give at least one prompt")
    return list(prompts)


def check_prompts(prompt: Any, prompt_embeds: Any, negative: Any, negative_embeds: Any) -> None:
    """Raises ValueError unless each of the two prompts is given one way, the first at all."""
    if prompt is None and prompt_embeds is None:
        raise ValueError("prompt or prompt_embeds must be given")
    if prompt is not None and prompt_embeds is not None:
        raise ValueError("only one of prompt and prompt_embeds can be given")
    if negative is not None and negative_embeds is not None:
        raise ValueError("only one of negative_prompt and negative_prompt_embeds can be given")


def match_length(name: str, values: list[str], n: int) -> list[str]:
    """`values` for n prompts: one value serves all.

    Raises:
        ValueError: neither one nor n.
    """
    if len(values) not in (1, n):
        raise ValueError(f"{name} has {len(values)} entries for {n} prompts; give 1 or {n}")
    return values * n if len(values) == 1 else values


def check_embeds(name: str, embeds: Any, dim: int) -> np.ndarray:
    """The embeddings, n t d.

    Raises:
        ValueError: another shape.
    """
    if getattr(embeds, "ndim", 0) != 3 or embeds.shape[-1] != dim:
        raise ValueError(
            f"{name} must have shape (prompts, tokens, {dim}) (got {np.shape(embeds)})"
        )
    return embeds


def check_latents(latents: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The latents in float32, b c h w.

    Raises:
        ValueError: another shape.
    """
    if np.shape(latents) != shape:
        raise ValueError(
            f"latents must have shape (images, channels, height, width) = {shape} for this call "
            f"(got {np.shape(latents)})"
        )
    return np.asarray(latents, np.float32)


def check_seeds(seed: Any, n: int, limit: int) -> list[int] | int | None:
    """The seed, or one for each of n images.

    Raises:
        ValueError: not an integer, out of range, or a list of another length.
    """
    if seed is None:
        return None
    seeds = list(seed) if isinstance(seed, list | tuple) else [seed]
    for value in seeds:
        if not isinstance(value, int | np.integer) or not 0 <= value < limit:
            raise ValueError(f"seed must be an integer from 0 to {limit - 1} (got {value!r})")
    if isinstance(seed, list | tuple):
        if len(seeds) != n:
            raise ValueError(f"seed has {len(seeds)} entries for {n} images; give one or {n}")
        return [int(value) for value in seed]
    return int(seed)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises ValueError unless value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} (got {value!r})")
