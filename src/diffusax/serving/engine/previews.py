"""Makes small images of latents under way: with a linear map to colours, or a tiny decoder."""

import threading
import weakref
from typing import Any

import jax
import numpy as np
from PIL import Image

from diffusax.batch.image import PreparedImage
from diffusax.models.autoencoders.tiny import AutoencoderTinyConfig
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.run.images import decode, to_output

_SAMPLES = 2048
"""About the latent pixels that a map is fitted to."""
_GRID = 4
"""The sides of the grid of random colours that is enlarged to latents."""
_LARGEST = 256
"""The most pixels of a preview's sides."""
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
    ) -> Image.Image:
        """Returns a small image of what the latents will become.

        Args:
            c: the components.
            prepared: the image in the batch.
            now: its latents as they are.
            before: its latents at an earlier row; None if its sampler has added noise since.
        """
        clean = expected_latents(prepared.levels, now, before)
        if isinstance(c.autoencoder.config, AutoencoderTinyConfig):
            given: Any = clean
            image = to_output(c, given, prepared.decoding, prepared.decoder_condition, "pil")[0]
        else:
            colours = clean[0] @ (fitted := self._map(c, prepared))[:-1] + fitted[-1]
            image = Image.fromarray((255 * np.clip(colours, 0, 1) + 0.5).astype(np.uint8))
        factor = c.latents.factor
        height, width = (side * factor for side in clean.shape[1:3])
        shrink = max(1.0, max(height, width) / _LARGEST)
        return image.resize(
            (round(width / shrink), round(height / shrink)), Image.Resampling.BICUBIC
        )

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

    prepared: an image of the size whose decoder has been compiled.
    """
    h, w, channels = prepared.entry.latents.shape
    count = int(np.clip(_SAMPLES // (h * w), 2, 16))
    random = np.random.default_rng(0)
    latents, colours = [], []
    for _ in range(count):
        coarse = random.standard_normal((1, _GRID, _GRID, channels)).astype(np.float32)
        x = np.array(jax.image.resize(coarse, (1, h, w, channels), "cubic"))
        condition = prepared.decoder_condition
        images = np.asarray(decode(c, x, prepared.decoding, condition)[0])[0]
        means = images.reshape(h, c.latents.factor, w, c.latents.factor, 3).mean((1, 3))
        latents.append(x.reshape(-1, channels))
        colours.append(means.reshape(-1, 3))
    x = np.concatenate(latents)
    x = np.concatenate([x, np.ones((len(x), 1), np.float32)], 1)
    found: np.ndarray = np.linalg.lstsq(x, np.concatenate(colours), rcond=None)[0]
    return found.astype(np.float32)


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
