"""Makes examples of rows: cuts images and chooses captions."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from diffusax.images.pictures import load_image
from diffusax.training.data.batches import DataConfig

MAX_ASPECT = 16
"""Longer images are cut to this many times their shorter side before they are resized."""
MAX_CAPTION = 10_000
"""The number of a caption's characters that are read; no text encoder takes a tenth of them."""


@dataclasses.dataclass(frozen=True)
class ImageDataConfig(DataConfig):
    """A data set of images."""

    image_column: str = "image"
    """The column with the images: bytes, or {bytes, path} as `datasets` writes them."""


@dataclasses.dataclass(frozen=True)
class CaptionedDataConfig(ImageDataConfig):
    """A data set of images with captions."""

    caption_column: str = "text"
    """The column with the captions: a text, or a list from which one is drawn each time. Captions
    that are too long for the text encoder are cut off."""


@dataclasses.dataclass(frozen=True)
class ControlDataConfig(CaptionedDataConfig):
    """A data set of images with captions and with the images that steer a ControlNet."""

    conditioning_image_column: str = "conditioning_image"
    """The column with the images that steer, such as edges: bytes, or {bytes, path}."""


@dataclasses.dataclass(frozen=True)
class EditDataConfig(DataConfig):
    """A data set of images before and after an edit, with its instruction."""

    random_flip: bool = True
    """Mirror half of the pairs."""
    original_image_column: str = "input_image"
    """The column with the images before the edit: bytes, or {bytes, path}."""
    edit_prompt_column: str = "edit_prompt"
    """The column with the instructions: a text, or a list from which one is drawn each time, with
    the edited image in the same place of its list."""
    edited_image_column: str = "edited_image"
    """The column with the images after the edit: one, or as many as there are instructions."""


def picture_size(config: DataConfig, default: int, factor: int) -> int:
    """Returns the side of training images in pixels: the option's, or else the model's own.

    factor: the number of pixels per latent.

    Raises:
        ValueError: the side is not a multiple of the factor.
    """
    size = config.resolution or default
    if size % factor:
        low = max(size // factor, 1) * factor
        raise ValueError(
            f"data.resolution must be divisible by {factor}, the pixels per latent (got {size}); "
            f"use {low} or {low + factor}"
        )
    return size


def read_pixels(
    config: DataConfig, size: int, column: str, row: dict[str, Any], rng: np.random.Generator
) -> np.ndarray:
    """Reads the image in a column, resized and cropped as the options say: h w 3 uint8."""
    (pixels,), _ = prepare_pictures(config, size, [read_picture(row[column])], rng)
    return pixels


def prepare_pictures(
    config: DataConfig, size: int, pictures: Sequence[Image.Image], rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """Resizes and crops images alike, as the options say; see `prepare_images`."""
    return prepare_images(
        pictures,
        rng,
        resolution=size,
        center_crop=config.center_crop,
        random_flip=config.random_flip,
    )


def read_picture(cell: Any) -> Image.Image:
    """Reads the image in a cell: RGB, upright, on white.

    cell: a file's bytes, or {bytes, path} as `datasets` writes them; sources have checked the path.
    An image that was read before is returned as it is.

    Raises:
        ValueError: the cell holds no image that Pillow can read.
    """
    if isinstance(cell, dict):
        cell = cell.get("bytes") or Path(cell.get("path") or "")
    if isinstance(cell, Image.Image):
        return cell
    if not isinstance(cell, bytes | Path):
        raise ValueError(f"no image bytes, but {type(cell).__name__}")
    return load_image(cell)


def prepare_images(
    images: Sequence[Image.Image],
    rng: np.random.Generator,
    *,
    resolution: int,
    center_crop: bool,
    random_flip: bool,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Resizes the shorter side to `resolution` and cuts the same square out of each image.

    Images are resized to the size of the first one before that.

    Returns:
        Each image's pixels, h w 3 uint8, and SDXL's micro-conditioning (Podell et al. 2023, section
        2.2), 6 int32: height and width of the first before it was resized, top and left of the
        square in the resized and, where it is, mirrored image, height and width of the square.
    """

    def corner(spare: tuple[int, int]) -> tuple[int, int]:
        left, top = (round(n / 2) if center_crop else int(rng.integers(n + 1)) for n in spare)
        return left, top

    width, height = images[0].size
    images = [_resized(image, width, height) for image in images]
    # An image of 1x60000 would grow to gigabytes.
    longest = MAX_ASPECT * min(width, height)
    if max(width, height) > longest:
        own = min(width, longest), min(height, longest)
        left, top = corner((width - own[0], height - own[1]))
        width, height = own
        images = [image.crop((left, top, left + width, top + height)) for image in images]
    scale = resolution / min(width, height)
    columns, rows = (max(resolution, round(n * scale)) for n in (width, height))
    left, top = corner((columns - resolution, rows - resolution))
    box = (left, top, left + resolution, top + resolution)
    images = [_resized(image, columns, rows).crop(box) for image in images]
    if random_flip and rng.random() < 0.5:
        images = [ImageOps.mirror(image) for image in images]
        left = columns - resolution - left
    sizes = np.array([height, width, top, left, resolution, resolution], np.int32)
    return [np.asarray(image) for image in images], sizes


def choose_edit(prompts: Any, edited: Any, rng: np.random.Generator) -> tuple[str, Any]:
    """Returns an instruction and the cell of its image: the row's own, or one pair of two lists.

    Raises:
        ValueError: the lists differ in length, or there is no text.
    """
    if isinstance(prompts, list) != isinstance(edited, list):
        raise ValueError("instructions and edited pictures must both be lists, or neither")
    if isinstance(prompts, list):
        if len(prompts) != len(edited):
            raise ValueError(f"{len(prompts)} instructions for {len(edited)} edited pictures")
        if not prompts:
            raise ValueError("the lists of instructions and edited pictures are empty")
        index = rng.integers(len(prompts))
        prompts, edited = prompts[index], edited[index]
    if not isinstance(prompts, str):
        raise ValueError(f"the instruction is not a text but {type(prompts).__name__}")
    return prompts, edited


def choose_caption(cell: Any, rng: np.random.Generator) -> str:
    """Returns the caption in a cell, or a random one of several.

    Raises:
        ValueError: the cell holds no text.
    """
    if isinstance(cell, list) and cell:
        cell = cell[rng.integers(len(cell))]
    if not isinstance(cell, str):
        raise ValueError(f"the caption is not a text but {type(cell).__name__}")
    return cell


def clean_caption(caption: str) -> str:
    """Returns a caption on one line, valid Unicode; of very long texts only the beginning."""
    return " ".join(caption.split())[:MAX_CAPTION].encode("utf-8", "replace").decode()


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)
