"""Metrics as pure functions of features."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusax.boundary.files import written_whole

_SMALLEST_NORM = 1e-8


class Mean(NamedTuple):
    """A mean, and its standard error: the deviation of the values by the root of their number."""

    mean: float
    error: float


class Gaussian(NamedTuple):
    """A normal distribution. mu: d. sigma: d d, the unbiased covariance. Both are float64."""

    mu: np.ndarray
    sigma: np.ndarray


def text_image_similarity(images: Any, texts: Any) -> jax.Array:
    """Returns cos(E(image), T(text)). images, texts: b d, CLIP's features of any length -> b."""
    return _cosine(images, texts)


def clip_score(images: Any, texts: Any) -> jax.Array:
    """Returns 100 max(cos(E(image), T(text)), 0), as torchmetrics scales it.

    Hessel et al. 2021, "CLIPScore", equation 1, has 2.5 instead of 100. images, texts: b d, CLIP's
    features -> b.
    """
    return 100 * jnp.maximum(_cosine(images, texts), 0)


def image_similarity(original: Any, edited: Any) -> jax.Array:
    """Returns cos(E(original), E(edited)): how much of an image an edit has kept. b d, b d -> b."""
    return _cosine(original, edited)


def direction_similarity(original: Any, edited: Any, before: Any, after: Any) -> jax.Array:
    """Returns cos(E(edited) - E(original), T(after) - T(before)): how well edits follow captions.

    Gal et al. 2022, "StyleGAN-NADA", equation 2, as InstructPix2Pix measures it: the features have
    length one before they are subtracted (its metrics/clip_similarity.py).

    original, edited: CLIP's features of the images, b d. before, after: those of the captions, b d.
    -> b; 0 where nothing changed.
    """
    original, edited, before, after = map(_unit, (original, edited, before, after))
    return _cosine(edited - original, after - before)


def pixel_distances(images: Sequence[Image.Image], others: Sequence[Image.Image]) -> np.ndarray:
    """Returns the mean absolute and the mean squared difference of pixels in [0, 1]: b 2 float64.

    They are MagicBrush's L1 and L2 (its evaluation/image_eval.py): an image is first resized to the
    size of the other one, bicubically.
    """

    def distances(image: Image.Image, other: Image.Image) -> tuple[float, float]:
        resized = image.convert("RGB").resize(other.size)
        a, b = (np.asarray(x.convert("RGB"), np.float64) / 255 for x in (resized, other))
        return float(np.abs(a - b).mean()), float(np.square(a - b).mean())

    pairs = zip(images, others, strict=True)
    return np.array([distances(*pair) for pair in pairs]).reshape(-1, 2)


def mean_and_error(values: Any) -> Mean:
    """Returns the mean of some values and its standard error, 0 for a single one."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / len(array) ** 0.5 if len(array) > 1 else 0.0
    return Mean(float(array.mean()), float(error))


class Moments:
    """The mean and covariance of features that come in batches, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: Any = 0.0
        self._products: Any = 0.0

    def add(self, features: Any) -> None:
        """Adds some features. features: b d."""
        features = np.asarray(features, np.float64)
        self.count += len(features)
        self._sums = self._sums + features.sum(0)
        self._products = self._products + features.T @ features

    def gaussian(self) -> Gaussian:
        """Returns the statistics of all features so far.

        Raises:
            ValueError: there are less than two features, which have no covariance.
        """
        if self.count < 2:
            raise ValueError(f"FID needs at least 2 images on each side (got {self.count})")
        mu = self._sums / self.count
        sigma = (self._products - self.count * np.outer(mu, mu)) / (self.count - 1)
        return Gaussian(mu, sigma)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Returns |mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)).

    Dowson and Landau 1982; Heusel et al. 2017. tr (A B)^(1/2) is the sum of the roots of the
    eigenvalues of A^(1/2) B A^(1/2), which is symmetric: unlike the root of A B, it stays real if a
    covariance is singular.

    Raises:
        ValueError: the two have features of different lengths.
    """
    if a.mu.shape != b.mu.shape:
        raise ValueError(
            f"the statistics are of features of different lengths ({a.mu.size} and {b.mu.size})"
        )
    values, vectors = np.linalg.eigh(a.sigma)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    inner = root @ b.sigma @ root
    shared = np.sqrt(np.linalg.eigvalsh((inner + inner.T) / 2).clip(0)).sum()
    distance = np.square(a.mu - b.mu).sum() + np.trace(a.sigma) + np.trace(b.sigma) - 2 * shared
    return float(max(distance, 0.0))


def save_statistics(path: Path, gaussian: Gaussian) -> None:
    """Writes mu and sigma to an .npz file like pytorch-fid; it appears only when whole."""
    with written_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, mu=gaussian.mu, sigma=gaussian.sigma)


def load_statistics(path: Path) -> Gaussian:
    """Reads mu and sigma from an .npz file, pytorch-fid's included.

    Raises:
        ValueError: the file does not hold them, or they do not fit together.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            mu, sigma = (np.asarray(data[name], np.float64) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no .npz file with mu and sigma ({reason})") from None
    fits = mu.ndim == 1 and sigma.shape == (mu.size, mu.size)
    if not fits or not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise ValueError(
            f"{path} must hold mu, d, and sigma, d d, of finite numbers (got {mu.shape} and "
            f"{sigma.shape})"
        )
    return Gaussian(mu, sigma)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table in Markdown, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |"
        for line in lines
    )


def _unit(x: Any) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), _SMALLEST_NORM)


def _cosine(a: Any, b: Any) -> jax.Array:
    return jnp.sum(_unit(a) * _unit(b), axis=-1)
