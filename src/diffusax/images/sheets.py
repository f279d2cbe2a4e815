"""Puts several images on one sheet: grids, labelled grids, and captions beneath images."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

GAP = 4
"""The number of pixels between the images of a sheet."""
_LINES = 6
"""The number of lines after which a caption is cut off."""


def make_image_grid(
    images: Sequence[Image.Image], rows: int, cols: int, resize: int | None = None
) -> Image.Image:
    """Puts images into a grid without gaps, row by row, like diffusers' `make_image_grid`.

    Args:
        images: one for each place of the grid; each place has the size of the first image.
        rows: the number of rows.
        cols: the number of columns.
        resize: the side in pixels of the square that each image is resized to first.

    Raises:
        ValueError: there are more or fewer images than places.
    """
    if len(images) != rows * cols or not images:
        raise ValueError(
            f"rows={rows} times cols={cols} must be the number of images (got {len(images)})"
        )
    if resize is not None:
        images = [image.resize((resize, resize)) for image in images]
    return _paste(images, images[0].size, cols, gap=0, background="black")


def contact_sheet(
    images: Sequence[Image.Image], *, gap: int = GAP, columns: int | None = None
) -> Image.Image:
    """Puts images on white, row by row, in `columns` columns or as square as possible."""
    return _paste(images, _largest(images), columns or math.ceil(math.sqrt(len(images))), gap)


def labelled_grid(
    images: Sequence[Sequence[Image.Image]],
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    *,
    gap: int = GAP,
) -> Image.Image:
    """Puts rows of images on white, with labels left of the rows and above the columns.

    Labels that are wider than an image are broken into lines.

    Args:
        images: the rows, all of the same length.
        row_labels: one for each row, or none at all.
        column_labels: one for each column, or none at all.
        gap: the number of pixels between the images.

    Raises:
        ValueError: rows differ in length, or there are more or fewer labels than rows or columns.
    """
    flat = [image for row in images for image in row]
    columns = len(images[0]) if images else 0
    if not flat or any(len(row) != columns for row in images):
        lengths = [len(row) for row in images]
        raise ValueError(f"images must be rows of one length, not empty (got lengths {lengths})")
    for name, labels, count in (
        ("row_labels", row_labels, len(images)),
        ("column_labels", column_labels, columns),
    ):
        if labels and len(labels) != count:
            raise ValueError(f"{name} must be {count} texts or none (got {len(labels)})")
    width, height = _largest(flat)
    beside = _texts(row_labels, (width, height), align="right", fit=True)
    above = _texts(column_labels, (width, height), align="center")
    left, top = (
        max((label.size[axis] for label in labels), default=-gap) + gap
        for axis, labels in enumerate((beside, above))
    )
    grid = _paste(flat, (width, height), columns, gap)
    sheet = Image.new("RGB", (left + grid.width, top + grid.height), "white")
    sheet.paste(grid, (left, top))
    for row, label in enumerate(beside):
        middle = top + row * (height + gap) + height // 2
        sheet.paste(label, (left - gap - label.width, max(0, middle - label.height // 2)))
    for column, label in enumerate(above):
        middle = left + column * (width + gap) + width // 2
        sheet.paste(label, (middle - label.width // 2, top - gap - label.height))
    return sheet


def captioned(images: Sequence[Image.Image], captions: Iterable[str]) -> list[Image.Image]:
    """Puts each image on white with its caption in lines beneath; all results have the same size.

    Captions of more than six lines are cut off.

    Raises:
        ValueError: there are more or fewer captions than images.
    """
    captions = list(captions)
    if len(captions) != len(images):
        raise ValueError(f"captions must be {len(images)}, one per image (got {len(captions)})")
    if not images:
        return []
    width, height = _largest(images)
    texts = _texts(captions, (width, height), align="left")
    size = width, height + max(text.height for text in texts)
    cells = []
    for image, text in zip(images, texts, strict=True):
        cell = Image.new("RGB", size, "white")
        cell.paste(image, (0, 0))
        cell.paste(text, (0, height))
        cells.append(cell)
    return cells


def _largest(images: Sequence[Image.Image]) -> tuple[int, int]:
    """Returns the width and height that every image fits into."""
    return max(image.width for image in images), max(image.height for image in images)


def _paste(
    images: Sequence[Image.Image],
    cell: tuple[int, int],
    columns: int,
    gap: int,
    background: str = "white",
) -> Image.Image:
    """Pastes the images row by row into cells of the same width and height."""
    width, height = cell[0] + gap, cell[1] + gap
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * width - gap, rows * height - gap), background)
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * height))
    return sheet


def _texts(
    texts: Sequence[str], cell: tuple[int, int], align: str, *, fit: bool = False
) -> list[Image.Image]:
    """Writes each text in black on white, no wider than a cell; with `fit` also no higher."""
    # In proportion to the images, but legible beneath the smallest too.
    font: Any = ImageFont.load_default(max(10, min(cell) // 20))
    most = max(1, min(_LINES, cell[1] // sum(font.getmetrics()))) if fit else _LINES
    return [_text(_lines(text, font, cell[0], most), font, align) for text in texts]


def _text(lines: Sequence[str], font: Any, align: str) -> Image.Image:
    """Writes lines of text on white, on the smallest image that holds them."""
    lengths = [font.getlength(line) for line in lines]
    width, step = max(1, math.ceil(max(lengths))), sum(font.getmetrics())
    image = Image.new("RGB", (width, step * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for i, (line, length) in enumerate(zip(lines, lengths, strict=True)):
        left = {"left": 0, "center": (width - length) / 2, "right": width - length}[align]
        draw.text((left, i * step), line, fill="black", font=font)
    return image


def _lines(text: str, font: Any, width: int, most: int) -> list[str]:
    """Breaks the text into up to `most` lines of `width` pixels, between words where possible."""
    lines = [""]
    for word in text.split():
        if len(lines) > most:
            break
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while len(lines) <= most and (fits := _fitting(lines[-1], font, width)) < len(lines[-1]):
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    if len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(f"{last}…") > width:
            last = last[:-1]
        lines = [*lines[: most - 1], f"{last}…"]
    return lines


def _fitting(word: str, font: Any, width: int) -> int:
    """Returns how many letters of the word fit into the width, at least one."""
    fits = 1
    while fits < len(word) and font.getlength(word[: fits + 1]) <= width:
        fits += 1
    return fits
