"""Pictures as arrays and as PIL images."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def to_pil(images: np.ndarray) -> list[Image.Image]:
    """images: b h w 3 in [0, 1] -> PIL images."""
    return [Image.fromarray(image) for image in (images * 255).round().astype(np.uint8)]


def contact_sheet(
    images: Sequence[Image.Image], *, gap: int = 4, columns: int | None = None
) -> Image.Image:
    """Pictures of one size row by row on white, in a grid as square as can be or of `columns`."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = images[0].size
    sheet = Image.new(
        "RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), (255, 255, 255)
    )
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        sheet.paste(image, (column * (width + gap), row * (height + gap)))
    return sheet


def png_parameters(parameters: str) -> PngInfo:
    """A PNG's text chunk `parameters`, which image tools read the settings of a picture from."""
    info = PngInfo()
    info.add_text("parameters", parameters)
    return info
