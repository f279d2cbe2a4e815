"""Converts an autoencoder's latents to those of its diffusion model, and ranges of pixels."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LatentFormat:
    """What the latents of a diffusion model are."""

    channels: int
    factor: int
    """Pixels per latent, in each direction."""
    normalize: bool = False
    """Whether latents_mean and latents_std of the autoencoder count."""
    upcast: bool = False
    """Whether the autoencoder runs in float32 where its parameters are float16."""
    patch: int = 1
    """Latents per token of the denoiser, in each direction."""
    packed: bool = False
    """Whether calls return latents as such tokens, b t (c patch patch), and take them so, too."""
    fold: int = 1
    """The autoencoder's latents that are one of these, in each direction."""
    grid: int = 1
    """The number that the tokens in each direction are a multiple of."""
    frames: int = 0
    """The frames of a video per frame of latents, of which the first has one; 0 for images."""

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        normalize: bool = False,
        upcasts: bool = False,
        patch: int = 1,
        packed: bool = False,
        grid: int = 1,
    ) -> "LatentFormat":
        """The format of an autoencoder's latents.

        Args:
            config: the autoencoder's.
            normalize: whether the family's pipelines read latents_mean and latents_std.
            upcasts: whether they read force_upcast.
            patch: latents per token of the denoiser, in each direction.
            packed: whether the family's pipelines return latents as tokens.
            grid: the number that the tokens in each direction are a multiple of.
        """
        upcast = upcasts and bool(getattr(config, "force_upcast", False))
        fold = _fold(config)
        channels, factor = config.latent_channels * fold**2, config.downsampling * fold
        frames = getattr(config, "frames_per_latent", 0)
        return cls(channels, factor, normalize, upcast, patch, packed, fold, grid, frames)

    @functools.cached_property
    def multiple(self) -> int:
        """The number of pixels of which height and width are multiples."""
        return self.factor * self.patch * self.grid

    def outward(self, x: jax.Array) -> jax.Array:
        """Returns latents b ... c as calls return them: b c ..., or packed b t (c patch patch)."""
        if self.packed:
            return patchify(x, self.patch, channels_first=True)
        return jnp.moveaxis(x, -1, 1)

    def shape(self, height: int, width: int, frames: int | None = None) -> tuple[int, ...]:
        """h w c of the latents of an image of this height and width in pixels, of videos f h w c.

        frames: the number of frames of a video; None for one.
        """
        sizes = height // self.factor, width // self.factor, self.channels
        return (1 + ((frames or 1) - 1) // self.frames, *sizes) if self.frames else sizes


def scale_latents(
    config: Any, z: jax.Array, *, normalize: bool, statistics: Any = None
) -> jax.Array:
    """Returns the latents that a diffusion model is trained on. z: b h w z, the autoencoder's.

    They are (z - shift_factor) * scaling_factor. With `normalize`, and if the config has them,
    latents_mean is the shift and latents_std divides: SDXL's pipelines do so, Stable Diffusion's
    ignore the two (diffusers pipeline_stable_diffusion_xl_img2img.py, prepare_latents).

    statistics: see `latent_statistics`. Where the autoencoder has some, patches of its latents
    become one latent, b h/2 w/2 4z, of which each channel is normalised by its mean and variance
    (diffusers pipeline_flux2_klein.py, _encode_vae_image).
    """
    return scale_folded(
        config, fold_latents(z, _fold(config)), normalize=normalize, statistics=statistics
    )


def scale_folded(
    config: Any, z: jax.Array, *, normalize: bool = False, statistics: Any = None
) -> jax.Array:
    """Returns what `scale_latents` does for latents whose patches are one latent already."""
    shift, scale = _shift_and_scale(config, normalize, statistics)
    return (z - shift) * scale


def unscale_latents(
    config: Any, z: jax.Array, *, normalize: bool, statistics: Any = None
) -> jax.Array:
    """Inverts `scale_latents`: returns what the autoencoder decodes."""
    shift, scale = _shift_and_scale(config, normalize, statistics)
    return unfold_latents(z / scale + shift, _fold(config))


def latent_statistics(params: Any) -> Any:
    """Returns the statistics of latents among an autoencoder's parameters; None without any.

    They are a dictionary of running_mean and running_var, one number each for each channel.
    """
    return params.get("bn") if isinstance(params, Mapping) else None


def fold_latents(z: jax.Array, n: int) -> jax.Array:
    """Makes each patch of n x n latents one latent, b h w z -> b h/n w/n (z n n)."""
    if n == 1:
        return z
    b, h, w, c = z.shape
    return patchify(z, n, channels_first=True).reshape(b, h // n, w // n, c * n * n)


def unfold_latents(z: jax.Array, n: int) -> jax.Array:
    """Inverts `fold_latents`, b h w (z n n) -> b (h n) (w n) z."""
    if n == 1:
        return z
    b, h, w, c = z.shape
    return unpatchify(z.reshape(b, h * w, c), n, h * n, w * n, channels_first=True)


def sample_latents(mean: jax.Array, logvar: jax.Array, noise: jax.Array) -> jax.Array:
    """Samples the distribution that `AutoencoderKL.encode` returns. All arrays are b h w z."""
    return mean + jnp.exp(0.5 * logvar) * noise


def to_unit(x: jax.Array) -> jax.Array:
    """Scales pixels from [-1, 1] to [0, 1], and clips them there."""
    return jnp.clip(x / 2 + 0.5, 0.0, 1.0)


def from_bytes(x: jax.Array) -> jax.Array:
    """Scales pixels from 0..255 to [-1, 1], float32."""
    return x.astype(jnp.float32) / 127.5 - 1


def with_opacity(x: jax.Array, channels: int) -> jax.Array:
    """Returns images b H W 3 with the opacity 1 as a fourth channel, if there are to be four."""
    more = [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])]
    return jnp.pad(x, more, constant_values=1) if x.shape[-1] == 3 and channels == 4 else x


