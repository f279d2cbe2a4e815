"""Small processors of texts and images in the layouts of Qwen2.5-VL's and Qwen3-VL's."""

from pathlib import Path
from typing import Any

import transformers

from support.processors import Qwen2Pictures, Qwen3Pictures, Qwen25Pictures
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


OLDER_TEMPLATE = """\
{%- set images = namespace(count=0) %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
""" + TEMPLATE.replace(
    "                {{- '<|vision_start|>",
    """\
                {%- set images.count = images.count + 1 %}
                {%- if add_vision_id %}
                    {{- 'Picture ' ~ images.count ~ ': ' }}
                {%- endif %}
                {{- '<|vision_start|>""",
)
"""Qwen2.5-VL's, which says first what it is, and may count images."""
_KINDS = {
    "Qwen2VLProcessor": (Qwen2Pictures, OLDER_TEMPLATE),
    "Qwen2_5_VLProcessor": (Qwen25Pictures, OLDER_TEMPLATE),
    "Qwen3VLProcessor": (Qwen3Pictures, TEMPLATE),
}


def write_processor(
    folder: Path, kind: str = "Qwen3VLProcessor", *, patch: int = 4, most: int = 20
) -> Any:
    """Writes a processor of images of 2 to `most` tokens, and returns transformers' own."""
    processor_class, template = _KINDS[kind]
    tokenizer = write_qwen_tokenizer(folder)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": TOKENS}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = None
    tokenizer.model_max_length = 512
    unit = (2 * patch) ** 2
    images = transformers.Qwen2VLImageProcessor(
        patch_size=patch, size={"shortest_edge": 2 * unit, "longest_edge": most * unit}
    )
    theirs = processor_class(images, tokenizer, None, chat_template=template)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return theirs
