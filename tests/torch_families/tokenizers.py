"""Tokenizers with vocabularies of single characters, in the classes that pipelines expect."""

from typing import Any

from clip_vocabulary import _byte_characters
from transformers import CLIPTokenizer, T5Tokenizer

BYTES = tuple(_byte_characters())
ASCII = tuple(map(chr, range(33, 127)))
CLIP_TOKENS = (*BYTES, *(f"{c}</w>" for c in BYTES), "<|startoftext|>", "<|endoftext|>")
T5_TOKENS = ("<pad>", "</s>", "<unk>", "▁", *ASCII)


def clip_tokenizer(**options: Any) -> Any:
    """CLIP's, which pads with its last token; 514 tokens."""
    vocabulary = {token: i for i, token in enumerate(CLIP_TOKENS)}
    options = {"model_max_length": 77, **options}
    return CLIPTokenizer(vocab=vocabulary, merges=[], **options)


def t5_tokenizer(**options: Any) -> Any:
    """T5's, with 98 tokens."""
    vocabulary = [(token, -3.0 if i > 2 else 0.0) for i, token in enumerate(T5_TOKENS)]
    options = {"model_max_length": 77, **options}
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, **options)
