"""Checks, resizes and converts images: arrays and PIL images."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusax.boundary.tensors import as_numpy
from diffusax.images.reading import load_image

ResizeMode = Literal["default", "fill", "crop"]
Box = tuple[int, int, int, int]
"""The left, top, right and bottom edge in pixels, in the order of Pillow's `crop`."""

LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
"""The shares of red, green and blue in a shade of grey (ITU-R BT.601), as in Pillow's mode L."""

MAX_SIDE = 16384
"""The largest height or width in pixels that anything is resized to."""


def to_pixels(
    images: Any,
    height: int | None = None,
    width: int | None = None,
    *,
    factor: int = 8,
    resize_mode: ResizeMode = "default",
    crops_coords: Box | None = None,
    latent_channels: int = 4,
) -> np.ndarray:
    """Prepares images for an autoencoder, like `VaeImageProcessor.preprocess` of diffusers.

    Arguments:
        images: a path, PIL image or array, or a list of one kind. Arrays are h w c or b h w c,
            tensors of PyTorch c h w or b c h w: floats in [0, 1], floats in [-1, 1] if any is
            negative, or uint8.
        height: the height in pixels; by default the first image's own. As the width, it is rounded
            down to a multiple of `factor`. PIL images are resized with Lanczos' filter, arrays by
            repeating the nearest pixel.
        width: the width in pixels; by default the first image's own.
        factor: the number of pixels per latent in each direction.
        resize_mode: "default" stretches, "fill" fits the image in and smears its borders,
            "crop" cuts off what stands out; the latter two for PIL images and paths.
        crops_coords: the part of each PIL image to take, before it is resized.
        latent_channels: arrays of this many channels, neither 1 nor 3, are latents and stay as they
            are. Where height or width is the same number they are read as c h w, as calls give
            them.

    Returns:
        b H W 3 float32 in [-1, 1]; or latents b h w c.

    Raises:
        ValueError: a file or an array is not an image, or the size is not possible.
    """
    pixels = _unit_pixels(
        images, height, width, factor, resize_mode, crops_coords, "image", latent_channels
    )
    if pixels.shape[-1] not in (1, 3) or pixels.min() < 0:
        return pixels
    return 2 * pixels - 1


def to_control(
    images: Any,
    height: int | None = None,
    width: int | None = None,
    *,
    factor: int = 8,
    resize_mode: ResizeMode = "default",
    crops_coords: Box | None = None,
    channels: int = 3,
) -> np.ndarray:
    """Prepares images that steer: like `to_pixels`, but b H W `channels` float32 in [0, 1].

    channels: 3; 1 for shades of grey; or the channels of arrays, which then keep their size.
    """
    pixels = _unit_pixels(
        images, height, width, factor, resize_mode, crops_coords, "control image", channels
    )
    if channels == 1:
        return pixels @ LUMINANCE[:, None]
    if pixels.shape[-1] != channels:
        raise ValueError(
            f"control image must have {channels} channels here (got {pixels.shape[-1]})"
        )
    return pixels


