"""The edits of a data set: images, instructions and captions, and how edits are made of them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from PIL import Image

from diffusax.boundary.options import Count, Options, Scale, Seed, Steps
from diffusax.training.data.buckets import Size, nearest_sizes, sizes_of_area
from diffusax.training.data.examples import prepare_images, read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.opening import open_data
from diffusax.training.data.options import EditDataConfig
from diffusax.training.data.sources import Kind, Source, as_list
from diffusax.training.data.summary import log_summary

ImageGuidance = Annotated[float, Meta(ge=1, le=1000)]
CAPTIONS = ("original_prompt", "edited_prompt")
"""The columns with captions of images before and after the edit, where no others are named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditSettings(Options):
    """The data to edit, and the options of the edits."""

    data: str
    """The data set, in any layout of edits that training reads: a folder or glob of Parquet shards,
    a folder of images with a metadata.jsonl or with records, or a Hub data-set id."""
    split: str | None = None
    """The split of the data set, such as test, several with + between, or all; by default train
    where the data set has splits."""
    original_image_column: str = "input_image"
    """The column with the images to edit; the usual names of others are looked for, too."""
    edit_prompt_column: str = "edit_prompt"
    """The column with the instructions."""
    edited_image_column: str | None = None
    """The column with images after the edit, with which edits are compared; by default edited_image
    and other usual names, where the data set has one."""
    caption_column: str | None = None
    """The column with captions of the images before the edit; by default original_prompt, where the
    data set has it."""
    edited_caption_column: str | None = None
    """The column with captions of the images after the edit; by default edited_prompt, where the
    data set has it."""
    samples: Count | None = None
    """The number of rows to edit, chosen by the seed; all rows of the data set by default."""
    image_guidance: tuple[ImageGuidance, ...] = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2)
    """The image guidance scales to compare, of InstructPix2Pix; the pipeline's own with none."""
    guidance: Scale | None = 7.5
    """The guidance scale of the instruction; the pipeline's own with None."""
    negative_prompt: str | None = None
    """A text to steer away from, in all edits."""
    steps: Steps | None = 100
    """The number of sampler steps; the pipeline's own with None."""
    resolution: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height and width in pixels to edit at; by default the model's own."""
    shapes: Literal["square", "own"] = "square"
    """Resize images and cut them to squares, or to the nearest of some shapes with the area of the
    square."""
    batch_size: Count = 8
    """The number of images to edit at a time, over all devices."""
    seed: Seed = 0
    """The random seed. Each row has noise of its own, the same at every scale."""


class Edit(NamedTuple):
    """A row: what to edit and how, and with what to compare the result.

    images: those to edit or to look at, one or more, of one size. before, after: captions of the
    images before and after the edit; None where there are none. target: an image after the edit, in
    the size of the first; None where there is none. seed: that of the noise. row: the row's number.
    """

    images: tuple[Image.Image, ...]
    instruction: str
    before: str | None = None
    after: str | None = None
    target: Image.Image | None = None
    seed: int = 0
    row: int = 0

    @property
    def image(self) -> Image.Image:
        """The first of the images."""
        return self.images[0]


