"""Qwen-Image-Edit, and -2509 and -2511 (Qwen 2025): Qwen-Image with images to look at.

The language model reads the images with the prompt, and what it makes of their parts is read beside
the text. The transformer is given their latents, too. They attend to the image that is generated,
so that each step computes all of them, also where they are modulated as at time zero (2511).

The parts of an image have the positions (frame, row, column) that the language model was trained
with. diffusers 0.42 with transformers 5 gives them those of a text, as its pipelines do not say
which tokens are an image's.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusax.images.conversion import to_pixels
from diffusax.images.references import of_area, size_of, size_of_area
from diffusax.models.network import Params
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.family import Component, Family, diffusers_components
from diffusax.pipelines.families.qwen_image import QWEN_IMAGE, check_length
from diffusax.pipelines.families.transformer import most_tokens, padded_length, padded_tokens
from diffusax.pipelines.families.vision_texts import (
    PLACE,
    ReadWithText,
    encode_with_images,
    given_images,
    token_ids,
    tokens_with_images,
)
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, Texts, Tokens
from diffusax.text.language_tokenizer import Qwen2Tokenizer, Qwen2VLProcessorTokenizer
from diffusax.text.vision_language import Qwen2VLProcessor

AREA = 1024 * 1024
"""The pixels of images to look at, as the autoencoder encodes them, and of the result."""
_CAPTION = 512
"""The tokens of captions in training."""
_BEGIN_TOKENS = 64
"""The tokens of the chat before a prompt and its images, which are not read."""
_CHAT = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture,"
    " objects, background), then explain how the user's text instruction should alter or modify the"
    " image. Generate a new image that meets the user's requirements while maintaining consistency "
    "with the original input where appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclasses.dataclass(frozen=True)
class ImageChats:
    """How the language model is given images with a prompt."""

    place: str
    """What stands for the image of a number in a chat."""
    area: int
    """The pixels of an image for the language model."""
    single: bool = False
    """Whether there may be only one image."""

    def images(self, call: Any) -> list[Any]:
        """Returns the images that a call looks at.

        Raises:
            ValueError: there is none, or there are several where one is read.
        """
        images = given_images(call)
        if not images:
            raise ValueError("image must be given: an image to edit or to look at")
        if self.single and len(images) > 1:
            raise ValueError(
                f"image must be one image for this checkpoint (got {len(images)}); call it for "
                "each, or use Qwen-Image-Edit-2509 or -2511, which look at several"
            )
        return images

    def default_size(self, components: Any, call: Any) -> tuple[int, int]:
        """Returns height and width of a megapixel in the shape of the last image."""
        width, height = size_of_area(*size_of(self.images(call)[-1]), AREA)
        return height, width

    def tokenize(
        self, tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
    ) -> Tokens:
        """Returns the ids of texts as chats, n t, with their lengths and the images.

        What is read of them beside the images has one of few lengths, see `padded_length`, unless
        length says to how many tokens they are filled up.

        Raises:
            ValueError: image is missing, cannot be read or is several for a checkpoint of one, or
                max_sequence_length, which changes nothing, is more than 1024.
        """
        check_length(call)
        images = [of_area(image, self.area) for image in self.images(call)]
        processor = _processor(tokenizers[0])
        chats = [self._chat(text, len(images)) for text in texts[0]]
        padded = _padded(processor, [image.size for image in images])
        padded = padded if length is None else lambda _: length
        return tokens_with_images(processor, chats, images, padded)

    def tokenize_caption(
        self, tokenizers: Sequence[Any], caption: str, length: int | None = None
    ) -> Tokens:
        """Returns the ids of a caption without images as a chat, t of a fixed length, and how many
        are no padding.
        """
        ids = list(tokenizers[0](self._chat(caption, 0)).input_ids)
        tokens = padded_tokens(
            tokenizers[0], [ids], max(_BEGIN_TOKENS + (length or _CAPTION), len(ids))
        )
        return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])

    def text_length(self, components: Any, call: Any) -> tuple[int, ...]:
        """Returns the length of a call's texts with padding, and the sizes of the images that they
        speak of, which are those of all in a batch.
        """
        sizes = [size_of_area(*size_of(image), self.area) for image in self.images(call)]

        def read(tokenizer: Any, text: str) -> list[int]:
            return token_ids(_processor(tokenizer), self._chat(text, len(sizes)), sizes)

        tokenizer, _, _ = components.text_encoders[0]
        padded = _padded(_processor(tokenizer), sizes)
        return padded(most_tokens(components, call, read)), *itertools.chain(*sizes)

    def _chat(self, text: str, images: int) -> str:
        places = "".join(self.place.format(i + 1) + PLACE for i in range(images))
        return _CHAT.format(places + text)


def _processor(tokenizer: Qwen2VLProcessorTokenizer) -> Qwen2VLProcessor:
    return Qwen2VLProcessor(tokenizer.image_processor, tokenizer)


def _padded(processor: Qwen2VLProcessor, sizes: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """Returns the function (tokens of chats) -> the length that they are filled up to.

    sizes: the widths and heights of images, of whose tokens all texts have as many.
    """
    known = _BEGIN_TOKENS + len(token_ids(processor, len(sizes) * PLACE, sizes))
    return lambda tokens: known + padded_length(tokens - known)


def reference(image: Any, multiple: int) -> np.ndarray:
    """Returns an image to look at as the autoencoder encodes it, 1 H W 3 in [-1, 1].

    Raises:
        ValueError: it cannot be read.
    """
    return to_pixels(of_area(image, AREA), factor=multiple)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts and their lengths, of which nothing is cut off."""
    return Conditions(prompt.context, lengths=prompt.lengths)


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens and images to the last hidden states, n t d, and their lengths.

    What stands before the images is left out. clip_skip has no effect.
    """
    options: dict[str, Any] = {"layers": (-1,)}
    if tokens.images is None:
        given = tokens.ids[0], tokens.lengths
        (states,) = encoders[0].apply(params[0], *given, method="hidden_states", **options)
    else:
        states = encode_with_images(encoders[0], params[0], tokens, **options)
    return Prompt(states[:, _BEGIN_TOKENS:], lengths=tokens.lengths - _BEGIN_TOKENS)


def _family(name: str, chats: ImageChats) -> Family:
    return dataclasses.replace(
        QWEN_IMAGE,
        name=name,
        components=(
            *diffusers_components(
                "transformer",
                ("processor", "text_encoder"),
                tokenizer=Qwen2VLProcessorTokenizer,
                optional=("processor", "text_encoder"),
            ),
            Component("tokenizer", "tokenizer", Qwen2Tokenizer, optional=True),
        ),
        tokenize=chats.tokenize,
        tokenize_caption=chats.tokenize_caption,
        encode=encode,
        conditions=conditions,
        batch_key=chats.text_length,
        default_size=chats.default_size,
        encoding=policies.take_mode,
        edits=ReadWithText(most=1 if chats.single else 10, read=reference),
    )


QWEN_IMAGE_EDIT = _family("Qwen-Image-Edit", ImageChats("", AREA, single=True))
"""Qwen-Image-Edit, which edits one image."""
QWEN_IMAGE_EDIT_PLUS = _family("Qwen-Image-Edit-2509", ImageChats("Picture {}: ", 384 * 384))
"""Qwen-Image-Edit-2509 and -2511, which look at several images."""