def resize(image: Image.Image, height: int, width: int, mode: str = "default") -> Image.Image:
    """Resizes one image with Lanczos' filter, like diffusers' `VaeImageProcessor.resize`.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode == "default":
        return image.resize((width, height), Image.Resampling.LANCZOS)
    if mode not in ("fill", "crop"):
        raise ValueError(f'resize_mode must be "default", "fill" or "crop" (got {mode!r})')
    wider, narrower = (image.width / image.height, width / height)[:: 1 if mode == "fill" else -1]
    inner = (
        (width, max(image.height * width // image.width, 1))
        if wider > narrower
        else (max(image.width * height // image.height, 1), height)
    )
    if max(inner) > MAX_SIDE:
        # The whole image would be very large in this size, so it is cut out before.
        scale = max(width / image.width, height / image.height)
        left, top = ((own - side / scale) / 2 for own, side in zip(image.size, (width, height)))
        box = (left, top, image.width - left, image.height - top)
        return image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS, box)
    inside = image.resize(inner, Image.Resampling.LANCZOS)
    left, top = width // 2 - inner[0] // 2, height // 2 - inner[1] // 2
    result = Image.new("RGB", (width, height))
    result.paste(inside, (left, top))
    if mode == "fill":
        _smear(result, inside, left, top)
    return result


def target_size(
    own: tuple[int, int], height: int | None, width: int | None, factor: int
) -> tuple[int, int]:
    """Rounds height and width down to multiples of `factor`. own: the image's (height, width).

    Raises:
        ValueError: one is no whole number, or not possible.
    """
    for name, value in (("height", height), ("width", width)):
        if not isinstance(value, int | np.integer | None):
            raise ValueError(f"{name} must be an integer or None (got {value!r})")
    wanted = (height or own[0], width or own[1])
    size = wanted[0] - wanted[0] % factor, wanted[1] - wanted[1] % factor
    if not 0 < min(size) <= max(size) <= MAX_SIDE:
        raise ValueError(
            f"height and width must be between {factor} and {MAX_SIDE} "
            f"(got {wanted[0]} and {wanted[1]})"
        )
    return size


def listed(value: Any, name: str) -> tuple[list[Any], bool]:
    """Returns the images as a list, and whether they are arrays.

    Raises:
        ValueError: the list is empty, holds something else, or only some of it are arrays.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    are_pil = [isinstance(item, str | Path | bytes | Image.Image) for item in items]
    for item, is_pil in zip(items, are_pil):
        if not is_pil and not hasattr(item, "__array__"):
            raise ValueError(
                f"{name} must be a path, a PIL image, an array or a list of them "
                f"(got {type(item).__name__})"
            )
    if len(set(are_pil)) != 1:
        raise ValueError(
            f"{name} must be a list of arrays or of images, not of both"
            if items
            else f"{name} must hold an image (got an empty list)"
        )
    return items, not are_pil[0]


def stack(arrays: list[np.ndarray], name: str) -> np.ndarray:
    """Joins arrays b h w c along their first axis.

    Raises:
        ValueError: their sizes differ.
    """
    if len({array.shape[1:] for array in arrays}) > 1:
        raise ValueError(
            f"{name} must be arrays of one size (got {', '.join(str(a.shape) for a in arrays)})"
        )
    return np.concatenate(arrays)


