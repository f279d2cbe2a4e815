"""Texts to tokens: tokenizers, long and weighted prompts, and A1111's syntax of prompts.

Begin with `tokenizer` (CLIP) and `language_tokenizer` (T5, Qwen); both are a `vocabulary`.
"""
