"""CLIP's real vocabulary, from OpenAI's merges, in the files that Hub checkpoints have."""

import gzip
import json
from pathlib import Path

import diffusax

MERGES = Path(diffusax.__file__).parent / "data" / "clip_bpe" / "merges.txt.gz"


def write_clip_vocabulary(folder: Path, *, pad: str = "<|endoftext|>") -> Path:
    """Writes vocab.json, merges.txt and two config files. SD 1.x pads with the end, SD 2.x "!"."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = gzip.decompress(MERGES.read_bytes()).decode("utf-8").split("\n")
    merges = lines[1 : 49152 - 256 - 2 + 1]
    alphabet = _byte_characters()
    tokens = alphabet + [c + "</w>" for c in alphabet]
    tokens += ["".join(merge.split()) for merge in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    assert len(vocabulary) == 49408
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), "utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    special = {
        "bos_token": _added("<|startoftext|>"),
        "eos_token": _added("<|endoftext|>"),
        "pad_token": pad,
        "unk_token": _added("<|endoftext|>"),
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    config = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": 77,
        "tokenizer_class": "CLIPTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return folder


def _added(content: str) -> dict[str, object]:
    return {
        "__type": "AddedToken",
        "content": content,
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte, the printable bytes first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
