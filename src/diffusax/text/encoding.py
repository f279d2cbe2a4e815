"""Tokenizes texts as transformers' tokenizers are called: to `input_ids` and `attention_mask`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_kind

_PADDING = {
    True: "longest",
    False: "do_not_pad",
    None: "do_not_pad",
    "longest": "longest",
    "max_length": "max_length",
    "do_not_pad": "do_not_pad",
}
_UNUSED = (
    *("text_pair", "return_overflowing_tokens", "return_special_tokens_mask", "stride"),
    *("return_offsets_mapping", "return_token_type_ids", "is_split_into_words", "verbose"),
    *("pad_to_multiple_of",),
)
"""The options of transformers' calls that texts for images do not need."""
_TRUNCATION = {
    True: True,
    False: False,
    "longest_first": True,
    "only_first": True,
    "do_not_truncate": False,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for options of a call that are unknown, and ValueError for those asked for.

    options: what a call is given besides its arguments.
    """
    for name, value in options.items():
        if name not in _UNUSED:
            raise TypeError(f"a tokenizer's call has no argument {name!r}")
        if value:
            raise ValueError(f"{name} must be left out (got {value!r}): it has no meaning here")


def padding_of(padding: Any) -> str:
    """Returns "longest", "max_length" or "do_not_pad" for a call's `padding`.

    Raises:
        ValueError: it is none of transformers' values.
    """
    value = getattr(padding, "value", padding)
    if not isinstance(value, bool | str | None) or value not in _PADDING:
        raise ValueError(
            "padding must be True, False, 'longest', 'max_length' or 'do_not_pad' (got "
            f"{padding!r})"
        )
    return _PADDING[value]


def truncates(truncation: Any, max_length: int | None, padding: str) -> bool:
    """Returns whether a call cuts texts off: as `truncation` says, or where only a length is given.

    Raises:
        ValueError: it is none of transformers' values.
    """
    value = getattr(truncation, "value", truncation)
    if value is None:
        return max_length is not None and padding == "do_not_pad"
    if not isinstance(value, bool | str) or value not in _TRUNCATION:
        raise ValueError(
            "truncation must be True, False, 'longest_first', 'only_first' or 'do_not_truncate' "
            f"(got {truncation!r})"
        )
    return _TRUNCATION[value]


def padded(
    rows: Sequence[Sequence[int]], length: int | None, pad: int, *, side: str = "right"
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns rows of tokens filled up to a length, and masks that are 1 where a token was.

    length: None leaves the rows as they are; rows that are longer stay whole. side: where rows are
    filled up.

    Raises:
        ValueError: the side is neither "right" nor "left".
    """
    if side not in ("right", "left"):
        raise ValueError(f"padding_side must be 'right' or 'left' (got {side!r})")
    left = side == "left"
    ids, masks = [], []
    for row in rows:
        missing = max((length or 0) - len(row), 0)
        before, after = (missing, 0) if left else (0, missing)
        ids.append([*[pad] * before, *row, *[pad] * after])
        masks.append([0] * before + [1] * len(row) + [0] * after)
    return ids, masks


def as_tensors(rows: list[Any], kind: str | None) -> Any:
    """Converts rows of tokens to what a call's `return_tensors` asks for; None for lists.

    Raises:
        ValueError: rows differ in length, or the kind is unknown.
        ImportError: it is "pt", and PyTorch is not installed.
    """
    nested = [row for row in rows if isinstance(row, list)]
    if kind is not None and len({len(row) for row in nested}) > 1:
        raise ValueError(
            "return_tensors needs rows of one length: pass padding=True and truncation=True (got "
            f"rows of {', '.join(str(len(row)) for row in nested)} tokens)"
        )
    return rows if kind is None else as_kind(np.array(rows, np.int64), kind)
