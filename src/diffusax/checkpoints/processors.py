"""Gives tokenizers and processors of images, whose rooms know no Hub, their `from_pretrained`."""

from pathlib import Path
from typing import Any

from diffusax.boundary.files import FromPretrained
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.keywords import OF_HUB, take_keywords
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.patches import Qwen2VLImageProcessor
from diffusax.text.language_tokenizer import Qwen2Tokenizer, T5Tokenizer
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.text.vision_language import (
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)


def _from_pretrained(
    cls: Any, path_or_repo: str | Path, *, subfolder: str | None = None, **hub: Any
) -> Any:
    """Loads a tokenizer or a processor of images from a folder or Hub repository.

    Args:
        path_or_repo: a folder or a Hub repository id.
        subfolder: the folder inside it, such as "tokenizer" for a pipeline's checkpoint.
        **hub: revision, token, local_files_only, cache_dir and force_download. Unknown ones are
            logged and left out.

    Raises:
        ValueError: it cannot be found or read; says why.
    """
    own, more = take_keywords(f"{cls.__name__}.from_pretrained", hub, OF_HUB)
    options: dict[str, Any] = {"subfolder": subfolder, "weights": False}
    return cls.from_folder(resolve(path_or_repo, **options, **own, **more))


setattr(FromPretrained, "from_pretrained", classmethod(_from_pretrained))  # noqa: B010

__all__ = [
    "CLIPImageProcessor",
    "CLIPTokenizer",
    "Qwen2Tokenizer",
    "Qwen2VLImageProcessor",
    "Qwen2VLProcessor",
    "Qwen2_5_VLProcessor",
    "Qwen3VLProcessor",
    "T5Tokenizer",
]
