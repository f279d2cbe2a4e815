"""What transformers' tokenizers tell of their vocabulary, and how words are added to it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from tokenizers import AddedToken, Tokenizer


class Vocabulary:
    """The methods of every tokenizer here under transformers' names, over `tokenizer`."""

    tokenizer: Tokenizer
    _special: Callable[[], Mapping[str, str]]
    """Returns the special tokens by name."""
    _set_special: Callable[[str, str], None]
    """Sets a special token by name."""
    is_fast = True
    """Whether the library `tokenizers` runs it."""
    padding_side = "right"
    truncation_side = "right"
    model_input_names = ("input_ids", "attention_mask")

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
        call = cast(Any, self)
        return len(call("").input_ids) - len(call("", add_special_tokens=False).input_ids)

    @property
    def max_len_single_sentence(self) -> int | None:
        """The most tokens of a text besides those around it; None for any number."""
        most: int | None = cast(Any, self).model_max_length
        return None if most is None else most - self.num_special_tokens_to_add()

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Returns the tokens of a text as texts; a call returns their ids."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return cast(list[str], self.convert_ids_to_tokens(ids))

    def encode(self, text: str, **options: Any) -> Any:
        """Returns the ids of a text; options as of a call."""
        return cast(Any, self)(text, **options).input_ids

    def encode_plus(self, text: str, **options: Any) -> Any:
        """Returns what a call returns, as transformers' older name of it does."""
        return cast(Any, self)(text, **options)

    def batch_encode_plus(self, texts: Sequence[str], **options: Any) -> Any:
        """Returns what a call returns, as transformers' older name of it does."""
        return cast(Any, self)(texts, **options)

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
        return cast(str, cast(Any, self).decode(self.convert_tokens_to_ids(tokens)))

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