class Shapes(NamedTuple):
    """The sizes to which images are brought, heights and widths in pixels."""

    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, side: int, shapes: str = "square", multiple: int = 8) -> "Shapes":
        """Makes the sizes for squares of `side` pixels or for images of their own shapes.

        multiple: what divides the sides of the model's images.
        """
        if shapes == "square":
            return cls(((side, side),))
        step = max(side // 16 // multiple, 1) * multiple
        return cls(sizes_of_area(side, step) if step <= side else ((side, side),))

    def cut(self, images: Sequence[Image.Image]) -> tuple[Image.Image, ...]:
        """Resizes images to cover the size that is nearest in shape to the first, and cuts it."""
        width, height = images[0].size
        size = self.sizes[int(nearest_sizes(self.sizes, np.array([[height, width]]))[0])]
        found, _ = prepare_images(
            images,
            np.random.default_rng(0),
            resolution=size,
            center_crop=True,
            random_flip=False,
        )
        return tuple(map(Image.fromarray, found))


class Edits(Sequence[Edit]):
    """The rows that the settings choose from a data set, read when they are asked for."""

    def __init__(
        self,
        settings: EditSettings,
        size: int | Shapes,
        *,
        references: int = 1,
        required: bool = True,
    ):
        """Opens the data set.

        Args:
            settings: where it is, its columns, and which rows to take.
            size: the height and width of the images in pixels, or the sizes to choose from.
            references: the most images to look at that a row may have.
            required: whether both captions must be there.

        Raises:
            ValueError: there is no such data set, a column is missing, or there are too few rows.
        """
        self.settings, self.references = settings, references
        self.shapes = Shapes.of(size) if isinstance(size, int) else size
        self.source, self.columns = open_edits(settings, required=required)
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
        return self.at(self.rows[index])

    def at(self, row: int) -> Edit:
        """Returns the edit of a row of the data set; its errors are those of an index."""
        values, columns = self.source[row], self.columns
        try:
            originals = as_list(values[columns.original])
            if not originals:
                raise ValueError(f"{columns.original} holds no image")
            if len(originals) > self.references:
                raise ValueError(
                    f"{columns.original} holds {len(originals)} images, and this model looks at "
                    f"{self.references}"
                )
            images = [read_image(cell) for cell in originals]
            if columns.edited is not None:
                images.append(read_image(_first(values[columns.edited])))
            instruction = _text(_first(values[columns.prompt]), columns.prompt)
            before, after = (
                None if column is None else _text(_first(values[column]), column)
                for column in (columns.before, columns.after)
            )
        except ValueError as error:
            raise ValueError(f"{self.source.name(row)}: {error}") from None
        cut = self.shapes.cut(images)
        target = None if columns.edited is None else cut[-1]
        seed = (self.settings.seed + row) % 2**32
        return Edit(cut[: len(originals)], instruction, before, after, target, seed, row)


class Columns(NamedTuple):
    """The columns of a data set's rows as they are read; None for what it does not have."""

    original: str
    prompt: str
    before: str | None
    after: str | None
    edited: str | None


def open_edits(settings: EditSettings, *, required: bool = False) -> tuple[Source, Columns]:
    """Opens the data set that the settings name, with as many of the columns as it has.

    Args:
        settings: where the data set is and what its columns are called.
        required: whether both captions must be there.

    Raises:
        ValueError: there is no such data set, or a column is missing that is named or required.
    """
    before = settings.caption_column or CAPTIONS[0]
    after = settings.edited_caption_column or CAPTIONS[1]
    named = settings.edited_image_column
    original, prompt = settings.original_image_column, settings.edit_prompt_column
    tried = [
        Columns(original, prompt, captions[0], captions[1], edited)
        for edited in (named or EditDataConfig.edited_image_column, *(() if named else (None,)))
        for captions in ((before, after), (None, after), (before, None), (None, None))
        if captions[0] or not (settings.caption_column or required)
        if captions[1] or not (settings.edited_caption_column or required)
    ]
    for columns in tried[:-1]:
        with contextlib.suppress(ValueError):
            return _open(settings, columns), columns
    return _open(settings, tried[-1]), tried[-1]


def _open(settings: EditSettings, columns: Columns) -> Source:
    if columns.edited is None:
        return _open_plainly(settings, columns)
    config = EditDataConfig(
        path=settings.data,
        split=settings.split,
        original_image_column=columns.original,
        edit_prompt_column=columns.prompt,
        edited_image_column=columns.edited,
    )
    # How many images a row has is checked where it is read, by which time the columns are known.
    return open_data(config, [name for name in columns if name], references=2**31)


def _open_plainly(settings: EditSettings, columns: Columns) -> Source:
    """Opens a data set without images after the edit, whose columns have exactly these names."""
    names = [name for name in columns if name]
    kinds: dict[str, Kind] = {**dict.fromkeys(names, "text"), columns.original: "image"}
    source = open_source(settings.data, names, kinds=kinds, split=settings.split)
    log_summary(source, names, kinds)
    return source


def batches_by_size(items: Iterator[Edit], size: int) -> Iterator[list[Edit]]:
    """Yields the edits in lists of at most `size` whose images have one size and one number."""
    waiting: dict[Any, list[Edit]] = {}
    for item in items:
        kind = item.image.size, len(item.images)
        waiting.setdefault(kind, []).append(item)
        if len(waiting[kind]) == size:
            yield waiting.pop(kind)
    yield from waiting.values()


def _first(cell: Any) -> Any:
    return cell[0] if isinstance(cell, list) and cell else cell


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} must be a text (got {type(value).__name__})")
    return value
