"""Evaluates InstructPix2Pix over a range of image guidance (Brooks et al. 2023, figure 8)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from PIL import Image
from tqdm.auto import tqdm

from diffusax.boundary.options import Count, Options, Seed
from diffusax.evaluation.features import CLIP, batched
from diffusax.evaluation.metrics import (
    Mean,
    direction_similarity,
    image_similarity,
    mean_and_error,
    text_image_similarity,
)
from diffusax.training.data.examples import prepare_images, read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.sources import Kind, Source
from diffusax.training.data.summary import log_summary

ImageGuidance = Annotated[float, Meta(ge=1, le=1000)]
Guidance = Annotated[float, Meta(gt=1, le=1000)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditSettings(Options):
    """The data to edit, and the options of the edits."""

    data: str
    """The data set: a folder or glob of Parquet shards, a folder of images with a metadata.jsonl,
    or a Hub data-set id."""
    split: str | None = None
    """The split of the data set, such as test, several with + between, or all; by default train
    where the data set has splits."""
    original_image_column: str = "input_image"
    """The column with the images to edit."""
    edit_prompt_column: str = "edit_prompt"
    """The column with the instructions."""
    caption_column: str = "original_prompt"
    """The column with captions of the images before the edit."""
    edited_caption_column: str = "edited_prompt"
    """The column with captions of the images after the edit."""
    samples: Count | None = None
    """The number of rows to edit, chosen by the seed; all rows of the data set by default."""
    image_guidance: Annotated[tuple[ImageGuidance, ...], Meta(min_length=1)] = (
        1.0,
        1.2,
        1.4,
        1.6,
        1.8,
        2.0,
        2.2,
    )
    """The image guidance scales to compare."""
    guidance: Guidance = 7.5
    """The guidance scale of the instruction."""
    negative_prompt: str | None = None
    """A text to steer away from, in all edits."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 100
    """The number of sampler steps."""
    resolution: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height and width in pixels to edit at; by default the model's own. Images are resized and
    cut to squares."""
    batch_size: Count = 8
    """The number of images to edit at a time, over all devices."""
    seed: Seed = 0
    """The random seed. Each row has noise of its own, the same at every scale."""


class Edit(NamedTuple):
    """A row: the image, the instruction, the captions before and after, the seed of its noise."""

    image: Image.Image
    instruction: str
    before: str
    after: str
    seed: int


class Edits(Sequence[Edit]):
    """The rows that the settings choose from a data set, read when they are asked for."""

    def __init__(self, settings: EditSettings, size: int):
        """Opens the data set. size: the height and width of the images in pixels.

        Raises:
            ValueError: there is no such data set, a column is missing, or there are too few rows.
        """
        self.settings, self.size = settings, size
        columns = (
            settings.original_image_column,
            settings.edit_prompt_column,
            settings.caption_column,
            settings.edited_caption_column,
        )
        kinds: dict[str, Kind] = {**dict.fromkeys(columns, "text"), columns[0]: "image"}
        self.source: Source = open_source(settings.data, columns, kinds=kinds, split=settings.split)
        log_summary(self.source, columns, kinds)
        count = len(self.source) if settings.samples is None else settings.samples
        if not 0 < count <= len(self.source):
            raise ValueError(
                f"samples={count} cannot be chosen of the {len(self.source)} rows in "
                f"{settings.data}; give at most that number"
            )
        order = np.random.default_rng(settings.seed).permutation(len(self.source))
        self.rows = sorted(map(int, order[:count]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Returns the edit at an index.

        Raises:
            ValueError: the row lacks an image or a text; names the row.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.rows[index]
        values, options = self.source[row], self.settings
        try:
            image = read_image(values[options.original_image_column])
            instruction, before, after = (
                _text(values[column], column)
                for column in (
                    options.edit_prompt_column,
                    options.caption_column,
                    options.edited_caption_column,
                )
            )
        except ValueError as error:
            raise ValueError(f"{self.source.name(row)}: {error}") from None
        (pixels,), _ = prepare_images(
            [image],
            np.random.default_rng(0),
            resolution=self.size,
            center_crop=True,
            random_flip=False,
        )
        seed = (options.seed + row) % 2**32
        return Edit(Image.fromarray(pixels), instruction, before, after, seed)


@dataclasses.dataclass(frozen=True)
class EditScores:
    """The scores of one image guidance scale.

    image_similarity: that of the images before and after. direction_similarity: that of the change
    of images and captions. text_similarity: that of the edited images and their captions.
    edited: the first few images.
    """

    image_guidance: float
    image_similarity: Mean
    direction_similarity: Mean
    text_similarity: Mean
    edited: list[Image.Image]


def evaluate_edits(
    pipe: Any, clip: CLIP, edits: Sequence[Edit], settings: EditSettings, *, keep: int = 0
) -> Iterator[EditScores]:
    """Yields the scores of each image guidance scale, one after the other.

    The scales are data of one compiled program, and a row has the same noise at each of them.

    Args:
        pipe: an InstructPix2Pix pipeline, of SD or SDXL.
        clip: the CLIP that measures.
        edits: the rows, as `Edits` reads them.
        settings: the scales, steps and batch size.
        keep: the number of edited images to return.
    """
    original = clip.images(edit.image for edit in edits)
    before = clip.texts(edit.before for edit in edits)
    after = clip.texts(edit.after for edit in edits)
    batches = -(-len(edits) // settings.batch_size)
    with tqdm(total=batches * len(settings.image_guidance), desc="editing", disable=None) as bar:
        for scale in settings.image_guidance:
            parts: list[np.ndarray] = []
            kept: list[Image.Image] = []
            for batch in batched(edits, settings.batch_size):
                images = edit_batch(pipe, batch, settings, scale)
                parts.append(clip.images(images))
                kept += images[: keep - len(kept)]
                bar.update()
            edited = np.concatenate(parts)
            direction = direction_similarity(original, edited, before, after)
            yield EditScores(
                scale,
                mean_and_error(image_similarity(original, edited)),
                mean_and_error(direction),
                mean_and_error(text_image_similarity(edited, after)),
                kept,
            )


def edit_batch(
    pipe: Any, batch: Sequence[Edit], settings: EditSettings, image_guidance: float
) -> list[Image.Image]:
    """Returns the edited images of a batch, which is filled up so that all have one shape."""
    filled = [*batch, *[batch[-1]] * (settings.batch_size - len(batch))]
    width, height = batch[0].image.size
    size = pipe.family.edits.resize.keeping(height, width)
    negative = settings.negative_prompt
    images = pipe(
        [edit.instruction for edit in filled],
        negative_prompt=None if negative is None else [negative] * len(filled),
        image=[edit.image for edit in filled],
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        image_guidance_scale=image_guidance,
        seed=[edit.seed for edit in filled],
        **size,
    ).images
    return list(images[: len(batch)])


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} must be a text (got {type(value).__name__})")
    return value
