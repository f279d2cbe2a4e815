"""Autoencoders between images and latents."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Gives the names that diffusers has at this path."""
    from diffusax.import_paths import find_name

    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find_name(name)
