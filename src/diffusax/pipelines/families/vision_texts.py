"""Texts that speak of images, as the vision-language encoders of some families read them.

All texts of a call speak of the same images, whose tokens stand at the same places in all of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.references import as_images
from diffusax.models.encoders.qwen3_vl_vision import encode_each
from diffusax.models.network import Network, Params
from diffusax.pipelines.families.policies import References
from diffusax.pipelines.plan.plan import ImageSpans, Prompt, TextImages, Tokens
from diffusax.text.vision_language import VisionLanguageProcessor

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in a text."""


@dataclasses.dataclass(frozen=True)
class ReadWithText(References):
    """The denoiser looks at images that the text encoder reads with the prompt."""

    reads_with_text: ClassVar[bool] = True
    fixed_area: bool = True


def given_images(call: Any) -> list[Any]:
    """Returns the images of a call, all of which are for every prompt.

    Raises:
        ValueError: the call has an empty list, or lists of images.
    """
    images = [] if call.image is None else as_images(call.image)
    if any(isinstance(image, list | tuple) for image in images):
        raise ValueError("image must be one list of images, all of which are for every prompt")
    return images


def images_of(call: Any) -> list[Any]:
    """Returns the images that a call's texts speak of.

    Raises:
        ValueError: for the reasons of `given_images`; or there are embeddings in the place of a
            text, which know nothing of the images.
    """
    images = given_images(call)
    if not images:
        return []
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        if getattr(call, name) is not None:
            raise ValueError(
                f"{name} must be left out with image; give the text, which is read with the images"
            )
    return images


def tokens_with_images(
    processor: VisionLanguageProcessor,
    texts: Sequence[str],
    images: Sequence[Any],
    padded: Callable[[int], int],
) -> Tokens:
    """Returns the tokens of texts and the patches of the images that all of them speak of.

    Args:
        processor: the checkpoint's.
        texts: chats, with `PLACE` for each image. They differ only behind the last of these.
        images: paths or PIL images.
        padded: a function (the most tokens) -> the length that all are filled up to.

    Raises:
        ValueError: a text has more tokens than that.
    """
    n, k = len(texts), len(images)
    read = processor.read(texts, [images] * n)
    more = padded(read.ids.shape[1]) - read.ids.shape[1]
    if more < 0:
        count, most = read.ids.shape[1], padded(read.ids.shape[1])
        raise ValueError(f"a text has {count} tokens with its images; shorten it, {most} fit here")
    behind = (0, 0), (0, more)
    pad = processor.tokenizer.pad_token_id
    edges = np.flatnonzero(np.diff(read.images[0], prepend=False, append=False))
    spans = tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
    found = TextImages(
        places=np.pad(read.images, behind),
        positions=np.pad(read.positions.transpose(1, 0, 2), ((0, 0), *behind)),
        patches=tuple(np.stack(read.patches[i::k]) for i in range(k)),
        grids=read.grids.reshape(n, k, 2),
        spans=ImageSpans(begin_of(read.ids[0]), spans),
    )
    ids = np.pad(read.ids, behind, constant_values=pad)
    return Tokens((ids,), lengths=read.mask.sum(axis=1, dtype=np.int32), images=found)


def begin_of(ids: np.ndarray) -> int:
    """Returns where a chat's second turn begins: with the token that its first begins with."""
    return int(np.flatnonzero(ids == ids[0])[1])


def token_ids(
    processor: VisionLanguageProcessor, text: str, sizes: Sequence[tuple[int, int]]
) -> list[int]:
    """Returns the ids of a text that speaks of images of such widths and heights."""
    reader = processor.image_processor
    unit = (reader.patch_size * reader.merge_size) ** 2
    areas = (math.prod(reader.resized(height, width)) for width, height in sizes)
    counts = (area // unit for area in areas)
    found = list[int]()
    for token in processor.tokenizer(text).input_ids:
        found += [token] * (next(counts) if token == processor.image_token_id else 1)
    return found


def encode_with_images(
    encoder: Network, params: Params, tokens: Tokens, **options: Any
) -> jax.Array:
    """Returns the hidden states of texts, n t d, whose images are the same.

    options: others of the encoder's method.
    """
    images: Any = tokens.images
    run = functools.partial(encoder.apply, params, method="encode_images")
    seen = encode_each(run, [own[0] for own in images.patches], images.grids[0])
    rows = len(images.places)
    each = jax.tree.map(lambda x: jnp.tile(x, (rows, *[1] * (x.ndim - 1))), seen)
    read = each.tokens(images.places)
    given = tokens.ids[0], tokens.lengths
    (states,) = encoder.apply(
        params,
        *given,
        method="hidden_states",
        position_ids=images.positions.transpose(1, 0, 2),
        images=read,
        **options,
    )
    return states


def apart(states: jax.Array, tokens: Tokens) -> Prompt:
    """Returns what stands before each image and what stands behind the last, without the images."""
    images: Any = tokens.images
    starts, ends = zip(*images.spans.spans)
    pieces = zip((images.spans.begin, *ends), starts, strict=False)
    before = tuple(states[:, start:end] for start, end in pieces)
    return Prompt(states[:, ends[-1] :], lengths=tokens.lengths - ends[-1], before=before)
