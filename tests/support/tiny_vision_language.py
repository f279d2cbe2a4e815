"""A small processor of texts and images in the layout of Qwen3-VL's."""

from pathlib import Path
from typing import Any

import transformers

from support.processors import Qwen3Pictures
from support.tiny_language import write_qwen_tokenizer

TOKENS = ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen3-VL's template as far as texts and images go."""


def write_qwen3_vl_processor(folder: Path, *, patch: int = 4) -> Any:
    """Writes a processor of images of 2 to 20 tokens, and returns transformers' own."""
    tokenizer = write_qwen_tokenizer(folder)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": TOKENS}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = None
    tokenizer.model_max_length = 512
    unit = (2 * patch) ** 2
    images = transformers.Qwen2VLImageProcessor(
        patch_size=patch, size={"shortest_edge": 2 * unit, "longest_edge": 20 * unit}
    )
    theirs = Qwen3Pictures(images, tokenizer, None, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return theirs
