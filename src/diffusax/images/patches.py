"""Resizes, normalises and cuts images for Qwen's vision networks, as checkpoints say."""

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
from diffusax.images.image_processor import FILES, Deviation, Number
from diffusax.images.reading import load_image

Area = Annotated[int, Meta(ge=1, le=2**34)]
Few = Annotated[int, Meta(ge=1, le=256)]
_MOST_ASPECT = 200


class Areas(msgspec.Struct, frozen=True):
    """The least and the most pixels of an image. The names are transformers'."""

    shortest_edge: Area = 56 * 56
    longest_edge: Area = 28 * 28 * 1280


class Qwen2VLImageProcessor(FromPretrained, msgspec.Struct, frozen=True):
    """Turns images into patches for the vision networks of Qwen2-VL, 2.5 and 3.

    Sides become multiples of patch_size merge_size, and the area one of `size`, with the shape kept
    as nearly as that allows; the pixels become (value rescale_factor - mean) / std. Patches come in
    squares of merge_size merge_size, which are a token each for the language model.

    The pixels are those of transformers' Qwen2VLImageProcessorPil (Pillow's filter `resample`, 3 is
    bicubic). Its form for torchvision, which resizes with other roundings, differs by about one
    level of 255.
    """

    do_resize: bool = True
    size: Areas = Areas()
    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    do_rescale: bool = True
    rescale_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[Number, Number, Number] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[Deviation, Deviation, Deviation] = (0.26862954, 0.26130258, 0.27577711)
    patch_size: Few = 14
    temporal_patch_size: Few = 2
    merge_size: Few = 2

    @classmethod
    def from_folder(cls, folder: Path, **_: Any) -> "Qwen2VLImageProcessor":
        """Reads the processor of a checkpoint's folder.

        Raises:
            ValueError: there is no file, or an option in it is not valid; names both.
        """
        for name in FILES:
            if (folder / name).is_file():
                data = load_json(folder / name)
                return cls.from_dict(data.get("image_processor", data), source=str(folder / name))
        raise ValueError(f"{folder / FILES[0]} is missing; download the checkpoint again")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "preprocessor_config.json"
    ) -> "Qwen2VLImageProcessor":
        """Makes the processor of a parsed preprocessor_config.json, that of old versions included.

        Raises:
            ValueError: an option is not valid; names the source and the option.
        """
        values = {name: data[name] for name in cls.__struct_fields__ if data.get(name) is not None}
        size = values.get("size", {})
        if isinstance(size, dict):
            older = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
            given = {ours: data.get(theirs) for ours, theirs in older.items()}
            known = {k: v for k, v in size.items() if k in older and v is not None}
            values["size"] = known | {k: v for k, v in given.items() if v is not None}
        try:
            processor: Qwen2VLImageProcessor = convert(values, cls)
        except Mismatch as wrong:
            raise ValueError(f"{source}: {wrong}") from None
        if processor.size.shortest_edge > processor.size.longest_edge:
            raise ValueError(f"{source}: size must have a shortest_edge up to the longest_edge")
        return processor

    def __call__(self, images: Any, return_tensors: str | None = None) -> BatchEncoding:
        """Prepares images as transformers' processor does.

        Args:
            images: a path or a PIL image, or a list of them.
            return_tensors: "np", "pt" (PyTorch's), "jax", or None for arrays of NumPy.

        Returns:
            `.pixel_values`, the patches of all images in a row, n p float32, and `.image_grid_thw`,
            for each image the numbers of frames, 1, and of rows and columns of patches.

        Raises:
            ValueError: an argument is not an image, or one 200 times as long as wide.
            ImportError: return_tensors is "pt", and PyTorch is not installed.
        """
        listed = list(images) if isinstance(images, list | tuple) else [images]
        # An image that several texts speak of is cut once.
        each = {id(image): image for image in listed}
        made = {key: self.patches(self.pixels(image)) for key, image in each.items()}
        found = [made[id(image)] for image in listed]
        patches = np.concatenate([own for own, _ in found])
        grids = np.array([(1, *grid) for _, grid in found], np.int64)
        kind = return_tensors or "np"
        return BatchEncoding(
            pixel_values=as_kind(patches, kind), image_grid_thw=as_kind(grids, kind)
        )

    def pixels(self, image: Any) -> np.ndarray:
        """Returns the pixels of one image, given as a path or a PIL image: h w 3, float32.

        Raises:
            ValueError: the argument is not an image, or one 200 times as long as wide.
        """
        image = load_image(image)
        if self.do_resize:
            height, width = self.resized(image.height, image.width)
            image = image.resize((width, height), Image.Resampling(self.resample))
        pixels = np.asarray(image)
        if self.do_rescale:
            pixels = (pixels.astype(np.float64) * self.rescale_factor).astype(np.float32)
        pixels = pixels.astype(np.float32)
        if self.do_normalize:
            mean, std = (np.array(x, np.float32) for x in (self.image_mean, self.image_std))
            pixels = (pixels - mean) / std
        return pixels

    def patches(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Cuts an image into patches, n p, and counts their rows and columns.

        Patches are in the order of merged squares, their values in that of channels, frames (which
        are all the image), rows and columns.

        pixels: h w c, whose sides are multiples of patch_size merge_size.
        """
        size, merge, frames = self.patch_size, self.merge_size, self.temporal_patch_size
        rows, columns = (side // size for side in pixels.shape[:2])
        x = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, -1)
        x = x.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        x = np.broadcast_to(x, (*x.shape[:5], frames, *x.shape[6:]))
        return x.reshape(rows * columns, -1), (rows, columns)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of an image after resizing.

        Raises:
            ValueError: the longer side is over 200 times the shorter.
        """
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise ValueError(
                f"images must be at most {_MOST_ASPECT} times as long as wide (got {width}x"
                f"{height})"
            )
        unit = self.patch_size * self.merge_size
        least, most = self.size.shortest_edge, self.size.longest_edge
        # Python rounds halves to even numbers, as upstream does.
        found = tuple(round(side / unit) * unit for side in (height, width))
        if math.prod(found) > most:
            shrink = math.sqrt(height * width / most)
            found = tuple(max(unit, int(side / shrink / unit) * unit) for side in (height, width))
        elif math.prod(found) < least:
            grow = math.sqrt(least / (height * width))
            found = tuple(math.ceil(side * grow / unit) * unit for side in (height, width))
        return found[0], found[1]

    def save(self, folder: Path) -> None:
        """Writes the preprocessor_config.json that transformers reads."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILES[0], self.to_dict())

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Writes the preprocessor_config.json that transformers reads."""
        self.save(Path(save_directory))

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, as in preprocessor_config.json."""
        return {**msgspec.to_builtins(self), "image_processor_type": type(self).__name__}
