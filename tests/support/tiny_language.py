"""Tiny language models, and small tokenizers in the layouts of Qwen's and T5's, with a template."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from support.tiny import randomize

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
QWEN2_5_VL_TEXT = {
    **{k: v for k, v in QWEN3.items() if k != "head_dim"},
    "hidden_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]},
}
QWEN2_5_VL_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "window_size": 24,
    "fullatt_block_indexes": [1, 3],
}
TOKENS = {
    "image_token_id": 7,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "video_token_id": 8,
}
QWEN2_5_VL = {"text_config": QWEN2_5_VL_TEXT, "vision_config": QWEN2_5_VL_VISION, **TOKENS}
QWEN3_VL_TEXT = {
    **QWEN3,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
QWEN3_VL_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 24,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_VL = {
    "text_config": QWEN3_VL_TEXT,
    "vision_config": QWEN3_VL_VISION,
    **TOKENS,
}
SEEING = {"Qwen2_5_VL": QWEN2_5_VL, "Qwen3VL": QWEN3_VL}
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
    """A random model of transformers: Qwen3 or one that sees, with a head or not, T5 or UMT5."""
    return randomize(getattr(transformers, kind)(config_of(kind, **changes)))


def config_of(kind: str, **changes: Any) -> Any:
    """The config of `build`'s model; changes of those that see are of their language model."""
    if kind.endswith("T5EncoderModel"):
        config = transformers.UMT5Config if kind.startswith("UM") else transformers.T5Config
        return config(**{**T5, **changes})
    family = next((name for name in SEEING if kind.startswith(name)), None)
    if family is not None:
        names = ("tie_word_embeddings", "image_token_id")
        whole = {name: changes.pop(name) for name in names if name in changes}
        text = {**SEEING[family]["text_config"], **changes}
        if kind == f"{family}TextModel":
            return getattr(transformers, f"{family}TextConfig")(**text)
        given = {**SEEING[family], **whole, "text_config": text}
        return getattr(transformers, f"{family}Config")(**given)
    return transformers.Qwen3Config(**{**QWEN3, **changes})


def build_language_model(folder: Path, kind: str) -> None:
    """Writes a tiny language model beside a tokenizer that fits it."""
    write = write_t5_tokenizer if kind.endswith("T5EncoderModel") else write_qwen_tokenizer
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


CHARSMAP = zlib.decompress(
    base64.b64decode(
        "eNod03fwz3UcB/DX91f+0NVdjtM4mUdOSGQreySzImXPjIzsefYK2aMoWRnJKlK2K7JFGQ3irMIpe8bj43P3uOfr3u8/"
        "3u/P5/X6xKMR8Xgkz6DUExHDn4tIqQdlT4sx6SOWlkiLwdYfKxqRvmREOnub1HOsPaIWsW5sWmSUT5KBzDxFJtZfSItn"
        "5ezmEU/LZ8hKNrLguMhJLrKTgzw8z+ejI3LLfLxAXr5aHFFQvkh+ClCYIhTiJYpRnJdx1ShFaUrgFeJVylKGV6hARcpR"
        "nipUpRKVqc7rVOM1alGbGtTkDd6kDnWpz9u8RT3epSENeIcmNKURjWlBS5rhM0Ub3qMVrWlPB9rSjk505n060pVudOED"
        "etKL7vSgL/3oTR8GXkvFQNmfAQxhaDIADGYEIxnGcD5kDKPQkviI8YxlHJOYzAQmMo3pTGEqnzCTGXzMZ8k8MItPmcu8"
        "pN/M4QsWMp8FLOFLFqH9sYzlLE3mgVV8zQpWsoZv+YbVfJ/MKGv5jo1sSmaTDWxNZEnFZrmFbWznB35kJ7v4iR3sZR+7"
        "2cMBDrKfnznEYX7hV37jd45wlGMc5w/+5GRiQir+kic4w1lOcZp/OM85/uaSu16SF7jIZa7wL/9xnRtc5Rq3ucNNbvE/"
        "97nLvXj445WPNu3iAVBzj4A="
    )
)
"""What SentencePiece compiled of rules that drop DEL, U+9F, U+1, U+AD and U+FEFF, make spaces of
U+9, U+A, U+85, U+A0 and U+200B, "fi" of its ligature and "A" of the full-width letter."""
STRIPPED = [
    {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
]
"""What transformers 4 wrote behind the table of characters."""


def write_t5_tokenizer(folder: Path, layout: str = "5") -> Any:
    """Writes a unigram tokenizer, and returns transformers' own.

    layout: "5" and "4" for a tokenizer.json as these versions of transformers write it, "spiece"
    for a model of SentencePiece alone.
    """
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = UnigramTrainer(
        vocab_size=180, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    if layout == "spiece":
        write_sentence_pieces(folder / "spiece.model", [*vocabulary, ("<sep>", 0.0)])
        config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3, "model_max_length": 40}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        # transformers reads the file by protobuf alone, and asks for sentencepiece all the same.
        with mock.patch("transformers.convert_slow_tokenizer.requires_backends"):
            return transformers.T5Tokenizer.from_pretrained(folder)
    table = None if layout == "5" else CHARSMAP
    tokenizer = transformers.T5Tokenizer(
        vocab=vocabulary, extra_ids=3, model_max_length=40, _spm_precompiled_charsmap=table
    )
    tokenizer.save_pretrained(folder)
    if layout == "4":
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text())
        data["normalizer"] = {"type": "Sequence", "normalizers": [data["normalizer"], *STRIPPED]}
        data["pre_tokenizer"] = data["pre_tokenizer"]["pretokenizers"][1]
        path.write_text(json.dumps(data))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_sentence_pieces(path: Path, vocabulary: list[tuple[str, float]]) -> None:
    """Writes a unigram model in the format of SentencePiece (sentencepiece_model.proto)."""
    kinds = {"<pad>": 3, "</s>": 3, "<unk>": 2, "<sep>": 4}
    pieces = [
        _field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kinds[piece])
        if piece in kinds
        else _field(1, piece.encode()) + b"\x15" + struct.pack("<f", score)
        for piece, score in vocabulary
    ]
    trainer = _number(3, 1) + _number(40, 2) + _field(1, b"corpus.txt")
    normalizer = _field(1, b"own") + _field(2, CHARSMAP) + _number(3, 1)
    parts = [*(_field(1, piece) for piece in pieces), _field(2, trainer), _field(3, normalizer)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(parts))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


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
