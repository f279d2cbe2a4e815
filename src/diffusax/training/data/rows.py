"""Makes examples of rows for a checkpoint, by the names in a batch of `DenoisingLoss`."""

from typing import Any

import numpy as np

from diffusax.training.base_model import BaseModel
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import (
    CaptionedDataConfig,
    ControlDataConfig,
    EditDataConfig,
    choose_caption,
    choose_edit,
    prepare_pictures,
    read_picture,
)


def caption_example(
    config: CaptionedDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns an image's pixels and its caption's tokens.

    size: the side of the cut image in pixels.

    Raises:
        ValueError: the row cannot be used; says why.
    """
    (pixels,), sizes = prepare_pictures(config, size, [read_picture(row[config.image_column])], rng)
    caption = choose_caption(row[config.caption_column], rng)
    return {"pixel_values": pixels, **base.tokenize(caption), **_time_ids(base, sizes)}


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
    columns = (config.image_column, config.conditioning_image_column)
    pictures = [read_picture(row[column]) for column in columns]
    (pixels, conditioning), sizes = prepare_pictures(config, size, pictures, rng)
    return {
        "pixel_values": pixels,
        "conditioning_pixel_values": conditioning,
        **base.tokenize(choose_caption(row[config.caption_column], rng)),
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
    pictures = [read_picture(cell), read_picture(row[config.original_image_column])]
    (edited, original), sizes = prepare_pictures(config, size, pictures, rng)
    return {
        "pixel_values": edited,
        "original_pixel_values": original,
        **base.tokenize(prompt),
        **_time_ids(base, sizes),
    }


def _time_ids(base: BaseModel, sizes: np.ndarray) -> Element:
    return {"time_ids": sizes} if base.micro_conditioned else {}
