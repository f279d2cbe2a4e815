"""Makes examples of rows for a checkpoint, by the names in a batch of `DenoisingLoss`."""

from typing import Any

import numpy as np

from diffusax.training.data.batches import Element
from diffusax.training.data.examples import (
    CaptionedDataConfig,
    ControlDataConfig,
    EditDataConfig,
    choose_edit,
    cut_pictures,
    write_caption,
)
from diffusax.training.recipes.base_model import BaseModel


def caption_example(
    config: CaptionedDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns an image's pixels and its caption's tokens.

    size: the side of the cut image in pixels, unless the row has a size of its own.

    Raises:
        ValueError: the row cannot be used; says why.
    """
    cells = [row[config.image_column]]
    (pixels,), sizes, weights = cut_pictures(config, size, row, cells, rng, factor=base.factor)
    caption = write_caption(config, row[config.caption_column], rng)
    return {"pixel_values": pixels, **weights, **base.tokenize(caption), **_time_ids(base, sizes)}


def control_example(
    config: ControlDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns the pixels of an image and of the one that steers, cut alike, and the tokens.

    The arguments and errors are those of `caption_example`.
    """
    cells = [row[config.image_column], row[config.conditioning_image_column]]
    images, sizes, weights = cut_pictures(config, size, row, cells, rng, factor=base.factor)
    return {
        "pixel_values": images[0],
        "conditioning_pixel_values": images[1],
        **weights,
        **base.tokenize(write_caption(config, row[config.caption_column], rng)),
        **_time_ids(base, sizes),
    }


def edit_example(
    config: EditDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns the pixels of an edited image and of the original, cut alike, and the edit's tokens.

    The arguments and errors are those of `caption_example`. Where the two differ in size, the
    original is resized to the edited image's size.
    """
    prompt, cell = choose_edit(row[config.edit_prompt_column], row[config.edited_image_column], rng)
    cells = [cell, row[config.original_image_column]]
    (edited, original), sizes, weights = cut_pictures(
        config, size, row, cells, rng, factor=base.factor
    )
    return {
        "pixel_values": edited,
        "original_pixel_values": original,
        **weights,
        **base.tokenize(prompt),
        **_time_ids(base, sizes),
    }


def _time_ids(base: BaseModel, sizes: np.ndarray) -> Element:
    return dict.fromkeys(base.family.size_inputs, sizes)
