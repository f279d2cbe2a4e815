"""The vocabulary of OpenAI's CLIP (Radford et al. 2021), which the package holds."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from diffusax.boundary.files import write_json
from diffusax.text.tokenizer_files import FLAGS, MODEL_MAX_LENGTH

_MERGES = Path(__file__).parents[1] / "data" / "clip_bpe" / "merges.txt.gz"
_START, _END = "<|startoftext|>", "<|endoftext|>"


def write_clip_vocabulary(folder: Path, pad_token: str = _END) -> None:
    """Writes the tokenizer's folder of a Stable Diffusion checkpoint: 49408 tokens.

    pad_token: SD 1 and SDXL's first text encoder pad with the end of the text, the others with "!".

    Raises:
        OSError: the files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    merges, vocabulary = _files()
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "vocab.json").write_text(vocabulary, encoding="utf-8")
    config: dict[str, Any] = {
        "bos_token": _added(_START),
        "eos_token": _added(_END),
        "pad_token": pad_token,
        "unk_token": _added(_END),
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    }
    write_json(folder / "tokenizer_config.json", config)


@functools.cache
def _files() -> tuple[str, str]:
    """Returns merges.txt and vocab.json.

    The vocabulary is a character for each byte, the same at the end of a word, a token for each
    merge and the two that enclose a text.
    """
    merges = gzip.decompress(_MERGES.read_bytes()).decode("utf-8")
    alphabet = _byte_characters()
    lines = merges.rstrip("\n").split("\n")
    joined = [line.replace(" ", "") for line in lines[1:]]
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *joined, _START, _END]
    return merges, json.dumps({token: i for i, token in enumerate(tokens)}, ensure_ascii=False)


def _byte_characters() -> list[str]:
    """Returns the printable character for each byte, as GPT-2 writes them: the printable first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = 256 - len(printable)
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(others)]


def _added(content: str) -> dict[str, Any]:
    flags = {name: name == "normalized" for name in FLAGS}
    return {"__type": "AddedToken", "content": content, **flags}
