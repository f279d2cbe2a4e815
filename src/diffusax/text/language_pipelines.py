"""The `tokenizers` pipelines of language models, built as transformers 5 builds them.

Of a tokenizer.json they take what transformers' classes take: the vocabulary, the merges, the table
that normalises texts and what is put around a text. The rest of the pipeline is the class's own,
whatever the file describes: files of several ages describe it differently.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram

from diffusax.boundary.files import load_json
from diffusax.text.sentence_piece import read_sentence_pieces

SPIECE = "spiece.model"
"""The file of SentencePiece that T5's oldest checkpoints have alone."""
_FILE = "tokenizer.json"
_UNKNOWN = 2
"""T5's id of the unknown token."""
_EXTRA_IDS = 100
_SMALLEST_TRIE = 1024
"""The bytes of the first block of a table of characters, which each such table has."""
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def unigrams(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, list[AddedToken]]:
    """Reads T5's pipeline from tokenizer.json, or else from spiece.model.

    Args:
        folder: the folder of the tokenizer.
        config: the contents of tokenizer_config.json.

    Returns:
        The pipeline, and the tokens to add that the model's own file names.

    Raises:
        ValueError: a file is missing or broken, or holds another kind of model; names it.
    """
    path, marks = folder / _FILE, list[tuple[str, bool]]()
    if path.is_file():
        vocabulary, charsmap = _stored_unigrams(path)
    elif (path := folder / SPIECE).is_file():
        vocabulary, marks, charsmap = read_sentence_pieces(path)
        extra = config.get("extra_ids", _EXTRA_IDS)
        if type(extra) is not int or not 0 <= extra <= 10_000:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: extra_ids must be from 0 to 10000 (got "
                f"{extra!r})"
            )
        names = [f"<extra_id_{i}>" for i in range(extra)]
        vocabulary += [(name, 0.0) for name in reversed(names)]
        # Where the config lists special tokens, transformers takes no others.
        listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        marks = [] if listed else [*marks, *((name, True) for name in names)]
    else:
        raise _missing(folder / _FILE, SPIECE)
    try:
        tokenizer = Tokenizer(Unigram(vocabulary, _UNKNOWN, False))
        if charsmap:
            # The library would panic at the first text.
            if int.from_bytes(charsmap[:4], "little") < _SMALLEST_TRIE:
                raise ValueError("its precompiled_charsmap is empty")
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
    except Exception as error:  # tokenizers raises nothing more specific
        raise _broken(path, error) from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer, [AddedToken(t, normalized=False, special=special) for t, special in marks]


def put_around(tokenizer: Tokenizer, begin: str | None, end: str | None) -> None:
    """Makes a pipeline put tokens, which it has, before and after each text."""
    marks = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
    single, second = ([part for part in (begin, text, end) if part] for text in ("$A", "$B"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=marks
    )


def byte_pairs(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, list[AddedToken]]:
    """Reads Qwen's pipeline from tokenizer.json, or else from vocab.json and merges.txt.

    The arguments, the result and the errors are those of `unigrams`.
    """
    path = folder / _FILE
    if path.is_file():
        stored = _from_file(path)
        model, around = stored.model, stored.post_processor
    else:
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        if not (vocabulary.is_file() and merges.is_file()):
            raise _missing(path, "vocab.json and merges.txt")
        try:
            model, around = BPE.from_file(str(vocabulary), str(merges)), None
        except Exception as error:  # tokenizers raises nothing more specific
            raise _broken(merges, error) from None
    if not isinstance(model, BPE):
        raise ValueError(f"{path} holds a model of the kind {type(model).__name__}, not BPE")
    model.dropout = model.unk_token = model.continuing_subword_prefix = None
    model.end_of_word_suffix = None
    model.fuse_unk = model.byte_fallback = model.ignore_merges = False
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    spaced = bool(config.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if around is not None:
        tokenizer.post_processor = around
    return tokenizer, []


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise _broken(path, error) from None


def _stored_unigrams(path: Path) -> tuple[list[tuple[str, float]], bytes | None]:
    """Returns the vocabulary and the table of characters in a tokenizer.json."""
    data = load_json(path)
    model = data.get("model")
    if not isinstance(model, dict):
        raise _broken(path, "it has no model")
    kind = model.get("type") or ("BPE" if "merges" in model else "Unigram")
    if kind != "Unigram":
        raise ValueError(f"{path} holds a model of the kind {kind}, not Unigram")
    try:
        vocabulary = [(str(piece), float(score)) for piece, score in model["vocab"]]
        return vocabulary, _stored_charsmap(data.get("normalizer"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(path, error) from None


def _stored_charsmap(normalizer: Any) -> bytes | None:
    if not normalizer:
        return None
    several = normalizer["type"] == "Sequence"
    entries = normalizer["normalizers"] if several else [normalizer]
    found = (e["precompiled_charsmap"] for e in entries if e.get("type") == "Precompiled")
    text = next(found, None)
    return base64.b64decode(text) if text else None


def _missing(path: Path, older: str) -> ValueError:
    return ValueError(
        f"{path} is missing, and there is no {older} either; write it with transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _broken(path: Path, error: Exception | str) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{path} is no tokenizer ({reason}); download it again")
