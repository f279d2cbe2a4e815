"""Processors of text and pictures for language models that see."""

from typing import Any

import transformers

from support.tiny_tokenizers import qwen_tokenizer


class _WithoutVideos:
    """A processor whose part for videos is missing, as that needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        """Accepts any part."""
        return type(argument)


class Qwen2Pictures(_WithoutVideos, transformers.Qwen2VLProcessor):
    """Qwen 2's and 2.5's processor without videos."""


class Qwen25Pictures(_WithoutVideos, transformers.Qwen2_5_VLProcessor):
    """Qwen 2.5's processor without videos."""


class Qwen3Pictures(_WithoutVideos, transformers.Qwen3VLProcessor):
    """Qwen 3's processor without videos."""


def _qwen(processor_class: Any, patch: int, most: int = 4) -> Any:
    tokenizer = qwen_tokenizer()
    images = transformers.Qwen2VLImageProcessor(
        patch_size=patch, min_pixels=(2 * patch) ** 2, max_pixels=(most * patch) ** 2
    )
    return processor_class(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
    )


def qwen2_processor(most: int = 4) -> Any:
    """For `language_models.qwen2_5_vl`; at most 4x4 patches of 14 pixels, or another square."""
    return _qwen(Qwen2Pictures, 14, most)


def qwen3_processor(most: int = 4) -> Any:
    """For `language_models.qwen3_vl`; at most 4x4 patches of 16 pixels, or another square."""
    return _qwen(Qwen3Pictures, 16, most)
