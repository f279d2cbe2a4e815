"""Resizes, crops and normalises images for CLIP's vision network, as checkpoints say."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image

from diffusax.boundary.convert import Mismatch, convert
from diffusax.boundary.files import FromPretrained, load_json, write_json
from diffusax.boundary.tensors import BatchEncoding, as_kind
from diffusax.images.reading import load_image

Side = Annotated[int, Meta(ge=1, le=16384)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Deviation = Annotated[float, Meta(ge=1e-6, le=1e6)]

FILES = ("preprocessor_config.json", "processor_config.json")


class Shape(msgspec.Struct, frozen=True):
    """A shorter side in pixels, or a height and a width."""

    shortest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class CLIPImageProcessor(FromPretrained, msgspec.Struct, frozen=True):
    """Turns an image into CLIP's input, as transformers' CLIPImageProcessor does for PIL images.

    The shorter side is resized (Pillow's filter `resample`, 3 is bicubic), the middle cut out, with
    black where the image is too small, and the pixels become (value rescale_factor - mean) / std.
    """

    do_resize: bool = True
    size: Shape = Shape(shortest_edge=224)
    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    do_center_crop: bool = True
    crop_size: Shape = Shape(height=224, width=224)
    do_rescale: bool = True
    rescale_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[Number, Number, Number] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[Deviation, Deviation, Deviation] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_folder(cls, folder: Path, image_size: int = 224) -> "CLIPImageProcessor":
        """Reads the processor of a checkpoint's folder, or else makes CLIP's own for `image_size`.

        Raises:
            ValueError: an option in the file is not valid; names the file and the option.
        """
        for name in FILES:
            if (folder / name).is_file():
                data = load_json(folder / name)
                return cls.from_dict(data.get("image_processor", data), source=str(folder / name))
        return cls.of_size(image_size)

    @classmethod
    def of_size(cls, image_size: int) -> "CLIPImageProcessor":
        """Makes CLIP's own processor for a network of square images of this many pixels a side."""
        return cls.from_dict({"size": image_size, "crop_size": image_size})

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "preprocessor_config.json"
    ) -> "CLIPImageProcessor":
        """Makes the processor of a parsed preprocessor_config.json, that of old versions included.

        Raises:
            ValueError: an option is not valid; names the source and the option.
        """
        values = {name: data[name] for name in cls.__struct_fields__ if data.get(name) is not None}
        if isinstance(values.get("size"), int):
            values["size"] = {"shortest_edge": values["size"]}
        if isinstance(values.get("crop_size"), int):
            values["crop_size"] = dict.fromkeys(("height", "width"), values["crop_size"])
        try:
            processor: CLIPImageProcessor = convert(values, cls)
        except Mismatch as wrong:
            raise ValueError(f"{source}: {wrong}") from None
        if processor.crop_size.height is None or processor.crop_size.width is None:
            raise ValueError(f"{source}: crop_size must have a height and a width")
        if processor.size.shortest_edge is None and None in (
            processor.size.height,
            processor.size.width,
        ):
            raise ValueError(f"{source}: size must have a shortest_edge, or a height and a width")
        return processor

    def __call__(self, images: Any, return_tensors: str | None = None) -> BatchEncoding:
        """Prepares images as transformers' processor does: `.pixel_values`, n 3 h w float32.

        Args:
            images: a path or a PIL image, or a list of them.
            return_tensors: "np", "pt" (PyTorch's), "jax", or None for a list of arrays 3 h w.

        Raises:
            ValueError: an argument is not an image, or images of several sizes are not resized.
            ImportError: return_tensors is "pt", and PyTorch is not installed.
        """
        listed = list(images) if isinstance(images, list | tuple) else [images]
        found = [np.moveaxis(self.pixels(image), -1, 0) for image in listed]
        if return_tensors is None:
            return BatchEncoding(pixel_values=found)
        if len({x.shape for x in found}) != 1:
            raise ValueError(
                "images must be at least one, and of one size where do_center_crop is off (got "
                f"{', '.join(str(x.shape[1:]) for x in found) or 'none'})"
            )
        return BatchEncoding(pixel_values=as_kind(np.stack(found), return_tensors))

    def pixels(self, image: Any) -> np.ndarray:
        """Returns the pixels of one image, given as a path or a PIL image: h w 3, float32.

        Raises:
            ValueError: the argument is not an image.
        """
        image = load_image(image)
        if self.do_resize:
            image = image.resize(self._resized(*image.size), Image.Resampling(self.resample))
        if self.do_center_crop:
            image = self._cropped(image)
        pixels = np.asarray(image)
        if self.do_rescale:
            pixels = (pixels.astype(np.float64) * self.rescale_factor).astype(np.float32)
        pixels = pixels.astype(np.float32)
        if self.do_normalize:
            mean, std = (np.array(x, np.float32) for x in (self.image_mean, self.image_std))
            pixels = (pixels - mean) / std
        return pixels

    def save(self, folder: Path) -> None:
        """Writes the preprocessor_config.json that transformers reads."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILES[0], self.to_dict())

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Writes the preprocessor_config.json that transformers reads."""
        self.save(Path(save_directory))

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, as in preprocessor_config.json."""
        options: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("size", "crop_size"):
            options[name] = {k: v for k, v in options[name].items() if v is not None}
        return {**options, "image_processor_type": type(self).__name__}

    def preprocess(self, images: Any, return_tensors: str | None = None) -> BatchEncoding:
        """Prepares images as a call does."""
        return self(images, return_tensors)

    def with_pixels_from_minus_one(self) -> "CLIPImageProcessor":
        """Returns a processor that scales pixels to [-1, 1], with which CLIP was not trained."""
        mean = tuple((value + 1) / 2 for value in self.image_mean)
        std = tuple(value / 2 for value in self.image_std)
        return msgspec.structs.replace(self, image_mean=mean, image_std=std)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        edge = self.size.shortest_edge
        if edge is None:
            return self.size.width or 0, self.size.height or 0
        longer = int(edge * max(width, height) / min(width, height))
        return (edge, longer) if width <= height else (longer, edge)

    def _cropped(self, image: Image.Image) -> Image.Image:
        """Cuts out the middle at transformers' offsets; pixels outside the image are black."""
        size = self.crop_size.width or 0, self.crop_size.height or 0
        left, top = (
            (own - wanted) // 2 if own >= wanted else -_padding(own, wanted)
            for own, wanted in zip(image.size, size, strict=True)
        )
        return image.crop((left, top, left + size[0], top + size[1]))


def _padding(own: int, wanted: int) -> int:
    """Returns how many of the missing pixels go before the image."""
    return math.ceil((wanted - own) / 2)
