"""Makes small images of latents under way: with a linear map to colours, or a tiny decoder."""

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from diffusax.batch.image import PreparedImage
from diffusax.models.autoencoders.tiny import AutoencoderTinyConfig
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.run.images import decode, to_output
from diffusax.serving.engine.videos import MovingPreview, spread

_SAMPLES = 2048
"""About the latent pixels that a map is fitted to."""
_GRID = 4
"""The sides of the grid of random colours that is enlarged to latents."""
_SMALL = 16
"""The most latents of a video's sides to which its map is fitted."""
_LARGEST = 256
"""The most pixels of a preview's sides."""
_FRAMES = 8
"""The most frames of a video's preview."""
_NARROW = 1e-3
"""The least difference of noise levels between two latents that tell of a clean image."""

Moment = tuple[Any, int]
"""Latents 1 h w c, and the row before which they are."""


class Previews:
    """Shows latents as images, with a linear map from latents to colours for each autoencoder.

    The map is fitted by least squares when a model's first preview is made: smooth random latents
    are decoded, and the colours of the result are averaged over the pixels of each latent.
    """

    def __init__(self) -> None:
        self._maps: dict[int, tuple[weakref.ref[Any], np.ndarray]] = {}
        self._lock = threading.Lock()

    def sketch(
        self, c: Components, prepared: PreparedImage, now: Moment, before: Moment | None
    ) -> Image.Image | MovingPreview:
        """Returns a small image, or some frames of a video, of what the latents will become.

        Args:
            c: the components.
            prepared: the image in the batch.
            now: its latents as they are.
            before: its latents at an earlier row; None if its sampler has added noise since.
        """
        clean = expected_latents(prepared.levels, now, before)
        kept = prepared.entry.inpainting
        if clean.ndim == 5 and kept is not None:
            # The first frame that is given is put in its place where the run ends.
            clean = clean * kept.mask + np.asarray(kept.latents) * (1 - kept.mask)
        if isinstance(c.autoencoder.config, AutoencoderTinyConfig):
            given: Any = clean
            image = to_output(c, given, prepared.decoding, prepared.decoder_condition, "pil")[0]
            return _enlarged(image, clean.shape[1:3], c.latents.factor)
        colours = clean[0] @ (fitted := self._map(c, prepared))[:-1] + fitted[-1]
        shown = (255 * np.clip(colours, 0, 1) + 0.5).astype(np.uint8)
        sizes = shown.shape[-3:-1], c.latents.factor
        if shown.ndim == 3:
            return _enlarged(Image.fromarray(shown), *sizes)
        # The first frames may stand for images that the network looks at.
        own = shown[prepared.decoding.skip :]
        frames = [_enlarged(Image.fromarray(own[i]), *sizes) for i in spread(len(own), _FRAMES)]
        middle = _enlarged(Image.fromarray(own[len(own) // 2]), *sizes)
        return MovingPreview(middle, tuple(frames))

    def _map(self, c: Components, prepared: PreparedImage) -> np.ndarray:
        """Returns the map of an autoencoder, (c+1) 3; the last row is added."""
        params = c.params[c.autoencoder_name] if c.autoencoder_name else {}
        first = next(iter(jax.tree.leaves(params)), self)
        with self._lock:
            # An array of a model that has left memory may have given its identity to another one.
            known, found = self._maps.get(id(first), (None, None))
            if known is None or known() is not first or found is None:
                found = fit_colours(c, prepared)
                self._maps[id(first)] = weakref.ref(first), found
                while len(self._maps) > 64:
                    del self._maps[next(iter(self._maps))]
        return found


def fit_colours(c: Components, prepared: PreparedImage) -> np.ndarray:
    """Fits a linear map from latents to colours in [0, 1], (c+1) 3.

    Of a video, two small frames of latents that are the same are decoded, as all frames of a video
    would take long.

    prepared: an image of the size whose decoder has been compiled.
    """
    *frames, h, w, channels = prepared.entry.latents.shape
    decoding = dataclasses.replace(prepared.decoding, skip=0)
    if frames:
        h, w = min(h, _SMALL), min(w, _SMALL)
    count = int(np.clip(_SAMPLES // (h * w), 2, 16))
    random = np.random.default_rng(0)
    latents, colours = [], []
    for _ in range(count):
        coarse = random.standard_normal((1, _GRID, _GRID, channels)).astype(np.float32)
        x = np.array(jax.image.resize(coarse, (1, h, w, channels), "cubic"))
        given: Any = np.stack([x, x], 1) if frames else x
        images = np.asarray(decode(c, given, decoding, prepared.decoder_condition)[0])[0]
        whole = images.mean(0) if frames else images
        means = whole.reshape(h, c.latents.factor, w, c.latents.factor, 3).mean((1, 3))
        latents.append(x.reshape(-1, channels))
        colours.append(means.reshape(-1, 3))
    x = np.concatenate(latents)
    x = np.concatenate([x, np.ones((len(x), 1), np.float32)], 1)
    found: np.ndarray = np.linalg.lstsq(x, np.concatenate(colours), rcond=None)[0]
    return found.astype(np.float32)


def _enlarged(image: Image.Image, latents: Sequence[int], factor: int) -> Image.Image:
    """Returns a preview in the size of the image, but for large ones smaller.

    latents: the height and width of the latents. factor: the pixels of one in each direction.
    """
    height, width = (side * factor for side in latents)
    shrink = max(1.0, max(height, width) / _LARGEST)
    size = round(width / shrink), round(height / shrink)
    return image.resize(size, Image.Resampling.BICUBIC)


def expected_latents(levels: np.ndarray, now: Moment, before: Moment | None) -> np.ndarray:
    """Estimates the clean latents that a run goes towards, 1 h w c.

    Latents are signal x0 + noise eps. Two of them with the same eps give x0. With another eps, the
    expectation of x0 of unit variance is taken.

    levels: the (signal, noise) before each row.
    """
    x, (signal, noise) = np.asarray(now[0], np.float32), levels[now[1]]
    if before is not None:
        s, n = levels[before[1]]
        width = n * signal - noise * s
        if abs(width) > _NARROW * np.hypot(s, n) * np.hypot(signal, noise):
            return (n * x - noise * np.asarray(before[0], np.float32)) / np.float32(width)
    return x * np.float32(signal / (signal**2 + noise**2))