def read_array(value: Any, name: str) -> np.ndarray:
    """Converts an array, or a tensor of PyTorch, to float32; uint8 is scaled to [0, 1].

    Raises:
        ValueError: its dtype is not one of an image, or it is not finite.
    """
    array = as_numpy(value)
    if array.dtype == np.uint8:
        return array.astype(np.float32) / 255
    if array.dtype.name not in ("bool", "float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"{name} must be floats in [0, 1] or uint8 (got {array.dtype})")
    array = array.astype(np.float32)
    if not array.size or not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers (got shape {array.shape} with NaN or inf)")
    return array


def nearest(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes b h w c by repeating pixels, like `torch.nn.functional.interpolate`."""

    def sources(size: int, new: int) -> np.ndarray:
        scale = np.float32(size) / np.float32(new)
        return np.minimum((np.arange(new, dtype=np.float32) * scale).astype(int), size - 1)

    rows, columns = sources(array.shape[1], height), sources(array.shape[2], width)
    return array[:, rows[:, None], columns]


def to_pil(images: np.ndarray) -> list[Image.Image]:
    """Converts arrays to PIL images in [0, 1]: b h w 3, b h w 1 in greys, or b h w 4 with opacity.

    Raises:
        ValueError: they have another number of channels.
    """
    if images.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"output_type must be 'np' for images of {images.shape[-1]} channels, of which there "
            "are no PIL images"
        )
    images = images[..., 0] if images.shape[-1] == 1 else images
    return [Image.fromarray(image) for image in (images * 255).round().astype(np.uint8)]


def png_parameters(parameters: str) -> PngInfo:
    """Makes a PNG's text chunk `parameters`, from which tools read the settings of an image."""
    info = PngInfo()
    info.add_text("parameters", parameters)
    return info


def _unit_pixels(
    images: Any,
    height: int | None,
    width: int | None,
    factor: int,
    resize_mode: str,
    crops_coords: Box | None,
    name: str,
    latent_channels: int = 3,
) -> np.ndarray:
    items, arrays = listed(images, name)
    if not arrays:
        cropped = [crop(load_image(item), crops_coords) for item in items]
        size = target_size((cropped[0].height, cropped[0].width), height, width, factor)
        resized = [np.asarray(resize(image, *size, resize_mode)) for image in cropped]
        return np.stack(resized).astype(np.float32) / 255
    refuse_for_arrays(name, resize_mode, crops_coords)
    channels = 1, 3, latent_channels
    pixels = stack([_channels_last(item, name, channels) for item in items], name)
    if pixels.shape[-1] not in (1, 3):
        return pixels
    # Decoded images overshoot 1 a little; 255 means that somebody did not divide.
    if np.abs(pixels).max() > 4:
        raise ValueError(
            f"{name} must be floats in [0, 1] or [-1, 1] (got values up to {pixels.max():g})"
        )
    pixels = nearest(pixels, *target_size(pixels.shape[1:3], height, width, factor))
    return np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels


def crop(image: Image.Image, box: Box | None) -> Image.Image:
    """Cuts out a part of an image; returns the whole image for None.

    Raises:
        ValueError: box is not the left, top, right and bottom edge of a part.
    """
    if box is None:
        return image
    try:
        return image.crop(box)
    except (ValueError, TypeError, IndexError, OverflowError):
        raise ValueError(
            "crops_coords must be the left, top, right and bottom edge of a part in pixels (got "
            f"{box!r})"
        ) from None


def refuse_for_arrays(name: str, resize_mode: str, crops_coords: Box | None) -> None:
    """Raises ValueError where an option is set that only PIL images support."""
    if resize_mode != "default" or crops_coords is not None:
        raise ValueError(f"{name} must be PIL images or paths, not arrays, to be cropped or filled")


def _channels_last(value: Any, name: str, channels: Sequence[int]) -> np.ndarray:
    """Moves the channels to the last axis; arrays usually have them there, and tensors first.

    Latents have them first where both could be.
    """
    array = read_array(value, name)
    if array.ndim == 2:
        array = array[..., None]
    square = array.ndim in (3, 4) and array.shape[-3] == array.shape[-1] not in (1, 3)
    axes = (-3, -1) if square or hasattr(value, "detach") else (-1, -3)
    axis = next((i for i in axes if array.ndim in (3, 4) and array.shape[i] in channels), None)
    if axis is None:
        raise ValueError(
            f"{name} must be an array h w 3 or b h w 3, or a tensor 3 h w or b 3 h w "
            f"(got shape {array.shape})"
        )
    array = np.moveaxis(array, axis, -1)
    return array if array.ndim == 4 else array[None]


def _smear(canvas: Image.Image, inside: Image.Image, left: int, top: int) -> None:
    """Fills the rest of the canvas with the outermost rows or columns of the image."""
    (width, height), edge = inside.size, inside.resize
    if top > 0:
        canvas.paste(edge((width, top), box=(0, 0, width, 0)), (0, 0))
        canvas.paste(edge((width, top), box=(0, height, width, height)), (0, top + height))
    if left > 0:
        canvas.paste(edge((left, height), box=(0, 0, 0, height)), (0, 0))
        canvas.paste(edge((left, height), box=(width, 0, width, height)), (left + width, 0))


def to_html(images: Sequence[Image.Image]) -> str:
    """Returns HTML that shows images side by side, for notebooks."""

    def source(image: Image.Image) -> str:
        file = io.BytesIO()
        image.save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    return "".join(f'<img src="data:image/png;base64,{source(image)}">' for image in images)
