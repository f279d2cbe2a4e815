"""The tokenizers of language models: byte pairs (Qwen), unigrams (T5).

The ids are those of transformers 5. The `tokenizers` library runs the pipeline, see
`language_pipelines`; what pads, what is special, how long texts may be and how a chat looks is in
the files beside the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import AddedToken, Tokenizer

from diffusax.boundary.files import load_json, read_text, write_json, written_whole
from diffusax.images.image_processor import FILES
from diffusax.images.patches import Qwen2VLImageProcessor
from diffusax.text.chat import render_chat
from diffusax.text.language_pipelines import byte_pairs, put_around, unigrams
from diffusax.text.tokenizer_files import read_config, special_tokens
from diffusax.text.vocabulary import Vocabulary

_UNBOUNDED = 10**20
"""What transformers writes as model_max_length where there is none is above this."""
TEMPLATE_FILE = "chat_template.jinja"
"""The file of a chat template."""
_MAX_TEMPLATE_BYTES = 2**20
_OLD_TEMPLATE = "chat_template.json"
_PROCESSOR = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    _OLD_TEMPLATE,
)
"""The files of a processor beside its tokenizer's."""
_UNSUPPORTED = ("continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageTokenizer(Vocabulary):
    """Converts texts to ids with the pipeline of a language model.

    special: the special tokens by name, such as pad_token. model_max_length: the most tokens of a
    text, None for any number. config: the contents of tokenizer_config.json.
    """

    tokenizer: Tokenizer = dataclasses.field(repr=False)
    special: Mapping[str, str]
    model_max_length: int | None
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    class_names: ClassVar[tuple[str, ...]] = ()
    """The names of transformers' classes that the files may give; the first is written."""
    listed_name: ClassVar[str] = ""
    """The class in a pipeline's index, where it is another one."""
    defaults: ClassVar[dict[str, str]] = {}
    """The special tokens that tokenizer_config.json need not name."""

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads the tokenizer of a checkpoint: tokenizer.json, or what older checkpoints have in
        its place, and the files beside it.

        Raises:
            ValueError: a file is missing or broken, or belongs to another kind of tokenizer.
        """
        folder = Path(path)
        config = read_config(folder, cls.__name__, cls.class_names)
        source = folder / "tokenizer_config.json"
        special, added = special_tokens(folder, {**cls.defaults, **config})
        tokenizer, own = cls._pipeline(folder, config)
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        known = {token.content for token in added}
        tokenizer.add_tokens([*added, *(token for token in own if token.content not in known)])
        cls._complete(tokenizer, special, config)
        length = config.get("model_max_length", _UNBOUNDED + 1)
        if not isinstance(length, int | float) or not length >= 1:
            raise ValueError(f"{source}: model_max_length must be from 1 up (got {length!r})")
        limit = None if length > _UNBOUNDED else int(length)
        return cls(tokenizer, special, limit, _read_template(folder, config), config)

    @classmethod
    def _pipeline(
        cls, folder: Path, config: Mapping[str, Any]
    ) -> tuple[Tokenizer, list[AddedToken]]:
        """Reads the class's pipeline, and the tokens to add that the model's own file names."""
        raise TypeError(f"{cls.__name__} has no pipeline; use a class for one kind of tokenizers")

    @classmethod
    def _complete(
        cls, tokenizer: Tokenizer, special: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        """Makes the pipeline put the special tokens around a text."""

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Renders a conversation by the checkpoint's chat template, as transformers' method.

        Args:
            conversation: messages such as {"role": "user", "content": "a cat"}, or a list of such
                conversations.
            tools: the schemas of tools that the template may describe.
            documents: documents that the template may show.
            chat_template: a template in the place of the checkpoint's.
            add_generation_prompt: whether the text ends where an answer would begin.
            tokenize: whether to return tokens; False for the text.
            padding: see a call.
            truncation: see a call.
            max_length: see a call.
            return_tensors: see a call.
            return_dict: whether to return the mask, too; False for the tokens alone.
            **variables: what else the template reads, such as enable_thinking.

        Raises:
            ValueError: there is no template, it cannot render the conversation, or an argument has
                no meaning here.
        """
        for name in _UNSUPPORTED:
            if variables.pop(name, None):
                raise ValueError(f"{name} must be left out: diffusax's tokenizers do not have it")
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template; give chat_template=")
        if not conversation:
            raise ValueError("conversation must have at least one message (got none)")
        alone = isinstance(conversation[0], Mapping)
        given: dict[str, Any] = {
            **self.special,
            **variables,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        chats = [conversation] if alone else conversation
        texts = [render_chat(template, chat, **given) for chat in chats]
        text = texts[0] if alone else texts
        if not tokenize:
            return text
        found = self(
            text,
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )
        return found if return_dict else found.input_ids

    def decode(
        self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False
    ) -> str:
        """Returns the text of some ids."""
        ids = list(map(int, token_ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @functools.cached_property
    def pad_token_id(self) -> int:
        """The id that fills up.

        Raises:
            ValueError: the tokenizer has none.
        """
        found = self._special_id("pad_token")
        if found is None:
            raise ValueError("padding must be left out: the tokenizer has no pad_token")
        return found

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None where there is none."""
        return self._special_id("eos_token")

    def check_fits(self, vocab_size: int, max_position_embeddings: int | None = None) -> None:
        """Raises ValueError unless a text encoder has embeddings for all ids.

        Without this check, indexing would silently use other embeddings. Lengths are the call's,
        because these encoders have no table of positions.
        """
        self._check_ids_fit(vocab_size)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat template, for transformers.

        Raises:
            OSError: the files cannot be written; says why.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / "tokenizer.json") as partial:
            partial.write_text(self.tokenizer.to_str(), encoding="utf-8")
        config = {
            **self.special,
            "tokenizer_class": self.class_names[0],
            **self.config,
        }
        if self.chat_template is not None and config.get("chat_template") != self.chat_template:
            config.pop("chat_template", None)
            with written_whole(folder / TEMPLATE_FILE) as partial:
                partial.write_text(self.chat_template, encoding="utf-8", newline="")
        write_json(folder / "tokenizer_config.json", config, ensure_ascii=False)

    def _rows(self, texts: list[str], limit: int | None, cut: bool, ends: bool) -> list[list[int]]:
        """Returns the ids of texts. The library's own limit is a setting that threads share."""
        added = self.tokenizer.num_special_tokens_to_add(False) if ends else 0
        encodings = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if cut and limit is not None:
            if limit < added:
                raise ValueError(f"max_length must be at least {added} (got {limit})")
            for encoding in encodings:
                encoding.truncate(limit - added)
        return [list(self.tokenizer.post_process(e, None, ends).ids) for e in encodings]

    def _special(self) -> Mapping[str, str]:
        return self.special

    def _set_special(self, name: str, token: str) -> None:
        object.__setattr__(self, "special", {**self.special, name: token})

    def _special_id(self, name: str) -> int | None:
        token = self.special.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)


class Qwen2Tokenizer(LanguageTokenizer):
    """The byte-pair tokenizer of Qwen's language models, 2 and 3."""

    class_names = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    defaults: ClassVar[dict[str, str]] = dict.fromkeys(
        ("unk_token", "eos_token", "pad_token"), "<|endoftext|>"
    )
    _pipeline = staticmethod(byte_pairs)

    @classmethod
    def _complete(
        cls, tokenizer: Tokenizer, special: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        # A tokenizer.json says itself what stands around a text.
        if tokenizer.post_processor is None:
            begin = special.get("bos_token") if config.get("add_bos_token") else None
            end = special.get("eos_token") if config.get("add_eos_token") else None
            put_around(tokenizer, begin, end)


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessorTokenizer(Qwen2Tokenizer):
    """The tokenizer in the files of Qwen3-VL's processor, whose other files it keeps.

    others: the contents of the files beside the tokenizer's, by name, which are kept as they are.
    """

    others: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    listed_name = "Qwen3VLProcessor"

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        folder = Path(path)
        made = super().from_folder(folder)
        found = {name: load_json(folder / name) for name in _PROCESSOR if (folder / name).is_file()}
        # Processors of transformers 4 keep the template in a file of its own.
        template = found.pop(_OLD_TEMPLATE, {}).get("chat_template", made.chat_template)
        if (folder / TEMPLATE_FILE).is_file():
            template = made.chat_template
        return dataclasses.replace(made, others=found, chat_template=template)

    @functools.cached_property
    def image_processor(self) -> Qwen2VLImageProcessor:
        """What makes patches of images.

        Raises:
            ValueError: the folder has no file of it, or an option in it is not valid.
        """
        found = next((self.others[name] for name in FILES if name in self.others), None)
        if found is None:
            raise ValueError(
                f"the processor has no {FILES[0]}, which reading images needs; download the "
                "checkpoint's processor again"
            )
        return Qwen2VLImageProcessor.from_dict(found.get("image_processor", found))

    def save(self, folder: str | Path) -> None:
        super().save(folder)
        for name, data in self.others.items():
            write_json(Path(folder) / name, data)


class Qwen2VLProcessorTokenizer(ProcessorTokenizer):
    """The tokenizer in the files of Qwen2-VL's processor, which Qwen2.5-VL has in Qwen-Image-Edit.

    See `ProcessorTokenizer`.
    """

    listed_name = "Qwen2VLProcessor"


class T5Tokenizer(LanguageTokenizer):
    """T5's unigram tokenizer (Kudo 2018), which ends each text with </s>."""

    class_names = ("T5Tokenizer", "T5TokenizerFast")
    defaults: ClassVar[dict[str, str]] = {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    _pipeline = staticmethod(unigrams)

    @classmethod
    def _complete(
        cls, tokenizer: Tokenizer, special: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        if "eos_token" not in special:
            raise ValueError(
                "eos_token must be given in tokenizer_config.json: T5's texts end with it"
            )
        put_around(tokenizer, None, special["eos_token"])


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template: that of its own file, or else the one in tokenizer_config.json.

    Raises:
        ValueError: it is not a text.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_text(path, _MAX_TEMPLATE_BYTES)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if not isinstance(found, str | None):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text")
    return found
