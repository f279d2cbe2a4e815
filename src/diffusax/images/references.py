"""Reference images, which a network reads beside the one that it generates, in their own sizes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from diffusax.images.conversion import Box, to_pixels
from diffusax.images.reading import in_srgb, load_image, open_upright, upright_size

KONTEXT_SIZES = (
    (1568, 672),
    (1504, 688),
    (1456, 720),
    (1392, 752),
    (1328, 800),
    (1248, 832),
    (1184, 880),
    (1104, 944),
    (1024, 1024),
    (944, 1104),
    (880, 1184),
    (832, 1248),
    (800, 1328),
    (752, 1392),
    (720, 1456),
    (688, 1504),
    (672, 1568),
)
"""Height and width of the images that Kontext was trained on (pipeline_flux_kontext.py)."""
_MAX_AREA = 1024 * 1024
_MAX_CANVAS, _MAX_SIDE = 4 * _MAX_AREA, 4096
"""Of a reference that is kept whole: the area, and the longer side."""
_MIN_SIDE = 64
_MAX_RATIO = 8


def as_images(images: Any) -> list[Any]:
    """Returns one image or several as a list.

    Raises:
        ValueError: the list is empty.
    """
    if not isinstance(images, list | tuple):
        return [images]
    if not images:
        raise ValueError("image must have at least one image, or be left out (got an empty list)")
    return list(images)


def reference_image(image: Any, multiple: int) -> np.ndarray:
    """Prepares a reference image, 1 H W 3 float32 in [-1, 1].

    An image of more than 1024x1024 pixels is made as small as that; then its borders are cut off
    until height and width are multiples of a number. Upstream: Flux2ImageProcessor and
    pipeline_flux2_klein.py in diffusers.

    Args:
        image: a PIL image or a path.
        multiple: this number.

    Raises:
        ValueError: the image cannot be read, is too small or too narrow.
    """
    loaded = load_image(image)
    _checked(loaded.size)
    return reference_images([loaded], multiple)


def rounded_reference(image: Any, multiple: int) -> np.ndarray:
    """Prepares a reference image of any size, 1 H W 3 float32 in [-1, 1].

    An image of more than 1024x1024 pixels is made as small as that. Then it is resized to the
    nearest multiples of a number. Upstream: ai-toolkit, diffusion_models/krea2/krea2.py,
    _encode_ref_latents, which reads the nearest pixels alone where it makes an image smaller.

    Args:
        image: a PIL image or a path.
        multiple: this number.

    Raises:
        ValueError: the image cannot be read.
    """
    loaded = load_image(image)
    scale = math.sqrt(min(1.0, _MAX_AREA / (loaded.width * loaded.height)))
    width, height = (
        max(multiple, round(side * scale / multiple) * multiple) for side in loaded.size
    )
    if loaded.size != (width, height):
        loaded = loaded.resize((width, height), Image.Resampling.LANCZOS)
    return to_pixels(loaded, factor=multiple)


def reference_images(images: Sequence[Any], multiple: int) -> np.ndarray:
    """Prepares reference images, n H W 3 float32 in [-1, 1], in the size of the first.

    As `reference_image`, but of any size and shape; black fills up where another image is smaller
    than the first. Upstream: pipeline_flux2_klein_inpaint.py in diffusers, which makes no image in
    a list smaller, and so looks at more of large ones.
    """
    within = [limit_area(image) for image in images]
    width, height = (side // multiple * multiple for side in within[0].size)
    cut = []
    for image in within:
        left, top = (image.width - width) // 2, (image.height - height) // 2
        cut.append(image.crop((left, top, left + width, top + height)))
    return to_pixels(cut, factor=multiple)


def cropped_references(images: Sequence[Any], multiple: int) -> list[np.ndarray]:
    """Prepares reference images, each as `reference_images` does one alone; of any shape.

    Upstream: diffusers modular_pipelines/flux3/image_processor.py, resize_mode="crop".

    Raises:
        ValueError: an image cannot be read, or is smaller than a token.
    """
    loaded = [load_image(image) for image in images]
    if small := next((x.size for x in loaded if min(limited_size(*x.size)) < multiple), None):
        raise ValueError(
            f"image must have sides of at least {multiple} pixels where there are several (got "
            f"{small[0]}x{small[1]}); enlarge it"
        )
    return [reference_images([image], multiple) for image in loaded]


def whole_reference(image: Any, multiple: int) -> np.ndarray:
    """Prepares the only reference image, 1 H W 3 float32 in [-1, 1], of which nothing is cut off.

    It is made smaller if it is large, see `canvas_of`, and mirrored at its borders until height and
    width are multiples of a number, see `region_of`.

    Upstream: diffusers modular_pipelines/flux3/image_processor.py, resize_mode="fill".

    Args:
        image: a PIL image or a path.
        multiple: this number.

    Raises:
        ValueError: the image cannot be read.
    """
    loaded = load_image(image)
    within, (columns, rows) = canvas_of(*loaded.size, multiple)
    if loaded.size != within:
        loaded = loaded.resize(within, Image.Resampling.LANCZOS)
    left, top, right, bottom = region_of(within, (columns, rows))
    around = (top, rows - bottom), (left, columns - right), (0, 0)
    # A mirror that leaves out the border itself would need more than one token to fill up another.
    mode: Any = "reflect" if min(within) > multiple else "symmetric"
    return to_pixels(
        Image.fromarray(np.pad(np.asarray(loaded), around, mode=mode)), factor=multiple
    )


def size_of_area(width: int, height: int, area: int, multiple: int = 32) -> tuple[int, int]:
    """Returns the width and height of an area, in the shape of others, as multiples of a number.

    Upstream: pipeline_qwenimage_edit.py in diffusers, calculate_dimensions.
    """
    wide = math.sqrt(area * (width / height))
    found = (round(side / multiple) * multiple for side in (wide, wide / (width / height)))
    columns, rows = (max(multiple, side) for side in found)
    return columns, rows


def size_of(image: Any) -> tuple[int, int]:
    """Returns the width and height of an image, given as for `with_opacity`, of which files are not
    read whole.

    Raises:
        ValueError: the image cannot be read.
    """
    if isinstance(image, np.ndarray):
        return image.shape[1], image.shape[0]
    if isinstance(image, Image.Image):
        return open_upright(image).size
    height, width = upright_size(image)
    return width, height


def with_opacity(image: Any, area: int) -> Image.Image:
    """Loads an image with its opacity, in `size_of_area`.

    image: a path, a PIL image, or an array h w c of 8 bits.

    Raises:
        ValueError: the image cannot be read.
    """
    given = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    loaded = in_srgb(open_upright(given)).convert("RGBA")
    return loaded.resize(size_of_area(*loaded.size, area), Image.Resampling.LANCZOS)


def of_area(image: Any, area: int) -> Image.Image:
    """Loads an image without opacity, in `size_of_area`; see `with_opacity`."""
    loaded = load_image(Image.fromarray(image) if isinstance(image, np.ndarray) else image)
    return loaded.resize(size_of_area(*loaded.size, area), Image.Resampling.LANCZOS)


def on_white(image: Image.Image) -> Image.Image:
    """Returns an image with an opacity as it looks on white."""
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def region_of(within: tuple[int, int], canvas: tuple[int, int]) -> Box:
    """Returns where an only reference stands in what it is filled up to: in the middle.

    within, canvas: the width and height of both, see `canvas_of`.
    """
    left, top = ((outer - inner) // 2 for inner, outer in zip(within, canvas, strict=True))
    return left, top, left + within[0], top + within[1]


def canvas_of(width: int, height: int, multiple: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the width and height of an only reference, and those that it is filled up to.

    The latter are multiples of a number, at least 64, at most 4096, and four megapixels together.
    """
    scale = min(1.0, math.sqrt(_MAX_CANVAS / (width * height)), _MAX_SIDE / max(width, height))
    while True:
        within = max(1, round(width * scale)), max(1, round(height * scale))
        columns, rows = (
            min(_MAX_SIDE, max(_MIN_SIDE, -(-side // multiple) * multiple)) for side in within
        )
        if columns * rows <= _MAX_CANVAS:
            return within, (columns, rows)
        # Filling up can exceed the area that the image itself is within.
        scale *= 0.995


def limit_area(image: Any) -> Image.Image:
    """Loads an image, and shrinks it if it has more than 1024x1024 pixels."""
    loaded = load_image(image)
    within = limited_size(*loaded.size)
    return loaded if within == loaded.size else loaded.resize(within, Image.Resampling.LANCZOS)


def reference_size(image: Any, multiple: int) -> tuple[int, int]:
    """Returns height and width in pixels of the result of `reference_image`.

    Raises:
        ValueError: the image cannot be read, is too small or too narrow.
    """
    width, height = limited_size(*_checked(load_image(image).size))
    return height // multiple * multiple, width // multiple * multiple


def limited_size(width: int, height: int) -> tuple[int, int]:
    """Returns the size of an image, reduced to the area of 1024x1024 pixels if it is larger."""
    if width * height <= _MAX_AREA:
        return width, height
    scale = math.sqrt(_MAX_AREA / (width * height))
    return int(width * scale), int(height * scale)


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    """Returns width and height.

    Raises:
        ValueError: a side is short, or one is much longer than the other.
    """
    shorter, longer = sorted(size)
    if shorter < _MIN_SIDE or longer > _MAX_RATIO * shorter:
        raise ValueError(
            f"image must have sides of at least {_MIN_SIDE} pixels, one at most {_MAX_RATIO} times "
            f"as long as the other (got {size[0]}x{size[1]}); crop or enlarge it"
        )
    return size
