"""Texts with images as Qwen's models read them: tokens, patches and positions.

Upstream: transformers models/qwen3_vl/processing_qwen3_vl.py, models/qwen2_5_vl/
processing_qwen2_5_vl.py, models/qwen2_vl/processing_qwen2_vl.py and processing_utils.py, which do
the same with texts and images.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from diffusax.boundary.convert import checked_texts
from diffusax.boundary.files import FromPretrained, load_json, written_whole
from diffusax.boundary.tensors import BatchEncoding, as_kind
from diffusax.images.patches import Qwen2VLImageProcessor
from diffusax.text.encoding import as_tensors
from diffusax.text.image_tokens import IMAGE, image_positions
from diffusax.text.language_tokenizer import TEMPLATE_FILE, Qwen2Tokenizer

_OLDER_TEMPLATE = "chat_template.json"
_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_PLACES = ("image", "url", "path")
"""Where a message names the image of a block."""


class ImageTexts(NamedTuple):
    """Texts with images as the networks take them, pads on one side.

    ids: b t, int32. mask: b t, whether a token is no pad. positions: 3 b t, int32 (frame, row,
    column). images: b t, whether a token stands for a part of an image. patches: n p for each
    image, float32. grids: k 2, the rows and columns of patches of each image.
    """

    ids: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    images: np.ndarray
    patches: tuple[np.ndarray, ...]
    grids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class VisionLanguageProcessor(FromPretrained):
    """Makes tokens of texts and patches of images, as transformers' class of the same name does.

    A text has `<|image_pad|>` where an image is; there are as many tokens of it as the image has
    squares of patches.
    """

    image_processor: Qwen2VLImageProcessor
    tokenizer: Qwen2Tokenizer
    chat_template: str | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads the processor of a checkpoint: a tokenizer, preprocessor_config.json, a template.

        Raises:
            ValueError: a file is missing or broken; names it.
        """
        folder = Path(path)
        tokenizer = Qwen2Tokenizer.from_folder(folder)
        template = tokenizer.chat_template
        if not (folder / TEMPLATE_FILE).is_file() and (folder / _OLDER_TEMPLATE).is_file():
            template = load_json(folder / _OLDER_TEMPLATE).get("chat_template")
            if not isinstance(template, str):
                raise ValueError(f"{folder / _OLDER_TEMPLATE}: chat_template must be a text")
        return cls(Qwen2VLImageProcessor.from_folder(folder), tokenizer, template)

    def save(self, folder: str | Path) -> None:
        """Writes the files that transformers opens."""
        folder = Path(folder)
        self.tokenizer.save(folder)
        self.image_processor.save(folder)
        if self.chat_template is not None:
            with written_whole(folder / TEMPLATE_FILE) as partial:
                partial.write_text(self.chat_template, encoding="utf-8", newline="")

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Writes the files that transformers opens."""
        self.save(save_directory)

    @property
    def image_token_id(self) -> int:
        """The id of the token that stands for a part of an image.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        found = self.tokenizer.tokenizer.token_to_id(_IMAGE)
        if found is None:
            raise ValueError(f"the tokenizer has no {_IMAGE}; use the checkpoint's")
        return found

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        *,
        return_tensors: str | None = None,
        return_mm_token_type_ids: bool = True,
        **options: Any,
    ) -> BatchEncoding:
        """Prepares texts and images as transformers' processor does.

        Args:
            images: a path or a PIL image, a list of them in the order of the texts, or a list of
                such lists, one for each text.
            text: a text or a list of texts.
            return_tensors: "np", "pt" (PyTorch's), "jax", or None for lists of tokens.
            return_mm_token_type_ids: False leaves the tokens' types out.
            **options: those of the tokenizer's call, such as padding, padding_side and max_length.

        Returns:
            `.input_ids` and `.attention_mask`, `.mm_token_type_ids` (1 for parts of images), and
            with images `.pixel_values`, n p, and `.image_grid_thw`, see `Qwen2VLImageProcessor`.

        Raises:
            ValueError: the texts have more or fewer places for images than there are, a place is
                cut off, or an argument is not valid.
        """
        listed = list(_flat(images))
        found = self.image_processor(listed) if listed else BatchEncoding()
        texts = checked_texts([] if text is None else text, "text")
        encoded = BatchEncoding()
        if texts:
            grids = found.get("image_grid_thw", np.zeros((0, 3), int))
            counts = grids.prod(axis=1) // self.image_processor.merge_size**2
            encoded = self._tokens(_expanded(texts, counts), options)
        if not return_mm_token_type_ids:
            encoded.pop("mm_token_type_ids", None)
        made = {name: as_tensors(rows, return_tensors) for name, rows in encoded.items()}
        kind = return_tensors or "np"
        return BatchEncoding(made | {name: as_kind(x, kind) for name, x in found.items()})

    def read(
        self,
        texts: Sequence[str],
        images: Sequence[Sequence[Any]],
        *,
        padding_side: str = "right",
        **options: Any,
    ) -> ImageTexts:
        """Makes the inputs of the networks of texts with images, padded to one length.

        Args:
            texts: the texts, with `<|image_pad|>` for each image.
            images: for each text its images, each one a path or a PIL image.
            padding_side: "right" or "left".
            **options: others of the tokenizer's call, such as max_length.

        Raises:
            ValueError: see a call.
        """
        padding = {"padding": True, "padding_side": padding_side, **options}
        found = self(images, list(texts), return_tensors="np", **padding)
        types, mask = found.mm_token_type_ids, found.attention_mask
        grids = found.get("image_grid_thw", np.zeros((0, 3), int))
        patches = found.get("pixel_values", np.zeros((0, 1), np.float32))
        places = image_positions(types, grids, mask=mask, merge=self.image_processor.merge_size)
        ends = np.cumsum(grids.prod(axis=1))[:-1]
        return ImageTexts(
            ids=found.input_ids.astype(np.int32),
            mask=mask.astype(bool),
            positions=places,
            images=types == IMAGE,
            patches=tuple(np.split(patches, ends)) if len(grids) else (),
            grids=grids[:, 1:].astype(np.int32),
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = None,
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Any:
        """Renders a conversation by the checkpoint's chat template, as transformers' method.

        Args:
            conversation: messages, whose content is a text or a list of blocks such as {"type":
                "text", "text": "a cat"} and {"type": "image", "image": a path or a PIL image}; or a
                list of such conversations.
            chat_template: a template in the place of the checkpoint's.
            add_generation_prompt: whether the text ends where an answer would begin.
            tokenize: whether to return tokens and patches, see a call; False for the text.
            return_tensors: see a call.
            return_dict: whether to return all of a call; False for the tokens alone.
            processor_kwargs: other arguments of a call, such as padding.
            **variables: what else the template reads.

        Raises:
            ValueError: there is no template, it cannot render the conversation, or an argument has
                no meaning here.
        """
        if not conversation:
            raise ValueError("conversation must have at least one message (got none)")
        alone = isinstance(conversation[0], Mapping)
        chats: Sequence[Any] = [conversation] if alone else conversation
        template = self.chat_template if chat_template is None else chat_template
        texts = self.tokenizer.apply_chat_template(
            [[_plain(message) for message in chat] for chat in chats],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
        if not tokenize:
            return texts[0] if alone else texts
        images = [[*_images(chat)] for chat in chats]
        found = self(images, texts, return_tensors=return_tensors, **(processor_kwargs or {}))
        return found if return_dict else found.input_ids

    def _tokens(self, texts: list[str], options: Mapping[str, Any]) -> BatchEncoding:
        """Returns the tokens of texts and their types, as lists.

        Raises:
            ValueError: a part of an image is cut off.
        """
        found = self.tokenizer(texts, **options)
        ids = {self.image_token_id: IMAGE, self.tokenizer.tokenizer.token_to_id(_VIDEO): 2}
        types = [[ids.get(token, 0) for token in row] for row in found.input_ids]
        for text, row in zip(texts, types):
            if text.count(_IMAGE) != row.count(IMAGE):
                raise ValueError(
                    f"max_length must leave room for the tokens of images, {text.count(_IMAGE)} in "
                    f"a text (got {row.count(IMAGE)} after truncation)"
                )
        found["mm_token_type_ids"] = types
        return found


class Qwen2VLProcessor(VisionLanguageProcessor):
    """The processor that the editing checkpoints of Qwen-Image list for Qwen2.5-VL."""


class Qwen2_5_VLProcessor(VisionLanguageProcessor):
    """Qwen2.5-VL's processor."""


class Qwen3VLProcessor(VisionLanguageProcessor):
    """Qwen3-VL's processor."""


def _flat(images: Any) -> Iterator[Any]:
    """Yields the images of nested lists."""
    if isinstance(images, list | tuple):
        for image in images:
            yield from _flat(image)
    elif images is not None:
        yield images


def _expanded(texts: Sequence[str], counts: Iterable[int]) -> list[str]:
    """Returns texts with as many tokens for each image as it has parts; unchanged without images.

    Raises:
        ValueError: the texts have more or fewer places for images.
    """
    numbers = [int(count) for count in counts]
    places = sum(text.count(_IMAGE) for text in texts)
    if not numbers:
        return list(texts)
    if places != len(numbers):
        raise ValueError(
            f"text must have {_IMAGE} for each image, {len(numbers)} in all (got {places})"
        )
    remaining, found = iter(numbers), []
    for text in texts:
        first, *rest = text.split(_IMAGE)
        parts = ((_IMAGE * next(remaining), words) for words in rest)
        found.append("".join([first, *itertools.chain.from_iterable(parts)]))
    return found


def _blocks(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _images(chat: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yields the images of a conversation."""
    for block in itertools.chain.from_iterable(map(_blocks, chat)):
        if block.get("type") == "image":
            yield from (block[place] for place in _PLACES if place in block)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with texts in the place of images, which a template does not read."""
    if not (blocks := _blocks(message)):
        return dict(message)
    content = [
        {
            k: str(type(v)) if k in _PLACES and not isinstance(v, str) else v
            for k, v in block.items()
        }
        for block in blocks
    ]
    return {**message, "content": content}
