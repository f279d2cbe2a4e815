"""Prepares an autoencoder's images, and converts its results, as diffusers' processor does."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffusax.boundary.tensors import alike, as_numpy, as_tensor, is_tensor, wants_tensors
from diffusax.images import masks
from diffusax.images.conversion import Box, ResizeMode, resize, target_size, to_control, to_pixels


@dataclasses.dataclass(frozen=True)
class VaeImageProcessor:
    """Prepares an autoencoder's images, and converts its results, with diffusers' arguments.

    do_resize: whether sides become multiples of `vae_scale_factor`. vae_latent_channels: arrays of
    this many channels are latents and stay as they are. resample: "lanczos". do_normalize: whether
    pixels are in [-1, 1] instead of [0, 1]. do_binarize: whether pixels become 0 or 1.
    do_convert_rgb: images are always converted to RGB. do_convert_grayscale: whether images become
    shades of grey, for masks. tensors: what images in files and Pillow's become, see the pipelines'
    attribute of this name.
    """

    do_resize: bool = True
    vae_scale_factor: int = 8
    vae_latent_channels: int = 4
    resample: str = "lanczos"
    do_normalize: bool = True
    do_binarize: bool = False
    do_convert_rgb: bool = False
    do_convert_grayscale: bool = False
    tensors: Literal["pt", "jax"] | None = None

    def __post_init__(self) -> None:
        for name in ("vae_scale_factor", "vae_latent_channels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1 (got {value!r})")
        if self.resample != "lanczos":
            raise ValueError(
                f"resample must be 'lanczos' (got {self.resample!r}); resize the images before"
            )
        if self.do_binarize != self.do_convert_grayscale or (
            self.do_binarize and (self.do_normalize or self.do_convert_rgb)
        ):
            raise ValueError(
                "do_binarize and do_convert_grayscale go together, without do_normalize and "
                "do_convert_rgb, for masks; leave both out for images"
            )

    def preprocess(
        self,
        image: Any,
        height: int | None = None,
        width: int | None = None,
        resize_mode: ResizeMode = "default",
        crops_coords: Box | None = None,
    ) -> Any:
        """Prepares images for the autoencoder, or masks where `do_binarize` is set.

        Args:
            image: a path, PIL image or array, or a list of one kind. Arrays are h w c or b h w c,
                tensors of PyTorch c h w or b c h w, in [0, 1].
            height: the height in pixels, by default the first image's; rounded down to a multiple
                of `vae_scale_factor`.
            width: the width in pixels; see height.
            resize_mode: "default" stretches, "fill" fits in and smears the borders, "crop" cuts.
            crops_coords: the part (left, top, right, bottom) of each image to take.

        Returns:
            b c H W float32, in [-1, 1] where `do_normalize` is set, else in [0, 1]: a tensor where
            `image` holds tensors, an array of JAX where it holds those, and else see `tensors`.

        Raises:
            ValueError: a file or an array is not an image, or the size is not possible.
        """
        options: dict[str, Any] = {
            "factor": self.vae_scale_factor if self.do_resize else 1,
            "resize_mode": resize_mode,
            "crops_coords": crops_coords,
        }
        if self.do_binarize:
            pixels = masks.to_mask(image, height, width, **options)
        elif self.do_normalize:
            channels = self.vae_latent_channels
            pixels = to_pixels(image, height, width, latent_channels=channels, **options)
        else:
            pixels = to_control(image, height, width, **options)
        first = image[0] if isinstance(image, list | tuple) and image else image
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        if not hasattr(first, "devices") and wants_tensors(self.tensors, first):
            return as_tensor(pixels)
        return alike(pixels, first)

    def postprocess(
        self, image: Any, output_type: str = "pil", do_denormalize: list[bool] | None = None
    ) -> Any:
        """Converts what the autoencoder decoded.

        Args:
            image: b c H W, about [-1, 1].
            output_type: "pil"; "np", b H W c in [0, 1]; "pt", b c H W in [0, 1], a tensor if
                `image` is one; or "latent", which returns it as it is.
            do_denormalize: whether to scale each image from [-1, 1] to [0, 1]; by default as
                `do_normalize` says.

        Raises:
            ValueError: image has another shape, or output_type is unknown.
        """
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(
                f"output_type must be 'pil', 'np', 'pt' or 'latent' (got {output_type!r})"
            )
        if output_type == "latent":
            return image
        pixels = as_numpy(image).astype(np.float32)
        if pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
            raise ValueError(
                f"image must have shape (batch, 3, height, width) (got {tuple(pixels.shape)})"
            )
        flags = [self.do_normalize] * len(pixels) if do_denormalize is None else do_denormalize
        if len(flags) != len(pixels):
            raise ValueError(
                f"do_denormalize must have {len(pixels)} entries, one for each image (got "
                f"{len(flags)})"
            )
        scaled = [np.clip(x / 2 + 0.5, 0, 1) if flag else x for x, flag in zip(pixels, flags)]
        if output_type == "pt":
            return alike(np.stack(scaled), image)
        result = np.stack(scaled).transpose(0, 2, 3, 1)
        return self.numpy_to_pil(result) if output_type == "pil" else result

    def get_default_height_width(
        self, image: Any, height: int | None = None, width: int | None = None
    ) -> tuple[int, int]:
        """Returns the height and width that `preprocess` gives an image, in pixels.

        Args:
            image: a PIL image, an array b h w c or a tensor b c h w.
            height: the height that is wanted, by default the image's.
            width: the width that is wanted, by default the image's.

        Raises:
            ValueError: the size is not possible.
        """
        if isinstance(image, Image.Image):
            own = image.height, image.width
        else:
            first = 2 if is_tensor(image) else 1
            own = image.shape[first], image.shape[first + 1]
        return target_size(own, height, width, self.vae_scale_factor)

    def resize(
        self, image: Image.Image, height: int, width: int, resize_mode: ResizeMode = "default"
    ) -> Image.Image:
        """Resizes a PIL image, see `conversion.resize`.

        Raises:
            ValueError: the mode is unknown, or the image is too long and narrow for it.
        """
        return resize(image, height, width, resize_mode)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Converts arrays in [0, 1], h w c or b h w c with c 3 or 1, to PIL images."""
        array = np.asarray(images)
        values = (array if array.ndim == 4 else array[None]) * 255
        shades = values.shape[-1] == 1
        return [
            Image.fromarray(x[..., 0] if shades else x) for x in values.round().astype(np.uint8)
        ]

    @staticmethod
    def pil_to_numpy(images: Image.Image | Sequence[Image.Image]) -> np.ndarray:
        """Converts PIL images of one size to float32 in [0, 1], b h w c."""
        listed = [images] if isinstance(images, Image.Image) else list(images)
        return np.stack([np.asarray(image, np.float32) / 255 for image in listed])

    @staticmethod
    def numpy_to_pt(images: Any) -> Any:
        """Converts arrays h w c or b h w c to a tensor of PyTorch, b c h w."""
        array = np.asarray(images)
        batch = array if array.ndim == 4 else array[None]
        return as_tensor(np.ascontiguousarray(batch.transpose(0, 3, 1, 2)))

    @staticmethod
    def pt_to_numpy(images: Any) -> np.ndarray:
        """Converts a tensor b c h w to a float32 array b h w c."""
        return as_numpy(images).transpose(0, 2, 3, 1).astype(np.float32)

    @staticmethod
    def binarize(image: Any) -> Any:
        """Returns a mask in [0, 1] whose values are 0 or 1, from 0.5 up."""
        white = image >= 0.5
        return white.to(image.dtype) if is_tensor(image) else white.astype(image.dtype)

    @staticmethod
    def convert_to_rgb(image: Image.Image) -> Image.Image:
        """Converts a PIL image to RGB."""
        return image.convert("RGB")

    @staticmethod
    def convert_to_grayscale(image: Image.Image) -> Image.Image:
        """Converts a PIL image to shades of grey."""
        return image.convert("L")

    @staticmethod
    def normalize(images: Any) -> Any:
        """Scales pixels from [0, 1] to [-1, 1]."""
        return 2.0 * images - 1.0

    @staticmethod
    def denormalize(images: Any) -> Any:
        """Scales pixels from [-1, 1] to [0, 1], and clips them there."""
        return (images * 0.5 + 0.5).clip(0, 1)

    @staticmethod
    def blur(image: Any, blur_factor: float = 4) -> Image.Image:
        """Softens the rim of a mask, see `masks.blur`."""
        return masks.blur(image, blur_factor)

    @staticmethod
    def get_crop_region(mask_image: Image.Image, width: int, height: int, pad: int = 0) -> Box:
        """Finds the part of an image around all that is masked, see `masks.get_crop_region`."""
        return masks.get_crop_region(mask_image, width, height, pad)

    @staticmethod
    def apply_overlay(
        mask: Any, init_image: Any, image: Image.Image, crop_coords: Box | None = None
    ) -> Image.Image:
        """Puts the generated image where the mask is white, see `masks.apply_overlay`."""
        return masks.apply_overlay(mask, init_image, image, crop_coords)
