"""Prepares the images of img2img: resizes them and fills the masked part."""

from PIL import Image, ImageFilter, ImageOps

from diffusax.images.masks import mask_of
from diffusax.images.pictures import resize
from diffusax.serving.drawings.errors import Refused
from diffusax.serving.web.images import as_rgb

RESIZE_MODES = ("default", "crop", "fill", "default")
"""How each of A1111's resize modes fits an image: just resize, crop, fill; and just resize for
the last, which resizes latents there."""
_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2))
"""The radii in pixels whose blurs are laid over each other, and how often each is."""


def fit_image(image: Image.Image, width: int, height: int, mode: int) -> Image.Image:
    """Returns an image as RGB in the size to generate."""
    return resize(as_rgb(image, "init_images"), height, width, RESIZE_MODES[mode])


def read_mask(mask: Image.Image, *, invert: bool) -> Image.Image:
    """Returns a mask in greys, white where the image is generated anew, see `mask_of`."""
    grey = mask_of(mask)
    return ImageOps.invert(grey) if invert else grey


def fill_masked(image: Image.Image, mask: Image.Image, mode: int) -> Image.Image:
    """Fills the masked part of an image as A1111's `inpainting_fill` says.

    Arguments:
        image: the image, RGB.
        mask: white where the image is generated anew; of the image's size.
        mode: 0 fills with the colours around, 1 leaves the image as it is.

    Raises:
        Refused: mode is 2 or 3, which fill latents.
    """
    if mode == 1:
        return image
    if mode != 0:
        raise Refused(
            f"inpainting_fill must be 0 (colours around) or 1 (the image) here (got {mode})",
            param="inpainting_fill",
        )
    kept = image.convert("RGBA")
    kept.putalpha(ImageOps.invert(mask))
    filled = Image.new("RGBA", image.size)
    for radius, times in _BLURS:
        # Premultiplied, so that the colours under the mask do not bleed into the blur.
        blurred = kept.convert("RGBa").filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            filled.alpha_composite(blurred)
    filled.alpha_composite(kept)
    result = image.copy()
    result.paste(filled.convert("RGB"), mask=filled.getchannel("A"))
    return result
