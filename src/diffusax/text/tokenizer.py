"""CLIP's byte-pair tokenizer (Radford et al. 2021), on the `tokenizers` library alone.

The ids are those of transformers 5's CLIPTokenizer, a `tokenizers` pipeline too. The Python
CLIPTokenizer of transformers 4, without ftfy, differs in this: it drops control, format and private
characters (also the joiners inside emoji) and U+FFFD; it puts spaces around each Chinese character;
it lower-cases a sigma that ends a word to the final form; and it takes "<|ENDOFTEXT|>" in capitals
as the eos token for SD 1.x too. With ftfy it also straightens quotes and full-width letters.
"""

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from diffusax.text.tokenizer_files import (
    DEFAULTS,
    FLAGS,
    MODEL_MAX_LENGTH,
    TokenizerFiles,
    read_tokenizer_files,
)

_END_OF_WORD = "</w>"
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@dataclasses.dataclass(frozen=True)
class CLIPTokenizer:
    """Texts to ids: bos, the text's tokens, eos, then pads up to `model_max_length`.

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
        """The tokenizer of a checkpoint: tokenizer.json, or vocab.json and merges.txt.

        Like transformers 5, takes only the vocabulary, merges and added tokens from tokenizer.json:
        the rest of the pipeline is CLIP's. Special tokens are read from tokenizer_config.json,
        special_tokens_map.json and added_tokens.json, where present.

        Raises:
            ValueError: a file is missing or broken, or belongs to another kind of tokenizer.
        """
        files = read_tokenizer_files(Path(path))
        return cls(_build(files), **files.special, model_max_length=files.model_max_length)

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """The ids of each text, int32, (n, model_max_length).

        A longer text is cut off, with a warning that names the part that is lost.

        Raises:
            ValueError: `texts` is not a string or a list of strings.
        """
        return np.stack([self.window(self._fitting(text)) for text in checked_texts(texts)])

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, of any length, without the bos and eos that a window adds."""
        return self._encode(text).ids

    def rest_of(self, text: str, n: int) -> str:
        """What is left of a text after its first n tokens."""
        offsets = self._encode(text).offsets
        return text[offsets[n][0] :] if n < len(offsets) else ""

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of some ids: lower-cased, with a space after each word."""
        text = self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        return text.replace(_END_OF_WORD, " ").strip()

    def window(self, ids: Sequence[int]) -> np.ndarray:
        """bos, at most model_max_length - 2 ids, eos, pads: int32, (model_max_length,)."""
        window = np.full(self.model_max_length, self.pad_token_id, np.int32)
        window[: len(ids) + 2] = [self.bos_token_id, *ids, self.eos_token_id]
        return window

    def save(self, folder: str | Path) -> None:
        """Writes the files that transformers opens, version 4 (Python and fast) and 5."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.tokenizer.model.save(str(folder))
        names = {key: getattr(self, key) for key in DEFAULTS}
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
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")

    @property
    def bos_token_id(self) -> int:
        return _token_id(self.tokenizer, self.bos_token)

    @property
    def eos_token_id(self) -> int:
        return _token_id(self.tokenizer, self.eos_token)

    @property
    def pad_token_id(self) -> int:
        return _token_id(self.tokenizer, self.pad_token)

    def _encode(self, text: str) -> Encoding:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _fitting(self, text: str) -> list[int]:
        ids, room = self.tokenize(text), self.model_max_length - 2
        if len(ids) > room:
            warn_cut_off(self.rest_of(text, room), room)
        return ids[:room]


def checked_texts(texts: Any) -> list[str]:
    """`texts` as a list.

    Raises:
        ValueError: neither a string nor a non-empty list of strings that can be encoded.
    """
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise ValueError(
            f"prompt must be a string or a list of strings, not {type(texts).__name__} ({texts!r})"
        )
    if not texts:
        raise ValueError("prompt must not be an empty list; give at least one string")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(
                f"prompt must be a string or a list of strings, but number {i} is of type "
                f"{type(text).__name__} ({text!r})"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt must be valid Unicode, but {text!r} has half a surrogate pair at position "
                f"{error.start}; remove it"
            ) from None
    return list(texts)


def warn_cut_off(part: str, room: int) -> None:
    """Warns that only `room` tokens of a prompt are used."""
    warnings.warn(
        f"the prompt is longer than {room} tokens; this part was cut off: {part.strip()!r} "
        "(long_prompt=True keeps it)",
        stacklevel=3,
    )


def _build(files: TokenizerFiles) -> Tokenizer:
    bos, eos = files.special["bos_token"], files.special["eos_token"]
    unk = files.special["unk_token"]
    try:
        pairs: Any = [tuple(m.split(" ") if isinstance(m, str) else m) for m in files.merges]
        model = BPE(files.vocab, pairs, unk_token=unk, end_of_word_suffix=_END_OF_WORD)
    except Exception as error:  # tokenizers raises nothing more specific
        reason = str(error).splitlines()[0]
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
    # Only for those who open a saved tokenizer.json: window() places bos and eos here.
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
