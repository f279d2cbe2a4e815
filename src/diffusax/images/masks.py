"""Masks of inpainting: white parts are generated anew, black parts stay."""

from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from diffusax.images.conversion import (
    LUMINANCE,
    Box,
    ResizeMode,
    crop,
    listed,
    nearest,
    read_array,
    refuse_for_arrays,
    resize,
    stack,
    target_size,
)
from diffusax.images.reading import load_image, open_upright


def to_mask(
    masks: Any,
    height: int | None = None,
    width: int | None = None,
    *,
    factor: int = 8,
    resize_mode: ResizeMode = "default",
    crops_coords: Box | None = None,
) -> np.ndarray:
    """Resizes masks, and rounds them to 0 or 1 at half grey, like diffusers' `mask_processor`.

    Transparency is ignored, as in diffusers. The arguments are those of `to_pixels`; arrays may be
    h w or b h w too, booleans, or integers 0 and 1.

    Returns:
        b H W 1 float32, 0 or 1.

    Raises:
        ValueError: a file or an array is not a mask, or the size is not possible.
    """
    items, arrays = listed(masks, "mask_image")
    if arrays:
        refuse_for_arrays("mask_image", resize_mode, crops_coords)
        greys = stack([_grey(item) for item in items], "mask_image")
        greys = nearest(greys, *target_size(greys.shape[1:3], height, width, factor))
    else:
        images = [crop(open_upright(item), crops_coords) for item in items]
        size = target_size((images[0].height, images[0].width), height, width, factor)
        # Resized in the image's own mode first, as diffusers does: rounding decides at the rim.
        resized = [resize(image, *size, resize_mode).convert("L") for image in images]
        greys = np.stack([np.asarray(grey) for grey in resized])[..., None].astype(np.float32) / 255
    return (greys >= 0.5).astype(np.float32)


def mask_of(value: Any) -> Image.Image:
    """Reads a mask in greys (mode L) as image editors and A1111 mean it: white is generated anew.

    Of an image with transparency, what is more than half opaque is white, whatever its colour: who
    paints on a transparent layer means the paint. Source: stable-diffusion-webui's
    modules/processing.py, create_binary_mask.

    Raises:
        ValueError: there is no image; names the file and the reason.
    """
    image = open_upright(value)
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):
            return alpha.point([0] * 129 + [255] * 127)
    return image.convert("L")


def blur(mask: Any, blur_factor: float = 4) -> Image.Image:
    """Softens the rim of a mask over `blur_factor` pixels, like `pipe.mask_processor.blur`."""
    return open_upright(mask).filter(ImageFilter.GaussianBlur(blur_factor))


def get_crop_region(mask: Image.Image, width: int, height: int, pad: int = 0) -> Box:
    """Finds the part of an image around all that is masked, in the proportions of width x height.

    Like diffusers' `VaeImageProcessor.get_crop_region`: it takes the masked part, `pad` pixels
    around it, and then as much of the image as the proportions ask for and the image has.

    Raises:
        ValueError: nothing is masked.
    """
    box = mask.convert("L").getbbox()
    if box is None:
        raise ValueError("mask_image must have a part that is not black, for padding_mask_crop")
    left, top = max(box[0] - pad, 0), max(box[1] - pad, 0)
    right, bottom = min(box[2] + pad, mask.width), min(box[3] + pad, mask.height)
    wanted = width / height
    if (right - left) / (bottom - top) > wanted:
        top, bottom = _widen(top, bottom, (right - left) / wanted, mask.height)
    else:
        left, right = _widen(left, right, (bottom - top) * wanted, mask.width)
    return left, top, right, bottom


def apply_overlay(
    mask: Any, init_image: Any, image: Image.Image, crop_coords: Box | None = None
) -> Image.Image:
    """Puts the generated image where the mask is white, and keeps the original where it is black.

    Like diffusers' `VaeImageProcessor.apply_overlay`.

    Arguments:
        mask: a path or a PIL image of the size of `init_image`; greys mix the two images.
        init_image: the original.
        image: the generated image, of the part `crop_coords` or of the whole.
        crop_coords: where the generated image belongs.

    Raises:
        ValueError: the sizes differ.
    """
    original, rim = load_image(init_image), open_upright(mask).convert("L")
    if rim.size != original.size:
        raise ValueError(f"mask_image must be of the image's size {original.size} (got {rim.size})")
    kept = Image.new("RGBa", original.size)
    kept.paste(original.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(rim))
    if crop_coords is not None:
        left, top, right, bottom = crop_coords
        part, image = image, Image.new("RGB", original.size)
        image.paste(resize(part, bottom - top, right - left, "crop"), (left, top))
    if image.size != original.size:
        raise ValueError(
            f"the generated image must be of the size {original.size} (got {image.size})"
        )
    result = image.convert("RGBA")
    result.alpha_composite(kept.convert("RGBA"))
    return result.convert("RGB")


def bilinear(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes b h w c by mixing the four pixels around each place, without a filter for shrinking.

    Like `torch.nn.functional.interpolate` with mode="bilinear".
    """

    def mix(x: np.ndarray, axis: int, new: int) -> np.ndarray:
        size = x.shape[axis]
        at = np.maximum((np.arange(new) + 0.5) * (size / new) - 0.5, 0)
        low = at.astype(int)
        part = (at - low).astype(np.float32).reshape(-1, *(1,) * (x.ndim - axis - 1))
        above = np.take(x, np.minimum(low + 1, size - 1), axis)
        return (1 - part) * np.take(x, low, axis) + part * above

    return mix(mix(array, 1, height), 2, width)


def _widen(low: int, high: int, length: float, limit: int) -> tuple[int, int]:
    """Widens low..high on both sides to `length`, then moves and cuts it to lie in 0..limit."""
    spare = int(length - (high - low))
    low, high = low - spare // 2, high + spare - spare // 2
    over = max(high - limit, 0)
    low, high = low - over, high - over
    under = max(-low, 0)
    return low + under, min(high + under, limit)


def _grey(value: Any) -> np.ndarray:
    """Converts an array of any supported shape to b h w 1."""
    if str(getattr(value, "dtype", "")).removeprefix("torch.") in ("int32", "int64"):
        value = value != 0
    array = read_array(value, "mask_image")
    # Among integers 0 and 1, 1 is white.
    array = array * 255 if 0 < array.max() <= 1 / 255 else array
    if array.ndim in (3, 4) and array.shape[-1] == 3:
        array = array @ LUMINANCE
    elif array.ndim in (3, 4) and array.shape[-1] == 1:
        array = array[..., 0]
    elif array.ndim == 4 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (2, 3):
        raise ValueError(
            f"mask_image must be an array h w, h w 1, b h w or b h w 1 (got shape {array.shape})"
        )
    return (array if array.ndim == 3 else array[None])[..., None]
