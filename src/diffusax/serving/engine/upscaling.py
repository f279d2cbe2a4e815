"""Makes images larger: by Pillow's filters, or by the networks in the folder of models."""

import collections
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.checkpoints.upscalers import read_upscaler
from diffusax.models.network import Network
from diffusax.runtime.programs.program import Program
from diffusax.serving.catalogue.entries import FileEntry
from diffusax.serving.requests.errors import Busy, Refused

FILTERS = {
    "Lanczos": Image.Resampling.LANCZOS,
    "Nearest": Image.Resampling.NEAREST,
    "Bicubic": Image.Resampling.BICUBIC,
    "Bilinear": Image.Resampling.BILINEAR,
}
"""Pillow's filters by the names of upscalers."""
_STANDARD = (
    *("ESRGAN_4x", "R-ESRGAN 4x+", "R-ESRGAN 4x+ Anime6B", "LDSR", "ScuNET", "ScuNET GAN"),
    *("ScuNET PSNR", "SwinIR 4x", "SwinIR_4x", "DAT x2", "DAT x3", "DAT x4", "BSRGAN"),
)
"""The networks that A1111 brings, which its clients name without a look at the list."""
_TILE, _HALO, _MULTIPLE = 256, 16, 32
"""The pixels of a tile's side, of which so many at each border are cut off, and of what the sides
of an image that is no larger than a tile are made multiples, so that few sizes compile."""
_MOST_LOADED = 2
_MOST_WAITING = 8
_PASSES = 3
"""How often an image goes through a network, at most, until it is large enough."""


class Upscalers:
    """The upscalers of a server. Any thread may call it; one image at a time is computed."""

    def __init__(self, listed: Callable[[], Mapping[str, FileEntry]], most_pixels: int):
        """Loads nothing.

        Args:
            listed: returns the files of networks by name.
            most_pixels: the most pixels of an image on the way.
        """
        self._listed, self._most_pixels = listed, most_pixels
        self._loaded: collections.OrderedDict[tuple[Path, int], Any] = collections.OrderedDict()
        self._computing, self._places = threading.Lock(), threading.Semaphore(_MOST_WAITING)

    def names(self) -> list[str]:
        """Returns the names of all upscalers."""
        return [*FILTERS, *self._listed()]

    def find(self, name: str, param: str) -> str:
        """Returns the upscaler of a name; that is Lanczos for those of A1111 that are not here.

        Raises:
            Refused: there is none.
        """
        names = {one.lower(): one for one in self.names()}
        found = names.get(name.lower()) or ("Lanczos" if name in _STANDARD else None)
        if found is None:
            known = ", ".join(self.names())
            raise Refused(f"{param} must be one of {known} (got {name[:60]!r})", param=param)
        return found

    def resize(
        self, name: str, image: Image.Image, size: tuple[int, int], param: str
    ) -> Image.Image:
        """Returns an image of another size.

        Args:
            name: one of `names`.
            image: RGB.
            size: width and height. What a network makes larger or smaller than that is resized.
            param: what an error calls the size.

        Raises:
            Refused: the size is too large, or the network cannot be read or makes too large an
                image.
            Busy: too many images wait.
        """
        if size[0] * size[1] > self._most_pixels:
            raise Refused(
                f"{param} must ask for at most {self._most_pixels} pixels (got "
                f"{size[0]}x{size[1]}); make the image smaller",
                param=param,
                code="limit_exceeded",
            )
        entry = self._listed().get(name)
        if entry is None:
            return image.resize(size, FILTERS[name])
        if not self._places.acquire(blocking=False):
            raise Busy("too many images wait to be made larger; ask again later", retry_after=5.0)
        try:
            with self._computing:
                return self._computed(entry, image, size)
        finally:
            self._places.release()

    def _computed(self, entry: FileEntry, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        network, params = self._load(entry)
        scale = network.config.scale
        for _ in range(_PASSES):
            if scale <= 1 or (image.width >= size[0] and image.height >= size[1]):
                break
            pixels = int(image.width * image.height * scale**2)
            if pixels > self._most_pixels:
                raise Refused(
                    f"upscaler {entry.name!r} makes {scale:g} times larger images, which must have "
                    f"at most {self._most_pixels} pixels (got {pixels}); send a smaller image",
                    status=413,
                    code="picture_too_large",
                )
            found = upscaled(network, params, np.asarray(image, np.float32) / 255)
            image = Image.fromarray((np.clip(found, 0, 1) * 255 + 0.5).astype(np.uint8))
        return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)

    def _load(self, entry: FileEntry) -> tuple[Network, Any]:
        key = entry.path, entry.changed
        if key not in self._loaded:
            try:
                self._loaded[key] = read_upscaler(entry.path)
            except (ValueError, OSError) as error:
                message = f"upscaler {entry.name!r} cannot be loaded: {error}"
                raise Refused(message, code="not_loaded", status=500) from None
            while len(self._loaded) > _MOST_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return self._loaded[key]


def upscaled(network: Network, params: Any, pixels: np.ndarray) -> np.ndarray:
    """Makes an image larger, in tiles where it is larger than one.

    Beyond its borders the image is mirrored.

    Args:
        network: an RRDBNet.
        params: its parameters.
        pixels: h w 3 in [0, 1].

    Returns:
        H W 3, about in [0, 1].
    """
    height, width, _ = pixels.shape
    scale = network.config.scale
    final = round(height * scale), round(width * scale)
    if max(height, width) <= _TILE:
        more = [(0, -side % _MULTIPLE) for side in (height, width)]
        whole = _run(network, params, np.pad(pixels, [*more, (0, 0)], "symmetric")[None])
        return np.asarray(whole[0])[: final[0], : final[1]]
    step = _TILE - 2 * _HALO
    more = [(_HALO, _HALO + -side % step) for side in (height, width)]
    padded = np.pad(pixels, [*more, (0, 0)], "symmetric")
    found = np.empty((*(round(-(-side // step) * step * scale) for side in (height, width)), 3))
    inner, halo = round(step * scale), round(_HALO * scale)
    for i, top in enumerate(range(0, height, step)):
        for j, left in enumerate(range(0, width, step)):
            tile = padded[None, top : top + _TILE, left : left + _TILE]
            made = np.asarray(_run(network, params, tile))[0]
            part = made[halo : halo + inner, halo : halo + inner]
            found[i * inner : (i + 1) * inner, j * inner : (j + 1) * inner] = part
    return found[: final[0], : final[1]]


@functools.partial(Program, static=("network",))
def _run(network: Network, params: Any, pixels: Any) -> Any:
    """Runs a network."""
    return network.apply(params, pixels)
