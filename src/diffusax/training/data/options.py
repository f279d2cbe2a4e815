"""The options of data sets: where examples come from, and how images and captions are prepared."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.options import Options
from diffusax.training.data.buckets import (
    parse_sizes,
)
from diffusax.training.data.captions import Lines
from diffusax.training.data.edits import EditColumns
from diffusax.training.data.sources import Kind

Extraction = Literal["head", "uniform", "random", "whole"]
"""Which part of a clip is taken; see `VideoDataConfig`."""


@dataclasses.dataclass(frozen=True)
class DataConfig(Options):
    """Where examples come from and how images are prepared."""

    group: ClassVar[str] = "data."
    captions_may_lack: ClassVar[bool] = False
    """Whether another text stands for captions that are missing."""

    path: str = ""
    """The data set: a folder or glob of Parquet shards, a folder of images, a Hub data-set id, or a
    folder that cache-latents wrote."""
    split: str | None = None
    """The split of the data set, such as train or test, several with + between, or all; by default
    train where the data set has splits."""
    subset: str | None = None
    """The subset of the data set that its card names; by default the card's default."""
    own_part: bool = False
    """Read the data as this process's own part, which download --part wrote to the machine's disk;
    by default all processes see the same data and share its rows."""
    streaming: bool = False
    """Read a Hub data set of Parquet files row group by row group instead of downloading it."""
    streaming_cache: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    """The gigabytes of row groups to keep on disk while streaming."""
    streaming_window: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """The number of row groups to mix at a time while streaming; each process reads its own. 0
    mixes all rows, which is good for data sets that fit into the cache."""
    resolution: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height and width of the training images in pixels; by default the model's own."""
    buckets: tuple[str, ...] = ()
    """The sizes of training images as WIDTHxHEIGHT, such as 512x512 448x576, instead of one square:
    each image gets the one whose aspect ratio is nearest, and a batch is of one size."""
    bucket_step: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Make such sizes: of at most resolution x resolution pixels, with sides that are multiples of
    this; 64 is usual, 0 makes none."""
    width_column: str = ""
    """A column with the images' widths in pixels; otherwise buckets read each image's header."""
    height_column: str = ""
    """A column with the images' heights in pixels."""
    center_crop: bool = False
    """Crop in the middle instead of anywhere."""
    random_flip: bool = False
    """Mirror half of the images."""
    mask: Literal["none", "alpha"] = "none"
    """What says how much each part of an image counts for the loss: nothing, or its own
    transparency, of which what is opaque counts."""
    mask_column: str = ""
    """A column with a mask for each image, of which what is white counts for the loss."""
    mask_normalized: bool = True
    """Divide a mask by its mean, so that small masks count as much as large ones."""
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """The number of processes that decode images; 0 decodes in threads of this one."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 4
    """The number of threads that read rows, in each process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.buckets)
        _check_buckets(self)
        if self.mask != "none" and self.mask_column:
            raise ValueError(
                f"data.mask={self.mask} and data.mask_column={self.mask_column} are two masks; "
                "leave one of them out"
            )
        if not self.mask_normalized and self.mask == "none" and not self.mask_column:
            raise ValueError(
                "data.mask_normalized=false does nothing without data.mask or data.mask_column; "
                "give one of these, or leave it out"
            )

    @property
    def bucketed(self) -> bool:
        """Whether images are cut to several sizes."""
        return bool(self.buckets or self.bucket_step)


