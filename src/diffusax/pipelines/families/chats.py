"""Prompts in the form of chats, as language models read them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.pipelines.plan import Tokens


def chat_tokens(tokenizer: Any, text: str, most: int, *, thinking: bool = True) -> list[int]:
    """Returns the ids of a prompt in the form of a chat, at most so many.

    thinking: whether the answer may begin with thoughts; otherwise the chat has empty ones.
    """
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return list(tokenizer(chat, truncation=True, max_length=most).input_ids)


def padded_tokens(tokenizer: Any, rows: Sequence[Sequence[int]], length: int) -> Tokens:
    """Returns ids filled up to a length, n length, and how many of each are no padding."""
    ids = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    for filled, row in zip(ids, rows):
        filled[: len(row)] = row
    return Tokens((ids,), lengths=np.array(list(map(len, rows)), np.int32))
