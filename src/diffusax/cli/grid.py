"""The axes of `diffusax generate --grid`, such as sampler=euler,dpm++2m."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from diffusax.boundary.convert import Mismatch, convert, field_types
from diffusax.images.sheets import labelled_grid

AXES = ("sampler", "steps", "guidance", "seed", "strength", "clip_skip")
"""The options that may vary over a grid."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """An option and the values that it takes."""

    name: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> list[str]:
        """Returns the labels of the sheet's rows or columns."""
        return [f"{self.name.replace('_', ' ')} {value}" for value in self.values]


def read_axes(texts: Sequence[str], command: Any) -> list[Axis]:
    """Reads the axes that the texts name: the columns, then the rows.

    Args:
        texts: one or two texts of the form OPTION=VALUE,VALUE,...
        command: the options that the grid varies.

    Raises:
        ValueError: a text does not have this form, or an option is given twice.
    """
    axes = [_read(text, type(command)) for text in texts]
    if len(axes) > 2:
        raise ValueError(f"--grid takes one or two options (got {len(axes)})")
    if len(axes) == 2 and axes[0].name == axes[1].name:
        raise ValueError(f"--grid takes two different options (got {axes[0].name} twice)")
    for axis in axes:
        if getattr(command, axis.name) is not None:
            flag = axis.name.replace("_", "-")
            raise ValueError(f"--grid varies {axis.name}; leave --{flag} out")
    return axes


def cells(command: Any, axes: Sequence[Axis]) -> Iterator[Any]:
    """Yields the options of each image, row by row."""
    columns, *rows = axes
    for values in itertools.product(*(axis.values for axis in (*rows, columns))):
        names = (axis.name for axis in (*rows, columns))
        yield dataclasses.replace(command, grid=(), **dict(zip(names, values)))


def draw_sheet(images: Sequence[Image.Image], axes: Sequence[Axis]) -> Image.Image:
    """Puts the images of all cells on one sheet, with their values beside and above them."""
    columns, *rows = axes
    width = len(columns.values)
    parts = [images[i : i + width] for i in range(0, len(images), width)]
    return labelled_grid(parts, rows[0].labels if rows else (), columns.labels)


def _read(text: str, kind: Any) -> Axis:
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in AXES or not values.strip():
        known = ", ".join(option.replace("_", "-") for option in AXES)
        raise ValueError(
            f"--grid takes OPTION=VALUE,VALUE,... where the option is one of {known} (got {text})"
        )
    return Axis(
        name, tuple(_value(part.strip(), field_types(kind)[name]) for part in values.split(","))
    )


def _value(text: str, kind: Any) -> Any:
    """Converts the text to a number if the option is one; options check their values themselves."""
    try:
        return convert(text, kind, strict=False)
    except Mismatch:
        return text
