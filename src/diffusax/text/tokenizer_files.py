"""Reads a checkpoint's tokenizer folder: vocabulary, merges, special and added tokens."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.models import BPE

from diffusax.boundary.files import load_json

MODEL_MAX_LENGTH = 77
DEFAULTS = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
_CLASSES = ("CLIPTokenizer", "CLIPTokenizerFast")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

# In transformers' order; of two tokens with the same content the later one wins.
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer folder, each file checked by itself."""

    vocab: dict[str, int]
    merges: list[Any]
    source: Path
    """The file that an error names if vocabulary and merges do not fit together."""
    special: dict[str, str]
    """The bos_token, eos_token, unk_token and pad_token."""
    added: list[AddedToken]
    """The added tokens, in the order to add them."""
    model_max_length: int


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads tokenizer.json, or vocab.json and merges.txt, and the config files beside them.

    This follows `from_pretrained` of transformers 5 (tokenization_utils_base.py): if
    tokenizer_config.json has an added_tokens_decoder, special_tokens_map.json and added_tokens.json
    are ignored.

    Raises:
        ValueError: a file is missing or broken, or belongs to another kind of tokenizer.
    """
    config = DEFAULTS | _present(read_config(folder, "CLIPTokenizer", _CLASSES))
    vocab, merges, source = _read_vocabulary(folder)
    tokens, added = special_tokens(folder, config)
    special = {key: tokens[key] for key in DEFAULTS}
    return TokenizerFiles(vocab, merges, source, special, added, _model_max_length(folder, config))


def read_config(folder: Path, owner: str, names: Sequence[str]) -> dict[str, Any]:
    """Reads tokenizer_config.json, and the special tokens that older files have beside it.

    Args:
        folder: the tokenizer's.
        owner: the class that reads it, for errors.
        names: transformers' names for such tokenizers.

    Raises:
        ValueError: there is no such folder, a file is broken, or it is for another tokenizer.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; is this a diffusers checkpoint?")
    path = folder / "tokenizer_config.json"
    config = _load_optional(path)
    name = config.get("tokenizer_class")
    if name not in (None, *names, "TokenizersBackend", "PreTrainedTokenizerFast"):
        raise ValueError(f"{path}: tokenizer_class={name!r} is not supported (only {owner})")
    for key in ("padding_side", "truncation_side"):
        if config.get(key) not in (None, "right"):
            raise ValueError(f"{path}: {key}={config[key]!r} is not supported (only 'right')")
    if config.get("added_tokens_decoder") is None:
        config |= _present(_load_optional(folder / "special_tokens_map.json"))
    return config


def _read_vocabulary(folder: Path) -> tuple[dict[str, int], list[Any], Path]:
    """Returns vocabulary, merges, and the file to name if they do not fit together."""
    path = folder / "tokenizer.json"
    if path.is_file():
        model = load_json(path).get("model")
        if not isinstance(model, dict) or not {"vocab", "merges"} <= model.keys():
            raise ValueError(
                f"{path} holds no byte-pair model (vocab and merges); download it again"
            )
        return _checked_vocabulary(model["vocab"], path), model["merges"], path
    vocab_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    vocab = _checked_vocabulary(load_json(vocab_path), vocab_path)
    if not merges_path.is_file():
        raise ValueError(f"{merges_path} is missing; is this a diffusers checkpoint?")
    try:
        _, merges = BPE.read_file(str(vocab_path), str(merges_path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(
            f"{merges_path} is not a list of merges ({error}); download it again"
        ) from None
    return vocab, merges, merges_path


def _checked_vocabulary(vocab: Any, path: Path) -> dict[str, int]:
    if isinstance(vocab, dict) and all(map(_is_id, vocab.values())):
        return vocab
    raise ValueError(
        f"{path} must map each token of the vocabulary to its id, an integer from 0 to 2**31 - 1; "
        "download it again"
    )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def special_tokens(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], list[AddedToken]]:
    """Returns special tokens by name, and all tokens to add, in transformers' order.

    config: the contents of tokenizer_config.json.

    Raises:
        ValueError: a file has them in another form.
    """
    try:
        return _special_tokens(folder, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} has special tokens in no known form ({error!r}): tokenizer_config.json, "
            "special_tokens_map.json or added_tokens.json is broken; download them again"
        ) from None


def _special_tokens(
    folder: Path, config: dict[str, Any]
) -> tuple[dict[str, str], list[AddedToken]]:
    special = {key: _token(config[key]) for key in _SPECIAL if config.get(key) is not None}
    extra = [_token(token) for token in _extra_tokens(config)]
    contents = {token.content for token in (*special.values(), *extra)}
    added = _added_tokens(folder, config, contents)
    by_content = {token.content: token for token in added}
    special = {key: by_content.get(token.content, token) for key, token in special.items()}
    new = [t for t in (*special.values(), *extra) if t.content not in by_content]
    return {key: token.content for key, token in special.items()}, added + new


def _added_tokens(folder: Path, config: dict[str, Any], special: set[str]) -> list[AddedToken]:
    """Returns the tokens that the files list with an id, sorted by id."""
    if "added_tokens_decoder" in config:
        by_id = {int(i): _token(token) for i, token in config["added_tokens_decoder"].items()}
    else:
        added = _load_optional(folder / "added_tokens.json")
        by_id = {i: AddedToken(t, special=t in special) for t, i in added.items()}
        tokens = _load_optional(folder / "tokenizer.json").get("added_tokens", [])
        by_id |= {token["id"]: _token(token) for token in tokens}
    return [by_id[i] for i in sorted(by_id)]


def _extra_tokens(config: dict[str, Any]) -> list[Any]:
    found = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return list(found.values()) if isinstance(found, dict) else found


def _token(value: Any) -> AddedToken:
    """Reads a special token from a string or from a dict as save_pretrained writes it."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: value[key] for key in FLAGS if key in value}
    return AddedToken(value["content"], special=value.get("special", True), **flags)


def _model_max_length(folder: Path, config: dict[str, Any]) -> int:
    length = config.get("model_max_length", MODEL_MAX_LENGTH)
    if not isinstance(length, int) or length < 3:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be an integer from 3 up "
            f"(got {length!r})"
        )
    # transformers writes 1e30 where the length is not known.
    return MODEL_MAX_LENGTH if length > 1_000_000 else length


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _load_optional(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}
