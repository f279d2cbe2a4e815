"""Reads SentencePiece's models (spiece.model), which old checkpoints have as their tokenizers.

The file is a protocol buffer (sentencepiece_model.proto). What is read of it: the pieces with their
scores and types, and the table by which texts are normalised.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 2**28
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _CHARSMAP = 3, 2
_UNIGRAM, _NORMAL, _CONTROL, _USER_DEFINED = 1, 1, 3, 4


class SentencePieces(NamedTuple):
    """The parts of a unigram model that transformers' tokenizers are made of."""

    vocabulary: list[tuple[str, float]]
    """The pieces with the logarithms of their probabilities, by id."""
    marks: list[tuple[str, bool]]
    """The pieces that are found whole in a text, and whether they are control tokens."""
    charsmap: bytes | None
    """The compiled table that normalises texts."""


def read_sentence_pieces(path: Path) -> SentencePieces:
    """Reads a unigram model.

    Raises:
        ValueError: the file is missing or broken, or holds a model of another kind; names it.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        return _read(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise ValueError(
            f"{path} is no unigram model of SentencePiece ({error}); download it again"
        ) from None


def _read(data: bytes) -> SentencePieces:
    vocabulary: list[tuple[str, float]] = []
    marks: list[tuple[str, bool]] = []
    kind, charsmap = _UNIGRAM, b""
    for field, value in _fields(data):
        if field == _PIECES:
            entry = dict(_fields(value))
            piece = str(entry.get(_PIECE, b""), "utf-8")
            (score,) = struct.unpack("<f", entry.get(_SCORE, bytes(4)))
            vocabulary.append((piece, score))
            if (found := entry.get(_TYPE, _NORMAL)) in (_CONTROL, _USER_DEFINED):
                marks.append((piece, found == _CONTROL))
        elif field == _TRAINER:
            kind = dict(_fields(value)).get(_MODEL_TYPE, _UNIGRAM)
        elif field == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP, b"")
    if kind != _UNIGRAM:
        raise ValueError(f"its model_type is {kind}")
    if not vocabulary:
        raise ValueError("it has no pieces")
    return SentencePieces(vocabulary, marks, charsmap or None)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message: an integer, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value: Any
            value, at = _varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _varint(data, at)
            elif kind in (_FIXED_64, _FIXED_32):
                size = 8 if kind == _FIXED_64 else 4
            else:
                raise ValueError(f"no field has the wire type {kind}")
            if at + size > len(data):
                raise ValueError("it ends early")
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of seven bits a byte, the low ones first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("an integer has more than 64 bits")
