"""Makes examples of rows: cuts images and chooses captions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from diffusax.images.reading import load_image, open_upright
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import SIZE, Size
from diffusax.training.data.options import CaptionedDataConfig, DataConfig

MAX_ASPECT = 16
"""Longer images are cut to this many times their shorter side before they are resized."""
MAX_CAPTION = 10_000
"""The number of a caption's characters that are read; no text encoder takes a tenth of them."""

LOSS_WEIGHTS = "loss_weights"
"""The name in a batch of what each latent's error counts for, where there are masks."""


def image_size(config: DataConfig, default: int, factor: int) -> int:
    """Returns the side of training images in pixels: the option's, or else the model's own.

    factor: the number of pixels per latent or token.

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
    (pixels,), _, _ = cut_images(config, size, row, [row[column]], rng)
    return pixels


def cut_images(
    config: DataConfig,
    size: int,
    row: dict[str, Any],
    cells: Sequence[Any],
    rng: np.random.Generator,
    *,
    factor: int = 1,
) -> tuple[list[np.ndarray], np.ndarray, Element]:
    """Reads images of a row, and resizes and crops them alike; see `prepare_images`.

    Args:
        config: the options.
        size: the side of the square that is cut out, unless the row has a size of its own.
        row: the row.
        cells: the cells with the images, first the one whose mask counts.
        rng: draws the place and the mirroring.
        factor: the number of pixels per latent.

    Returns:
        Each image's pixels, h w 3 uint8; SDXL's micro-conditioning; and where the options have
        masks, "loss_weights", see `mask_weights`.

    Raises:
        ValueError: an image cannot be read, or is none; says why.
    """
    first, *masks = _with_mask(config, row, cells[0])
    pixels, sizes = prepare_images(
        [first, *map(read_image, cells[1:]), *masks],
        rng,
        resolution=row.get(SIZE, size),
        center_crop=config.center_crop,
        random_flip=config.random_flip,
    )
    if not masks:
        return pixels, sizes, {}
    *pixels, mask = pixels
    weights = mask_weights(mask, factor, normalized=config.mask_normalized)
    return pixels, sizes, {LOSS_WEIGHTS: weights}


def mask_weights(mask: np.ndarray, factor: int, *, normalized: bool) -> np.ndarray:
    """Returns how much each latent counts for the loss: a mask's means over latents' pixels.

    With `normalized` they are divided by their mean, unless nothing counts.

    Args:
        mask: H W uint8, of which 255 counts.
        factor: the number of pixels per latent.
        normalized: whether to divide.

    Returns:
        h w float32.
    """
    h, w = (n // factor for n in mask.shape)
    means = mask.reshape(h, factor, w, factor).astype(np.float32).mean((1, 3)) / np.float32(255)
    total = means.mean()
    return means / total if normalized and total > 0 else means


def read_image(cell: Any) -> Image.Image:
    """Reads the image in a cell: RGB, upright, on white.

    cell: a file's bytes, or {bytes, path} as `datasets` writes them; sources have checked the path.
    An image that was read before is returned as it is.

    Raises:
        ValueError: the cell holds no image that Pillow can read.
    """
    return load_image(cell if isinstance(cell, Image.Image) else image_file(cell))


def image_file(cell: Any) -> bytes | Path | Image.Image:
    """Returns the file's bytes in a cell, its path, or the image where it has been read before.

    Raises:
        ValueError: the cell holds neither.
    """
    if isinstance(cell, dict):
        cell = cell.get("bytes") or Path(cell.get("path") or "")
    if not isinstance(cell, bytes | Path):
        raise ValueError(f"no image bytes, but {type(cell).__name__}")
    return cell


def prepare_images(
    images: Sequence[Image.Image],
    rng: np.random.Generator,
    *,
    resolution: int | Size,
    center_crop: bool,
    random_flip: bool,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Resizes images to cover a size, and cuts that size out of each, all at the same place.

    Images are resized to the size of the first one before that.

    Args:
        images: the images.
        rng: draws the place and the mirroring.
        resolution: the height and width in pixels, or the side of a square.
        center_crop: whether to cut in the middle.
        random_flip: whether to mirror half of the time.

    Returns:
        Each image's pixels, h w 3 uint8 (h w for shades of grey), and SDXL's micro-conditioning
        (Podell et al. 2023, section 2.2), 6 int32: height and width of the first before it was
        resized, top and left of the part in the resized and, where it is, mirrored image, height
        and width of the part.
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
    high, wide = (resolution, resolution) if isinstance(resolution, int) else resolution
    scale = max(wide / width, high / height)
    columns, rows = max(wide, round(width * scale)), max(high, round(height * scale))
    left, top = corner((columns - wide, rows - high))
    box = (left, top, left + wide, top + high)
    images = [_resized(image, columns, rows).crop(box) for image in images]
    if random_flip and rng.random() < 0.5:
        images = [ImageOps.mirror(image) for image in images]
        left = columns - wide - left
    sizes = np.array([height, width, top, left, high, wide], np.int32)
    return [np.asarray(image) for image in images], sizes


def choose_edit(prompts: Any, edited: Any, rng: np.random.Generator) -> tuple[str, Any]:
    """Returns an instruction and the cell of its image: the row's own, or one pair of two lists.

    Several instructions may be for one image, as in OmniEdit; then one is drawn.

    Raises:
        ValueError: the lists differ in length, or there is no text, or an empty one.
    """
    if isinstance(edited, list) and not isinstance(prompts, list):
        if len(edited) != 1:
            raise ValueError(f"one instruction for {len(edited)} edited images")
        (edited,) = edited
    elif isinstance(prompts, list):
        if not isinstance(edited, list):
            prompts = [text for text in prompts if not isinstance(text, str) or text.strip()]
            edited = [edited] * len(prompts)
        if len(prompts) != len(edited):
            raise ValueError(f"{len(prompts)} instructions for {len(edited)} edited images")
        if not prompts:
            raise ValueError("the instructions, or the lists of them, are empty")
        index = rng.integers(len(prompts))
        prompts, edited = prompts[index], edited[index]
    if not isinstance(prompts, str):
        raise ValueError(f"the instruction is not a text but {type(prompts).__name__}")
    if not prompts.strip():
        raise ValueError("the instruction is empty")
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


def write_caption(config: CaptionedDataConfig, cell: Any, rng: np.random.Generator) -> str:
    """Returns the caption in a cell, or one of several, as the options put it: trigger and tags.

    Raises:
        ValueError: the cell holds no text.
    """
    caption, separator = choose_caption(cell, rng), config.tag_separator
    if config.shuffle_tags:
        tags = [tag for part in caption.split(separator) if (tag := part.strip())]
        kept, others = tags[: config.keep_tags], tags[config.keep_tags :]
        caption = f"{separator} ".join([*kept, *(others[i] for i in rng.permutation(len(others)))])
    return f"{separator} ".join(filter(None, (config.trigger, caption)))


def clean_caption(caption: str) -> str:
    """Returns a caption on one line, valid Unicode; of very long texts only the beginning."""
    return " ".join(caption.split())[:MAX_CAPTION].encode("utf-8", "replace").decode()


def _with_mask(config: DataConfig, row: dict[str, Any], cell: Any) -> list[Image.Image]:
    """Returns the image in a cell, and its mask in shades of grey if the options have one."""
    if config.mask_column:
        return [read_image(cell), read_image(row[config.mask_column]).convert("L")]
    if config.mask == "none":
        return [read_image(cell)]
    image = cell if isinstance(cell, Image.Image) else open_upright(image_file(cell))
    if not image.has_transparency_data:
        return [load_image(image), Image.new("L", image.size, 255)]
    return [load_image(image), image.convert("RGBA").getchannel("A")]


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


OBJECT = (
    "a photo of a {}",
    "a photo of my {}",
    "a photo of one {}",
    "a photo of the {}",
    "the photo of a {}",
    "a photo of a clean {}",
    "a photo of a cool {}",
    "a photo of a dirty {}",
    "a photo of a nice {}",
    "a photo of a small {}",
    "a photo of the clean {}",
    "a photo of the cool {}",
    "a photo of the large {}",
    "a photo of the nice {}",
    "a photo of the small {}",
    "a photo of the weird {}",
    "a good photo of a {}",
    "a good photo of the {}",
    "a bright photo of the {}",
    "a dark photo of the {}",
    "a close-up photo of a {}",
    "a close-up photo of the {}",
    "a cropped photo of a {}",
    "a cropped photo of the {}",
    "a rendering of a {}",
    "a rendition of a {}",
    "a rendition of the {}",
)
STYLE = (
    "a painting in the style of {}",
    "the painting in the style of {}",
    "a bright painting in the style of {}",
    "a clean painting in the style of {}",
    "a close-up painting in the style of {}",
    "a cool painting in the style of {}",
    "a cropped painting in the style of {}",
    "a dark painting in the style of {}",
    "a dirty painting in the style of {}",
    "a good painting in the style of {}",
    "a large painting in the style of {}",
    "a nice painting in the style of {}",
    "a small painting in the style of {}",
    "a weird painting in the style of {}",
    "a picture in the style of {}",
    "a rendering in the style of {}",
    "a rendition in the style of {}",
)
TEMPLATES = {"object": OBJECT, "style": STYLE}
"""The captions by what the word stands for; {} is the word."""


LENGTHS = "lengths"
"""The name in a batch of the number of tokens that are not padding, where the family has it."""


PIXELS, LATENTS = "original_pixel_values", "original_latents"
"""The names in a batch of an image before the edit, and of its latents in a cache."""


GIVEN, SEEN_PIXELS, SEEN = "given_latents", "seen_pixel_values", "image_embeds"
"""The names in a batch of what is shown of clips' first frames: latents of a video of these, what
CLIP reads of them, and its hidden states."""


TEXT_IMAGES = "text_images"
"""The beginning of the names in a batch of images as the text encoder reads them."""


BEFORE, EMPTY, EMPTY_LENGTHS = "text_before", "empty_text", "empty_lengths"
"""The names in a batch of embeddings of texts that speak of images: what stands before an image,
and of an empty caption what stands behind the last, with the tokens that are no padding."""


ALONE = "alone_"
"""The beginning of the names in a batch of what stands for a caption without its images."""


MOST_ORIGINALS = 10
"""The most images before an edit, of which further ones have numbers: original_latents_2."""


PRIOR = "prior"
"""The name in a batch of whether an example is of DreamBooth's class, not of its subject."""


def numbered_names(name: str, count: int) -> list[str]:
    """Returns the names in a batch of so many images of a kind, in order."""
    return [name, *(f"{name}_{i}" for i in range(2, count + 1))][:count]


def is_text(name: str) -> bool:
    """Returns whether an entry of a batch holds a text's tokens, or images that it speaks of."""
    name = name.removeprefix(ALONE)
    return name == LENGTHS or name.startswith((ids_name("tokenizer"), TEXT_IMAGES))


def is_of_images(name: str) -> bool:
    """Returns whether an entry of a batch holds a text that speaks of images, or a part of it."""
    return is_text(name) or name.startswith((BEFORE, EMPTY, EMPTY_LENGTHS, TEXT_IMAGES))


def ids_name(tokenizer: str) -> str:
    """Returns the name in a batch of the ids of a tokenizer or processor: input_ids or so."""
    return tokenizer.replace("tokenizer", "input_ids").replace("processor", "input_ids")
