"""Tiny language models, and small tokenizers in the layouts of Qwen's and T5's, with a template."""

import json
from pathlib import Path
from typing import Any

import transformers
from tiny import randomize
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

QWEN3 = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
T5 = {
    "vocab_size": 101,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "feed_forward_proj": "gated-gelu",
}
"""Options of tiny models."""

CORPUS = [
    "a photo of a cat, sitting on the red sofa in front of the window",
    "The quick brown foxes' photographs weren't taken at 12:30 in 2024!",
    "ein Foto einer Katze, das an einem Sommertag gemacht wurde; été à la plage",
    "the user's assistant thinks and then it answers the question about the photo",
    "猫の写真 고양이 사진 фотография кота",
] * 4

TEMPLATE = """\
{%- set state = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {%- set state.count = state.count + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- if message.extra is defined %}
        {{- message.extra | tojson }}
    {%- endif %}
{%- endfor %}
    {% if tools %}
    {{- tools | tojson(indent=1) + eos_token }}
{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def build(kind: str, **changes: Any) -> Any:
    """A random model of transformers: of Qwen3 with and without a head, or T5."""
    if kind == "T5EncoderModel":
        config = transformers.T5Config(**{**T5, **changes})
    else:
        config = transformers.Qwen3Config(**{**QWEN3, **changes})
    return randomize(getattr(transformers, kind)(config))


def build_language_model(folder: Path, kind: str) -> None:
    """Writes a tiny language model beside a tokenizer that fits it."""
    write = write_t5_tokenizer if kind == "T5EncoderModel" else write_qwen_tokenizer
    build(kind, vocab_size=len(write(folder))).save_pretrained(folder)


def write_qwen_tokenizer(folder: Path, *, layout: int = 5) -> Any:
    """Writes a byte-pair tokenizer as transformers 4 or 5 does, and returns transformers' own."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>", "<|vision_start|>"],
        model_max_length=64,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if layout == 4:
        (folder / "chat_template.jinja").unlink()
        _write_config_of_4(folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_t5_tokenizer(folder: Path) -> Any:
    """Writes a unigram tokenizer, and returns transformers' own."""
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = UnigramTrainer(
        vocab_size=180, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    tokenizer = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=3, model_max_length=40)
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _write_config_of_4(folder: Path, tokenizer: Any) -> None:
    """Replaces tokenizer_config.json by one like those of Qwen3's repositories."""
    decoder = {
        str(i): {
            **{"content": token.content, "lstrip": token.lstrip, "normalized": token.normalized},
            **{"rstrip": token.rstrip, "single_word": token.single_word, "special": token.special},
        }
        for i, token in tokenizer.added_tokens_decoder.items()
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|vision_start|>"],
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 64,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
