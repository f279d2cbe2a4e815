"""The names by which prompts call LoRAs: their files', and those that kohya's headers give."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TypeVar

from diffusax.checkpoints.tensors import read_metadata

K = TypeVar("K", bound=Hashable)

_OUTPUT_NAME = "ss_output_name"
_FORBIDDEN = ("none",)


def output_name(path: Path) -> str | None:
    """Returns the name in a LoRA's header, by which A1111 calls it; None where it has none.

    A file that cannot be read has none: what is wrong with it is told when it is loaded.
    """
    try:
        found = read_metadata(path).get(_OUTPUT_NAME)
    except (ValueError, OSError):
        return None
    return found if isinstance(found, str) and found.lower() not in _FORBIDDEN else None


def called(name: str, files: Mapping[K, tuple[str, str | None]]) -> list[K]:
    """Returns the LoRAs that a name calls: none, one, or several where it does not say which.

    A file's name comes before the names in headers, and one that several headers have calls none of
    them in A1111 (stable-diffusion-webui, extensions-builtin/Lora/networks.py, load_networks).

    Args:
        name: the name.
        files: for each LoRA the name of its file without the ending, and that in its header.
    """
    own = [key for key, (stem, _) in files.items() if stem == name]
    return own or [key for key, (_, alias) in files.items() if alias == name]
