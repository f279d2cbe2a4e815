"""Makes examples of rows of data sets for a checkpoint: pixels, tokens, and what else it reads."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from diffusax.pipelines.families import Family
from diffusax.pipelines.families.policies import References
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import FRAMES, SHAPE, SIZE
from diffusax.training.data.clips import read_clip
from diffusax.training.data.examples import (
    ALONE,
    PIXELS,
    choose_edit,
    cut_images,
    numbered_names,
    prepare_images,
    read_image,
    write_caption,
)
from diffusax.training.data.options import (
    CaptionedDataConfig,
    ControlDataConfig,
    DataConfig,
    EditDataConfig,
    VideoDataConfig,
)
from diffusax.training.data.references import fit
from diffusax.training.data.sources import as_list
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.recipes.video_model import VideoModel
from diffusax.training.step.encoding import original_names


def check_references(family: Family, data: EditDataConfig) -> None:
    """Raises ValueError where rows without images to look at are asked for and cannot be."""
    for name in ("references_optional", "reference_dropout"):
        if getattr(data, name) and not family.edits.optional:
            raise ValueError(
                f"data.{name} cannot be for {family.name}, which reads the image to edit beside "
                "its own; leave it out"
            )


def caption_example(
    config: CaptionedDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns an image's pixels and its caption's tokens, by their names in a batch.

    size: the side of the cut image in pixels, unless the row has a size of its own.

    Raises:
        ValueError: the row cannot be used; says why.
    """
    images = _cut(config, base, size, row, rng, pixel_values=row[config.image_column])
    return {**images, **base.tokenize(write_caption(config, row[config.caption_column], rng))}


def clip_example(
    config: VideoDataConfig,
    base: VideoModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns a clip's pixels, f H W 3, its caption's tokens, and what CLIP reads of its frames.

    The arguments and errors are those of `caption_example`; all frames are cut alike.
    """
    frames = read_clip(
        row[config.image_column],
        row.get(FRAMES, config.num_frames[0]),
        rng,
        fps=base.fps if config.fps is None else config.fps,
        extraction=config.frame_extraction,
        samples=config.frame_samples,
    )
    pixels, _ = prepare_images(
        frames,
        rng,
        resolution=row.get(SIZE, size),
        center_crop=config.center_crop,
        random_flip=config.random_flip,
    )
    found = {"pixel_values": np.stack(pixels), **base.seen_frames(pixels)}
    return {**found, **base.tokenize(write_caption(config, row[config.caption_column], rng))}


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
    cells = {
        "pixel_values": row[config.image_column],
        "conditioning_pixel_values": row[config.conditioning_image_column],
    }
    images = _cut(config, base, size, row, rng, **cells)
    return {**images, **base.tokenize(write_caption(config, row[config.caption_column], rng))}


def edit_example(
    config: EditDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
) -> Element:
    """Returns the pixels of an edited image and of the originals, cut alike, and the edit's tokens.

    The arguments and errors are those of `caption_example`; row is one of an `EditSource`. Where
    they differ in size, the originals are resized to the edited image's size, unless the row has
    sizes of their own.
    """
    prompt, cell = choose_edit(row[config.edit_prompt_column], row[config.edited_image_column], rng)
    before = as_list(row[config.original_image_column])
    cells = dict(zip(numbered_names(PIXELS, len(before)), before, strict=True))
    if SHAPE in row:
        images = _cut_apart(config, base, size, row, rng, cell, cells)
    else:
        images = _cut(config, base, size, row, rng, pixel_values=cell, **cells)
    originals = [images[name] for name in original_names(images)]
    seen = base.seen_images([own.shape[:2] for own in originals])
    if seen is None:
        return {**images, **base.tokenize(prompt)}
    alone = base.tokenize(prompt) if config.reference_dropout else {}
    without = {ALONE + name: own for name, own in alone.items()}
    return {**images, **seen.tokenize(prompt, originals), **without}


def _cut_apart(
    config: EditDataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
    edited: Any,
    cells: Mapping[str, Any],
) -> Element:
    """Returns an edited image, cut, and the originals in cells in sizes of their own; by names."""
    unflipped = dataclasses.replace(config, random_flip=False)
    images = _cut(unflipped, base, size, row, rng, pixel_values=edited)
    policy = reference_policy(base.family, config)
    mirrored = policy is not None and policy.mirrored(len(cells))
    for (name, cell), own in zip(cells.items(), row[SHAPE], strict=True):
        images[name] = fit(read_image(cell), own, mirrored=mirrored)
    if config.random_flip and rng.random() < 0.5:
        images = {name: np.ascontiguousarray(own[:, ::-1]) for name, own in images.items()}
    return images


def reference_policy(family: Family, config: EditDataConfig) -> References | None:
    """Returns how pipelines of a family size images to look at; None where they are cut alike.

    Raises:
        ValueError: the family looks at none.
    """
    if config.reference_size != "own":
        return None
    if not isinstance(family.edits, References):
        raise ValueError(
            f"data.reference_size=own cannot be for {family.name}, which reads the image to edit "
            "beside its own; leave it out"
        )
    return family.edits


def _cut(
    config: DataConfig,
    base: BaseModel,
    size: int,
    row: dict[str, Any],
    rng: np.random.Generator,
    **cells: Any,
) -> Element:
    """Returns the images in cells by their names, with the weights of a mask and the sizes."""
    images, sizes, weights = cut_images(
        config, size, row, list(cells.values()), rng, factor=base.factor
    )
    found = {**dict(zip(cells, images, strict=True)), **weights}
    return found | dict.fromkeys(base.family.size_inputs, sizes)
