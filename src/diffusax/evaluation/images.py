"""Evaluates images and their captions: CLIP score and the Frechet Inception distance."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.evaluation.features import CLIP, Inception, batched
from diffusax.evaluation.measures import Measures
from diffusax.evaluation.metrics import (
    Gaussian,
    Mean,
    Moments,
    clip_score,
    load_statistics,
    mean_and_error,
)
from diffusax.training.data.examples import read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.sources import Kind
from diffusax.training.data.summary import log_summary

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ImageScores:
    """The scores of some images.

    clip_score: None without captions or CLIP. gaussian: the statistics of their Inception features,
    None without the network. means: PickScore, HPSv2 and the aesthetic score by their names in
    `measures.TITLES`.
    """

    pictures: int
    clip_score: Mean | None
    gaussian: Gaussian | None
    means: Mapping[str, Mean] = dataclasses.field(default_factory=dict)


def evaluate_images(
    pairs: Iterable[tuple[Any, str | None]],
    *,
    clip: CLIP | None = None,
    inception: Inception | None = None,
    measures: Measures | None = None,
) -> ImageScores:
    """Computes the scores of images with captions, which are read once.

    Args:
        pairs: each a PIL image, or a path, and its caption, which may be None where no score
            reads it.
        clip: the CLIP for the CLIP score.
        inception: the network for the statistics that FID compares.
        measures: PickScore, HPSv2 and the aesthetic score, those that are there.

    Raises:
        ValueError: there are no images, or less than two for statistics.
    """
    scores: list[np.ndarray] = []
    moments, count = Moments(), 0
    further: dict[str, list[np.ndarray]] = {}
    sizes = [network.batch_size for network in (clip, inception) if network is not None]
    if measures is not None:
        scorers = (measures.pickscore, measures.hps, measures.aesthetic)
        sizes += [scorer.clip.batch_size for scorer in scorers if scorer is not None]
    for batch in batched(pairs, max(sizes, default=1)):
        images = [image for image, _ in batch]
        count += len(batch)
        if measures is not None:
            found = measures.images(images, [text or "" for _, text in batch])
            for name, values in found.items():
                further.setdefault(name, []).append(values)
        if clip is not None:
            texts = clip.texts(text or "" for _, text in batch)
            scores.append(np.asarray(clip_score(clip.images(images), texts)))
        if inception is not None:
            moments.add(inception.images(images))
    if not count:
        raise ValueError("there are no images to score")
    return ImageScores(
        count,
        mean_and_error(np.concatenate(scores)) if scores else None,
        _gaussian(moments) if inception is not None else None,
        {name: mean_and_error(np.concatenate(parts)) for name, parts in further.items()},
    )


def statistics(
    inception: Inception, reference: str, image_column: str = "image", *, split: str | None = None
) -> Gaussian:
    """Returns the statistics that FID compares with: of a data set's images, or from an .npz file.

    split: the split of the data set; by default train, if there are splits.

    Raises:
        ValueError: the reference is neither, or has less than two images.
    """
    if reference.endswith(".npz"):
        return load_statistics(Path(reference))
    moments = Moments()
    for batch in batched(read_images(reference, image_column, split=split), inception.batch_size):
        moments.add(inception.images([image for image, _ in batch]))
    return _gaussian(moments)


def read_images(
    data: str,
    image_column: str,
    caption_column: str | None = None,
    samples: int | None = None,
    *,
    split: str | None = None,
) -> Iterable[tuple[Any, str | None]]:
    """Reads the first `samples` images of a data set, with captions if a column is given.

    split: the split of the data set; by default train, if there are splits.

    Raises:
        ValueError: there is no such data set, it is too small, or a row lacks an image or a text.
    """
    columns = [image_column] if caption_column is None else [image_column, caption_column]
    kinds: dict[str, Kind] = {image_column: "image"}
    if caption_column is not None:
        kinds[caption_column] = "text"
    source = open_source(data, columns, kinds=kinds, split=split)
    log_summary(source, columns, kinds)
    count = len(source) if samples is None else samples
    if count > len(source):
        raise ValueError(f"samples={count} is more than the {len(source)} rows of {data}")
    for index in range(count):
        row = source[index]
        caption: Any = None if caption_column is None else row[caption_column]
        if isinstance(caption, list) and caption:
            caption = caption[0]
        if caption_column is not None and not isinstance(caption, str):
            raise ValueError(f"{source.name(index)}: {caption_column} must be a text")
        try:
            image: Any = read_image(row[image_column])
        except ValueError as error:
            raise ValueError(f"{source.name(index)}: {error}") from None
        yield image, caption


def _gaussian(moments: Moments) -> Gaussian:
    gaussian = moments.gaussian()
    if moments.count <= gaussian.mu.size:
        log.warning(
            "%d images do not fill the covariance of %d features; compare FID only among sets of "
            "the same number, and take at least 10,000 for one that others can compare with",
            moments.count,
            gaussian.mu.size,
        )
    return gaussian