def _fold(config: Any) -> int:
    """Returns how many of the autoencoder's latents are one, in each direction."""
    return getattr(config, "latent_patch", None) or 1


def _shift_and_scale(config: Any, normalize: bool, statistics: Any) -> tuple[Any, Any]:
    if statistics is not None:
        variance = jnp.asarray(statistics["running_var"], jnp.float32) + config.batch_norm_eps
        return jnp.asarray(statistics["running_mean"], jnp.float32), 1 / jnp.sqrt(variance)
    mean, std = (getattr(config, name, None) for name in ("latents_mean", "latents_std"))
    if normalize and mean is not None and std is not None:
        return jnp.asarray(mean, jnp.float32), config.scaling_factor / jnp.asarray(std, jnp.float32)
    return config.shift_factor or 0.0, config.scaling_factor


def patchify(x: jax.Array, size: int, *, channels_first: bool = False) -> jax.Array:
    """Cuts maps into tokens of size x size pixels, row by row. x: b h w c -> b t (size size c).

    channels_first: whether a token is (c size size), as FLUX has it.
    """
    b, h, w, c = x.shape
    cut = x.reshape(b, h // size, size, w // size, size, c)
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return cut.transpose(order).reshape(b, (h // size) * (w // size), size * size * c)


def unpatchify(
    x: jax.Array, size: int, h: int, w: int, *, channels_first: bool = False
) -> jax.Array:
    """Inverts `patchify` for maps of h rows and w columns: b t (size size c) -> b h w c."""
    b, c, rows, columns = x.shape[0], x.shape[-1] // size**2, h // size, w // size
    if channels_first:
        cut = x.reshape(b, rows, columns, c, size, size).transpose(0, 1, 4, 2, 5, 3)
    else:
        cut = x.reshape(b, rows, columns, size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(b, h, w, c)
