"""Edits the rows of a data set and measures the results, over scales of image guidance.

Figure 8 of Brooks et al. 2023 is such a run, and so is one of any other editor at its own guidance.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from diffusax.boundary.files import written_whole
from diffusax.evaluation.editors import Editor, opened_editor
from diffusax.evaluation.edits import Edit, Edits, EditSettings, batches_by_size
from diffusax.evaluation.features import CLIP
from diffusax.evaluation.measures import TITLES, Measures
from diffusax.evaluation.metrics import Mean, mean_and_error

Row = Mapping[str, float]
"""The scores of a row by name, as in `TITLES`."""


@dataclasses.dataclass(frozen=True)
class EditScores:
    """The scores of one image guidance scale.

    image_guidance: None for the pipeline's own. means: the scores by name, as in
    `measures.TITLES`. edited: the first few images.
    """

    image_guidance: float | None
    means: Mapping[str, Mean]
    edited: list[Image.Image]

    @property
    def image_similarity(self) -> Mean:
        """That of CLIP's features of the images before and after."""
        return self.means["image_similarity"]

    @property
    def direction_similarity(self) -> Mean:
        """That of the change of images and of captions."""
        return self.means["direction_similarity"]

    @property
    def text_similarity(self) -> Mean:
        """That of the edited images and their captions."""
        return self.means["text_similarity"]


def evaluate_edits(
    pipe: Any,
    measures: Measures | CLIP,
    edits: Sequence[Edit],
    settings: EditSettings,
    *,
    keep: int = 0,
    folder: Path | None = None,
    save_images: bool = False,
) -> Iterator[EditScores]:
    """Yields the scores of each image guidance scale, one after the other.

    The scales are data of one compiled program, and a row has the same noise at each of them.

    Args:
        pipe: a pipeline that edits images by instructions.
        measures: what measures; a CLIP alone for its similarities.
        edits: the rows, as `Edits` reads them.
        settings: the scales, steps and batch size.
        keep: the number of edited images to return.
        folder: a folder for the rows' scores, rows.jsonl, and for those images. Rows that are in it
            are not edited again, so that a run that was interrupted goes on.
        save_images: whether to write all images there, below images/.

    Raises:
        ValueError: the pipeline does not edit images, or an option is wrong for it; a row cannot be
            read, or the folder's file.
    """
    measures = Measures(clip=measures) if isinstance(measures, CLIP) else measures
    scales: tuple[float | None, ...] = settings.image_guidance or (None,)
    log = RowLog(folder, edits, len(edits) if save_images else keep)
    total = len(edits) * len(scales)
    missing = {scale: log.missing(scale) for scale in scales}
    done = total - sum(map(len, missing.values()))
    bar = tqdm(total=total, initial=done, desc="editing", unit="image", disable=None)
    with bar, opened_editor(pipe, settings) as edit:
        for scale in scales:
            rows = (edits[i] for i in missing[scale])
            for batch in batches_by_size(rows, settings.batch_size):
                _measure(edit, measures, batch, scale, log)
                bar.update(len(batch))
            yield EditScores(scale, means(log.rows(scale)), log.images(scale, keep))


def _measure(
    edit: Editor, measures: Measures, batch: Sequence[Edit], scale: float | None, log: "RowLog"
) -> None:
    images = edit(batch, scale)
    scores = measures.edits(batch, images)
    for i, (own, image) in enumerate(zip(batch, images, strict=True)):
        log.add(scale, own.row, {name: float(values[i]) for name, values in scores.items()}, image)
    log.flush()


def means(rows: Sequence[Row]) -> dict[str, Mean]:
    """Returns the mean of each score over rows, and its standard error."""
    return {
        name: mean_and_error([row[name] for row in rows])
        for name in TITLES
        if rows and all(name in row for row in rows)
    }


class RowLog:
    """The scores of rows, kept in a folder's rows.jsonl if there is one, and the first images."""

    def __init__(self, folder: Path | None, edits: Sequence[Edit], images: int):
        """Reads what an earlier run has left.

        images: the number of images of each scale to keep, the first ones.

        Raises:
            ValueError: a line of the file cannot be read.
        """
        self._folder = folder
        self._numbers: Callable[[int], int] = _numbers_of(edits)
        self._count = len(edits)
        self._shown = {self._numbers(i) for i in range(min(images, self._count))}
        self._rows: dict[tuple[float | None, int], Row] = {}
        self._images: dict[tuple[float | None, int], Image.Image] = {}
        self._lines: list[str] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._read(folder / "rows.jsonl")

    def missing(self, scale: float | None) -> list[int]:
        """Returns the places among the edits of those without scores, or without their image."""
        return [
            i
            for i, row in ((i, self._numbers(i)) for i in range(self._count))
            if (scale, row) not in self._rows
            or (row in self._shown and not self._has_image(scale, row))
        ]

    def add(self, scale: float | None, row: int, scores: Row, image: Image.Image) -> None:
        """Adds a row, whose line is written by `flush`."""
        self._rows[scale, row] = scores
        if row in self._shown:
            if (file := self._file(scale, row)) is None:
                self._images[scale, row] = image
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(file) as partial:
                    image.save(partial, format="png")
        self._lines.append(json.dumps({"row": row, "image_guidance": scale, **scores}))

    def flush(self) -> None:
        """Writes the rows that were added."""
        if self._folder is not None:
            with (self._folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._lines))
        self._lines = []

    def rows(self, scale: float | None) -> list[Row]:
        """Returns the scores of all rows at a scale, in their order."""
        return [self._rows[scale, self._numbers(i)] for i in range(self._count)]

    def images(self, scale: float | None, count: int) -> list[Image.Image]:
        """Returns the first images of a scale, in the order of their rows."""
        return [self._image(scale, self._numbers(i)) for i in range(min(count, self._count))]

    def _has_image(self, scale: float | None, row: int) -> bool:
        file = self._file(scale, row)
        return (scale, row) in self._images if file is None else file.is_file()

    def _image(self, scale: float | None, row: int) -> Image.Image:
        file = self._file(scale, row)
        if file is None:
            return self._images[scale, row]
        with Image.open(file) as image:
            return image.convert("RGB")

    def _file(self, scale: float | None, row: int) -> Path | None:
        if self._folder is None:
            return None
        folder = "edited" if scale is None else f"{scale:g}"
        return self._folder / "images" / folder / f"{row:06}.png"

    def _read(self, file: Path) -> None:
        """Reads whole lines, and cuts off the one that an interrupted run has begun."""
        if not file.exists():
            return
        data = file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
            try:
                values = json.loads(line)
                key = values.pop("image_guidance"), int(values.pop("row"))
                self._rows[key] = {name: float(value) for name, value in values.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{file} line {number} is no row of an evaluation; remove the file"
                ) from None
        if len(whole) < len(data):
            with file.open("rb+") as opened:
                opened.truncate(len(whole))


def _numbers_of(edits: Sequence[Edit]) -> Callable[[int], int]:
    """Returns the function from places among the edits to the rows' numbers; reads no images."""
    if isinstance(edits, Edits):
        return edits.rows.__getitem__
    return lambda index: edits[index].row
