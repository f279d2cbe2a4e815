"""Tokenizers with vocabularies of single characters, in the classes that pipelines expect."""

from typing import Any

from transformers import (
    BertTokenizer,
    CLIPTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    Qwen2Tokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from support.clip_vocabulary import _byte_characters

BYTES = tuple(_byte_characters())
ASCII = tuple(map(chr, range(33, 127)))
CLIP_TOKENS = (*BYTES, *(f"{c}</w>" for c in BYTES), "<|startoftext|>", "<|endoftext|>")
T5_TOKENS = ("<pad>", "</s>", "<unk>", "▁", *ASCII)

GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n", "▁", *ASCII)
LLAMA_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "\n", "▁", *ASCII)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
QWEN_TOKENS = (*BYTES, *QWEN_SPECIAL)
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ASCII, *(f"##{c}" for c in ASCII))
QWEN_CHAT = """{%- macro show(part) -%}
{% if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- if part.type == "text" %}{{ part.text }}{% endif %}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ show(part) }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL_SPECIAL = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
MISTRAL_PICTURES = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
MISTRAL_TOKENS = (*LLAMA_TOKENS, *MISTRAL_SPECIAL, *MISTRAL_PICTURES)
MISTRAL_CHAT = """{%- for message in messages -%}
[INST]{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text or "[IMG]" }}{% endfor %}{% endif %}[/INST]
{%- endfor -%}"""


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


def gemma_tokenizer(**options: Any) -> Any:
    """Gemma's, with 101 tokens."""
    vocabulary = {token: i for i, token in enumerate(GEMMA_TOKENS)}
    return GemmaTokenizer(vocab=vocabulary, merges=[], **options)


def llama_tokenizer(**options: Any) -> Any:
    """Llama's, with 100 tokens."""
    vocabulary = {token: i for i, token in enumerate(LLAMA_TOKENS)}
    options = {"pad_token": "<pad>", "model_max_length": 512, **options}
    return LlamaTokenizer(vocab=vocabulary, merges=[], **options)


def qwen_tokenizer(**options: Any) -> Any:
    """Qwen 2's and 3's, whose tokens are bytes and marks of chats and pictures."""
    vocabulary = {token: i for i, token in enumerate(QWEN_TOKENS)}
    special = list(QWEN_SPECIAL[1:8])
    options = {"chat_template": QWEN_CHAT, "additional_special_tokens": special, **options}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], **options)


def bert_tokenizer(**options: Any) -> Any:
    """BERT's, with 193 tokens."""
    vocabulary = {token: i for i, token in enumerate(BERT_TOKENS)}
    return BertTokenizer(vocab=vocabulary, **{"model_max_length": 77, **options})


def roberta_tokenizer(**options: Any) -> Any:
    """XLM-RoBERTa's, with 100 tokens."""
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<mask>", 0.0)]
    vocabulary = [*special, *((token, -3.0) for token in ("▁", *ASCII))]
    return XLMRobertaTokenizer(vocab=vocabulary, **{"model_max_length": 77, **options})


def mistral_tokenizer(**options: Any) -> Any:
    """Mistral's, with 107 tokens: Llama's and marks of chats and pictures."""
    vocabulary = {token: i for i, token in enumerate(MISTRAL_TOKENS)}
    special = [*MISTRAL_SPECIAL, *MISTRAL_PICTURES]
    marks = {"pad_token": "<pad>", "additional_special_tokens": special}
    options = {**marks, "chat_template": MISTRAL_CHAT, "model_max_length": 2048, **options}
    return LlamaTokenizer(vocab=vocabulary, merges=[], **options)