def _check_buckets(config: DataConfig) -> None:
    """Raises ValueError where options do not go with images of several sizes."""
    columns = [name for name in ("width_column", "height_column") if getattr(config, name)]
    if len(columns) == 1:
        raise ValueError(
            f"data.{columns[0]} is given alone; give both data.width_column and data.height_column"
        )
    if not config.bucketed:
        if columns:
            raise ValueError(
                "data.width_column and data.height_column are only read for data.buckets or "
                "data.bucket_step; give one of these, or leave them out"
            )
        return
    if config.buckets and config.bucket_step:
        raise ValueError("data.buckets and data.bucket_step both make sizes; leave one of them out")
    if config.buckets and config.resolution:
        raise ValueError(
            f"data.resolution={config.resolution} does nothing beside data.buckets; leave it out, "
            "or give data.bucket_step instead of data.buckets"
        )
    if config.own_part:
        raise ValueError(
            "data.own_part cannot be with buckets, as all processes step through the same sizes; "
            "put the data where all of them see it"
        )
    if config.streaming and not columns:
        raise ValueError(
            "buckets of streamed images need their sizes in columns; give data.width_column and "
            "data.height_column, or leave data.streaming out"
        )
    if config.streaming_window:
        raise ValueError(
            f"data.streaming_window={config.streaming_window} cannot be with buckets, as each "
            "process mixes its own rows; leave it out, or leave out the buckets"
        )


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
    caption_lines: Lines = "first"
    """What a text file beside an image says with several lines: the caption is the first, any of
    them, drawn each time, or all of them."""
    trigger: str = ""
    """Words to put before each caption, with tag_separator between."""
    shuffle_tags: bool = False
    """Shuffle the tags of each caption anew each time."""
    keep_tags: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The number of tags at the beginning of a caption that stay where they are."""
    tag_separator: Annotated[str, Meta(min_length=1)] = ","
    """What stands between the tags of a caption."""


@dataclasses.dataclass(frozen=True)
class VideoDataConfig(CaptionedDataConfig):
    """A data set of clips with captions; images among them are clips of one frame."""

    num_frames: tuple[Annotated[int, Meta(ge=1, le=10_000)], ...] = (81,)
    """The number of frames of each example, one more than a multiple of four; of several, as
    81 41 1, each clip has the largest that it fills, and a batch is of one."""
    fps: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """The frames per second that are taken of clips, 0 for all that a file has; by default those of
    the model's videos, 16, or 24 for Wan 2.2 TI2V-5B."""
    frame_extraction: Extraction = "head"
    """Which part of a longer clip is taken: its beginning (head), any, drawn each time (random), or
    one of frame_samples that are spread evenly, drawn each time (uniform); or frames of the whole
    clip, so that it is faster (whole)."""
    frame_samples: Annotated[int, Meta(ge=2, le=10_000)] = 4
    """Of uniform: the number of parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_frames:
            raise ValueError("data.num_frames must be at least one number, such as 81 (got none)")
        object.__setattr__(self, "num_frames", tuple(sorted(set(self.num_frames))))
        default = VideoDataConfig.frame_samples
        if self.frame_extraction != "uniform" and self.frame_samples != default:
            raise ValueError(
                f"data.frame_samples={self.frame_samples} does nothing without "
                "data.frame_extraction=uniform; give both"
            )


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
    """The column with the images before the edit: bytes, or {bytes, path}, one or a list of those
    to look at; or the folder with images of the edited ones' names. By default usual names are
    looked for, too, as in the next ones."""
    reference_columns: tuple[str, ...] = ()
    """Columns or folders of further images to look at, in their order; rows may lack them."""
    references_optional: bool = False
    """Train rows without any image to look at as text to image, in batches of their own; by default
    such rows cannot be used."""
    reference_dropout: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of batches of edits whose images to look at are left out, so that they are trained
    as text to image; for networks that look at images."""
    reference_size: Literal["target", "own"] = "target"
    """The sizes of images to look at: target, where they are cut like the edited image, as in
    diffusers' scripts; or own, where each is whole and about as large as pipelines show it."""
    reference_resolution: Annotated[int, Meta(ge=8, le=8192)] = 1024
    """Of own: the side of the square whose area images to look at have at most."""
    reference_shapes: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Of own: the most shapes, each being the sizes of a row's images; rows with rarer shapes have
    the nearest of these, and the step is compiled for each."""
    edit_prompt_column: str = "edit_prompt"
    """The column with the instructions: a text, or a list from which one is drawn each time, with
    the edited image in the same place of its list, if that is one."""
    edited_image_column: str = "edited_image"
    """The column with the images after the edit: one, or as many as there are instructions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.references_optional and self.streaming:
            raise ValueError(
                "data.references_optional cannot be with data.streaming, where it is not known "
                "beforehand which rows lack images; download the data set"
            )
        if self.reference_size == "own" and (self.streaming or self.own_part):
            name = "streaming" if self.streaming else "own_part"
            raise ValueError(
                f"data.reference_size=own cannot be with data.{name}, as the sizes of all images "
                "have to be known; put the data where all processes see it"
            )
        for name in ("reference_resolution", "reference_shapes"):
            value = getattr(self, name)
            if self.reference_size != "own" and value != getattr(EditDataConfig, name):
                raise ValueError(
                    f"data.{name}={value} does nothing without data.reference_size=own; give both"
                )

    @property
    def columns(self) -> EditColumns:
        """The columns by the names of the options, and which of them are given."""
        roles = {
            "originals": "original_image_column",
            "prompt": "edit_prompt_column",
            "edited": "edited_image_column",
        }
        given = [
            r for r, name in roles.items() if getattr(self, name) != getattr(EditDataConfig, name)
        ]
        return EditColumns(
            (self.original_image_column,),
            self.edit_prompt_column,
            self.edited_image_column,
            further=self.reference_columns,
            fixed=frozenset(given),
            masks=self.mask_column,
            optional=self.references_optional,
        )


def kinds_of(config: DataConfig) -> dict[str, Kind]:
    """Returns what the columns hold that a data set's options name."""
    named: dict[str, Kind] = {}
    for field in dataclasses.fields(config):
        column = getattr(config, field.name)
        if not isinstance(column, str) or not column:
            continue
        if field.name.endswith(("image_column", "mask_column")):
            named[column] = "image"
        elif field.name in ("caption_column", "edit_prompt_column"):
            named[column] = "text or none" if config.captions_may_lack else "text"
    if not isinstance(config, EditDataConfig):
        return named
    originals = (config.original_image_column,) if config.references_optional else ()
    further: dict[str, Kind] = dict.fromkeys(
        (*originals, *config.reference_columns), "image or none"
    )
    return named | further
