"""What transformers' tokenizers tell of their vocabulary, and how words are added to it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer

from diffusax.boundary.convert import checked_texts
from diffusax.boundary.files import FromPretrained
from diffusax.boundary.tensors import BatchEncoding
from diffusax.text.encoding import as_tensors, check_options, padded, padding_of, truncates


class Vocabulary(FromPretrained):
    """The methods of every tokenizer here under transformers' names, over `tokenizer`."""

    tokenizer: Tokenizer
    _special: Callable[[], Mapping[str, str]]
    """Returns the special tokens by name."""
    _set_special: Callable[[str, str], None]
    """Sets a special token by name."""
    model_max_length: Any
    pad_token_id: Any
    _rows: Callable[[list[str], int | None, bool, bool], list[list[int]]]
    """Returns the ids of texts: the most of each, whether to cut longer ones, and whether to add
    what stands around a text."""
    decode: Callable[..., str]
    save: Callable[[Any], None]
    is_fast = True
    """Whether the library `tokenizers` runs it."""
    padding_side = "right"
    truncation_side = "right"
    model_input_names = ("input_ids", "attention_mask")

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str | None = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_length: bool = False,
        **options: Any,
    ) -> BatchEncoding:
        """Tokenizes texts as transformers' tokenizers: `.input_ids` and `.attention_mask`.

        Args:
            text: a text or a list of texts.
            add_special_tokens: whether to add what the tokenizer puts around a text, as CLIP's
                bos and eos.
            padding: "max_length" fills up to max_length, True or "longest" to the longest text.
            truncation: whether to cut texts off at max_length.
            max_length: the number of tokens, by default model_max_length.
            padding_side: "right" or "left", where texts are filled up; by default on the right.
            return_tensors: "np", "pt" (PyTorch's), "jax", or None for lists.
            return_attention_mask: False leaves the mask out.
            return_length: whether to return the number of tokens of each row, `.length`, too.
            **options: transformers' others, which must be False or None.

        Raises:
            ValueError: an argument has another type, the texts give tensors of several lengths, or
                the tokenizer has no token to fill up with.
            ImportError: return_tensors is "pt", and PyTorch is not installed.
        """
        check_options(options)
        texts, filled = checked_texts(text, "text"), padding_of(padding)
        limit = self.model_max_length if max_length is None else max_length
        cut = truncates(truncation, max_length, filled)
        rows = self._rows(texts, limit, cut, add_special_tokens)
        length = {"max_length": limit, "longest": max(map(len, rows))}.get(filled)
        pad = 0 if length is None else cast(int, self.pad_token_id)
        ids, masks = padded(rows, length, pad, side=padding_side or self.padding_side)
        alone = isinstance(text, str) and return_tensors is None
        found = {"input_ids": ids, "attention_mask": masks}
        if return_attention_mask is False:
            del found["attention_mask"]
        lengths = {"length": as_tensors([len(row) for row in ids], return_tensors)}
        encoded = {k: v[0] if alone else as_tensors(v, return_tensors) for k, v in found.items()}
        return BatchEncoding(encoded | (lengths if return_length else {}))

    def batch_decode(
        self, sequences: Sequence[Sequence[int]] | np.ndarray, skip_special_tokens: bool = False
    ) -> list[str]:
        """Returns the text of each row of ids, see `decode`."""
        return [self.decode(row, skip_special_tokens) for row in sequences]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the files that transformers opens, see `save`."""
        self.save(save_directory)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without those that were added."""
        return self.tokenizer.get_vocab_size(with_added_tokens=False)

    @functools.cached_property
    def max_id(self) -> int:
        """The largest id that a text can have."""
        return max(self.tokenizer.get_vocab().values())

    def _check_ids_fit(self, vocab_size: int) -> None:
        """Raises ValueError unless a text encoder with `vocab_size` embeddings has all ids."""
        if self.max_id >= vocab_size:
            token = self.tokenizer.id_to_token(self.max_id)
            raise ValueError(
                f"the tokenizer gives {token!r} the id {self.max_id}, but the text encoder has "
                f"vocab_size={vocab_size}; they do not belong together"
            )

    def __len__(self) -> int:
        """Returns the number of tokens, with those that were added."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        """Returns True."""
        return True

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens by token."""
        return self.tokenizer.get_vocab()

    @property
    def vocab(self) -> dict[str, int]:
        """The ids of all tokens by token."""
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the ids of the tokens that were added to the model's own."""
        added = sorted(self.tokenizer.get_added_tokens_decoder().items())
        return {token.content: i for i, token in added}

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """The ids of the tokens that were added to the model's own."""
        return self.get_added_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that were added to the model's own, by id."""
        return dict(sorted(self.tokenizer.get_added_tokens_decoder().items()))

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the library `tokenizers`."""
        return self.tokenizer

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens by name, such as eos_token."""
        return dict(self._special())

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once."""
        return list(dict.fromkeys(self._special().values()))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return cast(list[int], self.convert_tokens_to_ids(self.all_special_tokens))

    @property
    def unk_token_id(self) -> int | None:
        """The id of what is not in the vocabulary; None where there is none."""
        token = self._special().get("unk_token")
        return None if token is None else self.tokenizer.token_to_id(token)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Returns the number of tokens that a call puts around a text."""
        return len(self("").input_ids) - len(self("", add_special_tokens=False).input_ids)

    @property
    def max_len_single_sentence(self) -> int | None:
        """The most tokens of a text besides those around it; None for any number."""
        most: int | None = self.model_max_length
        return None if most is None else most - self.num_special_tokens_to_add()

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Returns the tokens of a text as texts; a call returns their ids."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return cast(list[str], self.convert_ids_to_tokens(ids))

    def encode(self, text: str, **options: Any) -> Any:
        """Returns the ids of a text; options as of a call."""
        return self(text, **options).input_ids

    def encode_plus(self, text: str, **options: Any) -> Any:
        """Returns what a call returns, as transformers' older name of it does."""
        return self(text, **options)

    def batch_encode_plus(self, texts: Sequence[str], **options: Any) -> Any:
        """Returns what a call returns, as transformers' older name of it does."""
        return self(texts, **options)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """Returns the id of a token, or those of several; that of `unk_token` where it has none."""
        if not isinstance(tokens, str):
            return [cast(int, self.convert_tokens_to_ids(token)) for token in tokens]
        found = self.tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(
        self, ids: Any, skip_special_tokens: bool = False
    ) -> str | list[str] | None:
        """Returns the token of an id, or those of several.

        Args:
            ids: an integer, or a list or an array of them.
            skip_special_tokens: whether to leave special tokens out.
        """
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(numbers, int):
            return self.tokenizer.id_to_token(numbers)
        special = set(self.all_special_ids) if skip_special_tokens else set()
        kept = [int(i) for i in numbers if int(i) not in special]
        return cast(list[str], [self.tokenizer.id_to_token(i) for i in kept])

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Returns the text of tokens."""
        return self.decode(self.convert_tokens_to_ids(tokens))

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Adds words to this tokenizer, whose ids follow the largest one; returns their number.

        `text_encoder.resize_token_embeddings(len(tokenizer))` gives them embeddings. In a pipeline,
        `load_textual_inversion` does both.

        Args:
            new_tokens: a word or several, or `tokenizers.AddedToken`s. Those that are there already
                are left out.
            special_tokens: whether they are special.
        """
        listed = [new_tokens] if isinstance(new_tokens, str | AddedToken) else list(new_tokens)
        words = [
            word if isinstance(word, AddedToken) else AddedToken(word, special=special_tokens)
            for word in listed
        ]
        copy = Tokenizer.from_str(self.tokenizer.to_str())
        before = copy.get_vocab_size()
        (copy.add_special_tokens if special_tokens else copy.add_tokens)(words)
        self._replace(copy)
        return copy.get_vocab_size() - before

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any]) -> int:
        """Adds special tokens by name, and sets those that are this tokenizer's own.

        Args:
            special_tokens_dict: such as {"additional_special_tokens": ["<a>", "<b>"]} or
                {"pad_token": "!"}.

        Returns:
            The number of tokens that were not there.
        """
        added = 0
        for name, value in special_tokens_dict.items():
            several = isinstance(value, list | tuple)
            added += self.add_tokens(list(value) if several else [str(value)], special_tokens=True)
            if not several:
                self._set_special(name, str(value))
        return added

    def _replace(self, tokenizer: Tokenizer) -> None:
        """Replaces the tokenizer of this frozen object, and forgets what followed from it."""
        object.__setattr__(self, "tokenizer", tokenizer)
        for kind in type(self).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, functools.cached_property):
                    self.__dict__.pop(name, None)

    def __copy__(self) -> Self:
        """Returns a tokenizer to which words are added alone."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new
