"""CLIP's byte-pair tokenizer (Radford et al. 2021), on the `tokenizers` library alone.

The ids are those of transformers 5's CLIPTokenizer, a `tokenizers` pipeline too. The Python
CLIPTokenizer of transformers 4, without ftfy, differs in this: it drops control, format and private
characters (also the joiners inside emoji) and U+FFFD; it puts spaces around each Chinese character;
it lower-cases a sigma that ends a word to the final form; and it takes "<|ENDOFTEXT|>" in capitals
as the eos token for SD 1.x too. With ftfy it also straightens quotes and full-width letters.
"""

import dataclasses
import functools
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from diffusax.boundary.convert import checked_texts
from diffusax.boundary.files import write_json
from diffusax.text.tokenizer_files import (
    DEFAULTS,
    FLAGS,
    MODEL_MAX_LENGTH,
    TokenizerFiles,
    read_tokenizer_files,
)
from diffusax.text.vocabulary import Vocabulary
from diffusax.text.words import (
    add_words,
    added_words,
    expanded,
    following_ids,
    remove_words,
    to_expand,
)

_END_OF_WORD = "</w>"
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


_NOT_SPACE = re.compile(r"\S{1,1000}")


@dataclasses.dataclass(frozen=True)
class CLIPTokenizer(Vocabulary):
    """Converts texts to ids: bos, the text's tokens, eos, then pads up to `model_max_length`.

    SD 1.x pads with the eos token, SD 2.x with "!"; a "!" typed in an SD 2.x prompt becomes the pad
    token, as in transformers.
    """

    tokenizer: Tokenizer = dataclasses.field(repr=False)
    bos_token: str = DEFAULTS["bos_token"]
    eos_token: str = DEFAULTS["eos_token"]
    unk_token: str = DEFAULTS["unk_token"]
    pad_token: str = DEFAULTS["pad_token"]
    model_max_length: int = MODEL_MAX_LENGTH

    @classmethod
    def from_folder(cls, path: str | Path) -> "CLIPTokenizer":
        """Reads the tokenizer of a checkpoint: tokenizer.json, or vocab.json and merges.txt.

        Like transformers 5, it takes only the vocabulary, merges and added tokens from
        tokenizer.json: the rest of the pipeline is CLIP's. Special tokens come from
        tokenizer_config.json, special_tokens_map.json and added_tokens.json, if they exist.

        Raises:
            ValueError: a file is missing or broken, or belongs to another kind of tokenizer.
        """
        files = read_tokenizer_files(Path(path))
        return cls(_build(files), **files.special, model_max_length=files.model_max_length)

    def _rows(self, texts: list[str], limit: int | None, cut: bool, ends: bool) -> list[list[int]]:
        begin, end = ((self.bos_token_id,), (self.eos_token_id,)) if ends else ((), ())
        most = self.model_max_length if limit is None else limit
        room = most - len(begin) - len(end)
        if room < 0:
            raise ValueError(f"max_length must be at least {most - room} (got {most})")
        bodies = [self.fit(text, room)[0] if cut else self.ids_of(text) for text in texts]
        return [[*begin, *body, *end] for body in bodies]

    def windows(self, texts: str | Sequence[str]) -> np.ndarray:
        """Returns the ids of each text, int32, (n, model_max_length).

        Longer texts are cut off, with one warning for all. The part of a text that cannot fit is
        not even read, which bounds the work.

        Raises:
            ValueError: `texts` is not a string or a list of strings.
        """
        room = self.model_max_length - 2
        fitted = [self.fit(text, room) for text in checked_texts(texts)]
        if any(rest.strip() for _, rest in fitted):
            # The same message for all, because Python keeps each different warning for ever.
            warnings.warn(
                f"a text is longer than {room} tokens; what does not fit is cut off", stacklevel=2
            )
        return np.stack([self.window(ids) for ids, _ in fitted])

    def ids_of(self, text: str) -> list[int]:
        """Returns the ids of a text of any length, without the bos and eos that a window adds.

        A word of several embeddings gives all its ids.
        """
        return self._encode(text)[0]

    def fit(self, text: str, n: int) -> tuple[list[int], str]:
        """Returns the ids of a text's first n tokens, and the rest of the text."""
        if n <= 0:
            return [], text
        # White space is no token, and normalisation makes one character of four at most. The part
        # is twice as long as needed, so that a word cut at its end does not matter.
        most = 8 * n * self._longest_token
        ids, offsets = self._encode(text if len(text) <= most else _beginning(text, most))
        return ids[:n], text[offsets[n][0] :] if len(ids) > n else ""

    def decode(
        self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False
    ) -> str:
        """Returns the text of some ids: lower-cased, with a space after each word."""
        ids = list(map(int, token_ids))
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace(_END_OF_WORD, " ").strip()

    @functools.cached_property
    def words(self) -> dict[str, int]:
        """The words that were added to the vocabulary, such as those of embeddings, with their ids.

        A word of n embeddings has n entries: word, word_1, word_2, ... .
        """
        return added_words(self.tokenizer)

    @functools.cached_property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """The ids that follow the first one of each word of several embeddings, by that id."""
        return following_ids(self.words)

    def with_words(self, new: Sequence[str]) -> "CLIPTokenizer":
        """Returns a tokenizer that also has these words, whose ids follow the largest one."""
        return dataclasses.replace(self, tokenizer=add_words(self.tokenizer, new))

    def without_words(self, removed: Sequence[str]) -> "CLIPTokenizer":
        """Returns a tokenizer without these words; the ids of later ones move up."""
        return dataclasses.replace(self, tokenizer=remove_words(self.tokenizer, removed))

    def spell_out(self, text: str) -> str:
        """Returns the text with the parts of a word of several embeddings: `word word_1 word_2`."""
        if not self.parts:
            return text
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        names = {i: name for name, i in self.words.items()}
        pieces, done = [], 0
        for position, rest in to_expand(encoding.ids, self.parts):
            end = encoding.offsets[position][1]
            pieces += [text[done:end], *(f" {names[i]}" for i in rest)]
            done = end
        return "".join([*pieces, text[done:]])

    def window(self, ids: Sequence[int]) -> np.ndarray:
        """Makes a window: bos, ids (at most model_max_length - 2), eos, pads:
        (model_max_length,).
        """
        window = np.full(self.model_max_length, self.pad_token_id, np.int32)
        window[: len(ids) + 2] = [self.bos_token_id, *ids, self.eos_token_id]
        return window

    def save(self, folder: str | Path) -> None:
        """Writes the files that transformers opens, version 4 (Python and fast) and 5.

        Raises:
            OSError: the files cannot be written; says why.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_vocabulary(folder)
        names = self._special()
        added = self.tokenizer.get_added_tokens_decoder()
        config = {
            **names,
            "added_tokens_decoder": {
                str(i): {k: getattr(token, k) for k in ("content", *FLAGS, "special")}
                for i, token in sorted(added.items())
            },
            "do_lower_case": True,
            "errors": "replace",
            "model_max_length": self.model_max_length,
            "tokenizer_class": "CLIPTokenizer",
        }
        for name, data in ("special_tokens_map", names), ("tokenizer_config", config):
            write_json(folder / f"{name}.json", data, ensure_ascii=False)

    def check_fits(self, vocab_size: int, max_position_embeddings: int) -> None:
        """Raises ValueError unless a text encoder has embeddings for all ids and positions.

        Without this check, indexing would silently use other embeddings.
        """
        self._check_ids_fit(vocab_size)
        if self.model_max_length > max_position_embeddings:
            raise ValueError(
                f"the tokenizer has model_max_length={self.model_max_length}, but the text encoder "
                f"has max_position_embeddings={max_position_embeddings}; they do not belong "
                "together"
            )

    @functools.cached_property
    def bos_token_id(self) -> int:
        return _token_id(self.tokenizer, self.bos_token)

    @functools.cached_property
    def eos_token_id(self) -> int:
        return _token_id(self.tokenizer, self.eos_token)

    @functools.cached_property
    def pad_token_id(self) -> int:
        return _token_id(self.tokenizer, self.pad_token)

    def _special(self) -> dict[str, str]:
        return {key: getattr(self, key) for key in DEFAULTS}

    def _set_special(self, name: str, token: str) -> None:
        object.__setattr__(self, name, token)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text's tokens, and where in it each begins and ends."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if not self.parts:
            return encoding.ids, encoding.offsets
        return expanded(encoding.ids, encoding.offsets, self.parts)

    def _save_vocabulary(self, folder: Path) -> None:
        """Writes tokenizer.json, vocab.json and merges.txt, each whole or not at all."""
        try:
            with tempfile.TemporaryDirectory(prefix=".partial", dir=folder) as partial:
                self.tokenizer.save(str(Path(partial) / "tokenizer.json"))
                self.tokenizer.model.save(partial)
                for file in Path(partial).iterdir():
                    os.replace(file, folder / file.name)
        except Exception as error:  # tokenizers raises nothing more specific
            raise OSError(f"{folder} could not be written ({error})") from None

    @functools.cached_property
    def _longest_token(self) -> int:
        """The most characters that a token has: at most as many as its bytes in the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))


