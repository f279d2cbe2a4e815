"""Opens the data set that a run's options name, and says which share of it this process reads."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np

from diffusax.pipelines.families.policies import References
from diffusax.training.data.buckets import (
    BucketedSource,
    Buckets,
    Size,
    nearest_sizes,
    parse_sizes,
    sizes_of_area,
)
from diffusax.training.data.edits import EditSource, beneath, too_many
from diffusax.training.data.finding import open_source
from diffusax.training.data.folders import FolderSource
from diffusax.training.data.image_sizes import (
    all_sizes_in_headers,
    clips_in_headers,
    sizes_in_columns,
    sizes_in_headers,
)
from diffusax.training.data.options import (
    CaptionedDataConfig,
    DataConfig,
    EditDataConfig,
    VideoDataConfig,
    kinds_of,
)
from diffusax.training.data.references import OwnSizes, buckets_by_shapes
from diffusax.training.data.sources import (
    MAX_BROKEN,
    ArrowSource,
    Facts,
    Source,
    check_columns,
)
from diffusax.training.data.streaming import StreamedSource
from diffusax.training.data.summary import log_summary

log = logging.getLogger(__name__)


def open_data(
    config: DataConfig,
    columns: Sequence[str],
    *,
    leave_out: str = "",
    references: int = 1,
    clips: bool = False,
) -> Source:
    """Opens the data set that the options name, with these columns and that of the masks.

    What was found is in the log; see `log_summary`. The rows of edits are those of an `EditSource`.

    Args:
        config: the options.
        columns: the columns to read.
        leave_out: a folder whose images are no part of it; see `list_folder`.
        references: the most images to look at that a row of edits may have.
        clips: whether videos are read like images.

    Raises:
        ValueError: there is no such data set, or a column is missing; lists those that exist. Or a
            row of edits is known to have more images to look at.
    """
    if config.streaming and config.own_part:
        raise ValueError(
            "data.own_part cannot be with data.streaming, where all processes see the same data"
        )
    if isinstance(config, CaptionedDataConfig):
        _check_tags(config)
    mask = config.mask_column
    found = _open(config, [*columns, *([mask] if mask else [])], leave_out, clips=clips)
    source: Source = found
    if _are_edits(config, columns):
        source = _as_edits(found, config, references)
    if isinstance(config, CaptionedDataConfig) and config.caption_lines != "first":
        _check_lines(config, source)
    log_summary(source, columns, kinds_of(config), clips=clips)
    return source


def open_images(
    config: DataConfig,
    columns: Sequence[str],
    *,
    image_column: str,
    side: int,
    factor: int,
    leave_out: str = "",
    references: int = 1,
    policy: References | None = None,
) -> Source:
    """Opens the data set that the options name; in buckets, where the options have some.

    Edits whose rows differ in the number of images to look at are in buckets, too: a batch is of
    one number.

    Args:
        config: the options.
        columns: the columns to read.
        image_column: the one with the images whose size decides.
        side: the side in pixels of the square whose area the buckets have, if their sizes are not
            given.
        factor: the number of pixels per latent or token, which divides all sizes.
        leave_out: a folder whose images are no part of the data set; see `list_folder`.
        references: the most images to look at that a row of edits may have.
        policy: how pipelines bring these to their sizes; None where they are cut like the others.

    Raises:
        ValueError: the errors of `open_data`; a size is not a multiple of the factor; or more than
            one image in a hundred cannot be read.
    """
    source = open_data(config, columns, leave_out=leave_out, references=references)
    counts = np.zeros(0, int)
    optional = isinstance(config, EditDataConfig) and config.references_optional
    if (references > 1 or optional or policy is not None) and not config.streaming:
        counts = reference_counts(source)
        counts = counts if optional else np.where(counts, counts, -1)
    differ = len(np.unique(counts[counts >= 0])) > 1
    if not config.bucketed and not differ and policy is None:
        return source
    if config.bucketed:
        sizes = bucket_sizes(config, side, factor)
        buckets = Buckets(sizes, nearest_sizes(sizes, _image_sizes(source, config, image_column)))
    else:
        buckets = Buckets(((side, side),), np.zeros(len(source), np.int16))
    if policy is not None and isinstance(config, EditDataConfig):
        own = OwnSizes(policy, config.reference_resolution, factor, config.reference_shapes)
        images = all_sizes_in_headers(source, config.original_image_column, config.threads)
        shapes = [
            None if count < 0 else shape
            for count, shape in zip(counts, own.shapes(images), strict=True)
        ]
        buckets = buckets_by_shapes(buckets, shapes)
    elif differ:
        buckets = buckets.by_references(counts)
    log_buckets(buckets)
    return BucketedSource(source, buckets)


def open_clips(
    config: VideoDataConfig,
    columns: Sequence[str],
    *,
    side: int,
    factor: int,
    step: int,
    fps: float,
    leave_out: str = "",
) -> Source:
    """Opens the clips that the options name; in buckets of their sizes and numbers of frames.

    Args:
        config: the options.
        columns: the columns to read, first that of the clips.
        side: see `open_images`.
        factor: the number of pixels per token, which divides all sizes.
        step: the number that the frames after the first are a multiple of.
        fps: the frames per second.
        leave_out: see `open_images`.

    Raises:
        ValueError: the errors of `open_images`; options are of images alone; or more than one clip
            in a hundred has too few frames.
    """
    _check_clips(config, step)
    source = open_data(config, columns, leave_out=leave_out, clips=True)
    if not config.bucketed and len(config.num_frames) == 1:
        return source
    whole = bucket_sizes(config, side, factor) if config.bucketed else ((side, side),)
    if config.width_column:
        buckets = Buckets(whole, nearest_sizes(whole, _image_sizes(source, config, columns[0])))
    else:
        facts = clips_in_headers(source, columns[0], config.threads)
        sizes = np.array([(0, 0) if own is None else (own.height, own.width) for own in facts])
        frames = np.array([0 if own is None else own.available(fps) for own in facts])
        buckets = Buckets(whole, nearest_sizes(whole, sizes)).by_frames(frames, config.num_frames)
        _check_lengths(source, (frames > 0) & (buckets.of_row < 0), config.num_frames[0])
    log_buckets(buckets)
    return BucketedSource(source, buckets)


def _check_clips(config: VideoDataConfig, step: int) -> None:
    """Raises ValueError where numbers of frames cannot be, or options are of images alone."""
    for count in config.num_frames:
        if count % step != 1 % step:
            low = (count - 1) // step * step + 1
            raise ValueError(
                f"data.num_frames must be one more than a multiple of {step} (got {count}); use "
                f"{low} or {low + step}"
            )
    if config.mask_column or config.mask != "none":
        name = "mask_column" if config.mask_column else "mask"
        raise ValueError(f"data.{name} is of images, and cannot be with clips; leave it out")
    for name in ("streaming", "own_part", "width_column"):
        if getattr(config, name) and len(config.num_frames) > 1:
            raise ValueError(
                f"data.num_frames must be one number with data.{name}, as the lengths of all clips "
                f"would have to be read beforehand (got {len(config.num_frames)})"
            )


def _check_lengths(source: Source, short: np.ndarray, least: int) -> None:
    """Logs the clips that fill no number of frames. Raises ValueError where they are too many.

    short: whether each row's clip does not, n bool. least: the smallest number.
    """
    count = int(short.sum())
    if not count:
        return
    text = (
        f"{count} of {len(short)} clips have fewer than {least} frames, such as "
        f"{source.name(int(short.argmax()))}"
    )
    if count > MAX_BROKEN * len(short):
        raise ValueError(f"{text}; name a smaller number in data.num_frames, too, or remove them")
    log.warning("%s; these are left out", text)


def reference_counts(source: Source) -> np.ndarray:
    """Returns how many images to look at each row of edits has: n int; 0 where none are there."""
    if not isinstance(source, EditSource):
        return np.ones(len(source), int)
    rows = source.source
    if isinstance(rows, FolderSource):
        cells: Iterable[Any] = rows.files
        return np.array([len(source.originals_of(cell)) for cell in cells])
    assert isinstance(rows, ArrowSource)
    columns = (*source.found.originals, *source.found.further)
    none = np.zeros(len(rows), int)
    return np.sum([none, *(rows.count_cells(name) for name in columns)], axis=0)


def bucket_sizes(config: DataConfig, side: int, factor: int) -> tuple[Size, ...]:
    """Returns the sizes of the options' buckets; see `open_images`."""
    if config.bucket_step:
        if config.bucket_step % factor:
            raise ValueError(
                f"data.bucket_step must be divisible by {factor}, the pixels per latent (got "
                f"{config.bucket_step}); use {config.bucket_step // factor * factor + factor}"
            )
        return sizes_of_area(side, config.bucket_step)
    sizes = parse_sizes(config.buckets)
    for height, width in sizes:
        if height % factor or width % factor:
            h, w = (max(n // factor, 1) * factor for n in (height, width))
            raise ValueError(
                f"data.buckets must have sides divisible by {factor}, the pixels per latent (got "
                f"{width}x{height}); use {w}x{h}"
            )
    return sizes


def log_buckets(buckets: Buckets) -> None:
    """Logs how many images each size has."""
    used = [i for i, count in enumerate(buckets.counts) if count]
    counts = ", ".join(f"{buckets.name(i)} {buckets.counts[i]}" for i in used)
    log.info("images by size: %s", counts)


def own_share(config: DataConfig) -> tuple[int, int]:
    """Returns (i, n): this process reads the i-th of n shares of the rows that it sees."""
    return (0, 1) if config.own_part else (jax.process_index(), jax.process_count())


def _check_lines(config: CaptionedDataConfig, source: Source) -> None:
    """Raises ValueError where no text file has a caption, so that its lines do not matter."""
    kinds = getattr(source, "facts", Facts()).captions
    if not any(kind.startswith((".", "default.")) for kind in kinds):
        raise ValueError(
            f"data.caption_lines={config.caption_lines} does nothing, as the captions of "
            f"{config.path} are in no text files beside the images; leave it out"
        )


def _check_tags(config: CaptionedDataConfig) -> None:
    """Raises ValueError where options of tags are given that change no caption."""
    if config.keep_tags and not config.shuffle_tags:
        raise ValueError(
            f"data.keep_tags={config.keep_tags} does nothing without data.shuffle_tags; give both, "
            "or leave it out"
        )
    separator = config.tag_separator
    if separator != type(config).tag_separator and not (config.shuffle_tags or config.trigger):
        raise ValueError(
            f"data.tag_separator={separator!r} does nothing without data.shuffle_tags or "
            "data.trigger; give one of these, or leave it out"
        )


def _are_edits(config: DataConfig, columns: Sequence[str]) -> TypeGuard[EditDataConfig]:
    """Returns whether the columns are those of edits; caches' options name others, too."""
    return isinstance(config, EditDataConfig) and config.edited_image_column in columns


def _as_edits(
    source: ArrowSource | FolderSource | StreamedSource, config: EditDataConfig, references: int
) -> EditSource:
    """Returns the rows of edits in one form.

    Raises:
        ValueError: a row has more images to look at than the model takes, as far as that is known.
    """
    asked = config.columns
    if isinstance(source, FolderSource):
        # Of optional images the first row may have none.
        some = slice(None) if asked.optional else slice(1)
        parts = (*source.files[some], *source.rows[some])
        names = tuple(dict.fromkeys(name for part in parts for name in part))
    else:
        names = source.columns
    columns = asked.find(names) or asked
    # To count the images of streamed rows is to fetch them all.
    streamed = isinstance(source, StreamedSource)
    alike = len(columns.originals + columns.further) if streamed else 0
    found = EditSource(source, columns, asked, references, alike)
    if isinstance(source, FolderSource):
        counts = reference_counts(found)
        if counts.max() > references:
            row = int(counts.argmax())
            raise ValueError(too_many(source.name(row), int(counts[row]), references))
    elif {*found.found.names} - {*asked.names}:
        log.info("data: the columns of edits are %s", ", ".join(found.found.names))
    return found


def _open(
    config: DataConfig, columns: Sequence[str], leave_out: str = "", *, clips: bool = False
) -> ArrowSource | FolderSource | StreamedSource:
    """Opens the data set with these columns, and checks what they hold."""
    edits = None
    if _are_edits(config, columns):
        edits, columns = config.columns, [*columns, *config.reference_columns]
    kinds = {name: kind for name, kind in kinds_of(config).items() if name in columns}
    if config.streaming:
        return StreamedSource.open(
            config.path,
            columns,
            limit=int(config.streaming_cache * 1e9),
            window=config.streaming_window,
            split=config.split,
            subset=config.subset,
            kinds=kinds,
            edits=edits,
        )
    return open_source(
        config.path,
        columns,
        kinds=kinds,
        split=config.split,
        subset=config.subset,
        leave_out=leave_out,
        caption_lines=getattr(config, "caption_lines", "first"),
        edits=edits,
        clips=clips,
    )


def _image_sizes(source: Source, config: DataConfig, image_column: str) -> np.ndarray:
    columns = (config.height_column, config.width_column)
    if not config.width_column:
        return sizes_in_headers(source, image_column, config.threads)
    rows = beneath(source)
    if isinstance(rows, FolderSource):
        # Its rows hold no images, but only where they are.
        check_columns(columns, rows.rows[0], Path(rows.folder))
        return sizes_in_columns(rows, columns, config.threads)
    return sizes_in_columns(_open(config, columns), columns, config.threads)
