"""What a family of checkpoints is: a record of functions and names, without behaviour."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

Encoded = tuple[jax.Array, ...]
"""What prompts became: the context n s d and, where the family has one, the pooled output n p."""


@dataclasses.dataclass(frozen=True, repr=False)
class Family:
    """How the checkpoints of one kind are read. Tasks know only this of them."""

    name: str
    text: tuple[tuple[str, str], ...]
    """The components (tokenizer, text encoder), in order; a checkpoint may leave some out."""
    optional: tuple[str, ...]
    """Components that a checkpoint may lack."""
    options: tuple[tuple[str, Any], ...]
    """Options in model_index.json that this family reads, with their defaults."""
    encode: Callable[..., Encoded]
    """(encoders, params, ids, weights, clip_skip) -> Encoded; pure, see the families' own."""
    added: Callable[..., dict[str, Any]] | None = None
    """(components, call, pooled, height, width) -> `Conditions.added`, leaves b k d."""
    normalizes_latents: bool = False
    """Whether latents_mean and latents_std of the autoencoder count."""
    resizes_edits: bool = False
    """Whether InstructPix2Pix brings a picture to the model's size instead of taking its own."""
    upcasts_vae: bool = False
    """Whether an autoencoder with force_upcast runs in float32 where its parameters are float16."""

    shows_kept: bool = False
    """Whether inpainting shows the picture to a decoder that takes it; not beside a ControlNet."""

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    @property
    def pooled(self) -> bool:
        """Whether `encode` gives a pooled output besides the context."""
        return len(self.text) > 1