def _beginning(text: str, count: int) -> str:
    """Returns a beginning of the text with this many characters that are not white space."""
    end = 0
    for match in _NOT_SPACE.finditer(text):
        end = match.end()
        count -= end - match.start()
        if count <= 0:
            break
    return text[:end]


def _build(files: TokenizerFiles) -> Tokenizer:
    bos, eos = files.special["bos_token"], files.special["eos_token"]
    unk = files.special["unk_token"]
    try:
        pairs: Any = [tuple(m.split(" ") if isinstance(m, str) else m) for m in files.merges]
        model = BPE(files.vocab, pairs, unk_token=unk, end_of_word_suffix=_END_OF_WORD)
    except Exception as error:  # tokenizers raises nothing more specific
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{files.source} does not fit the vocabulary ({reason}); download it again"
        ) from None
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(files.added)
    for name, token in files.special.items():
        if tokenizer.token_to_id(token) is None:
            raise ValueError(
                f"{files.source.parent} has {name}={token!r}, which cannot be a token; download "
                "its JSON files again"
            )
    # Only for other programs that open tokenizer.json; here window() adds bos and eos.
    tokenizer.post_processor = processors.RobertaProcessing(
        (eos, _token_id(tokenizer, eos)),
        (bos, _token_id(tokenizer, bos)),
        trim_offsets=False,
        add_prefix_space=False,
    )
    return tokenizer


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    i = tokenizer.token_to_id(token)
    assert i is not None  # every special token is added when the pipeline is built
    return i
