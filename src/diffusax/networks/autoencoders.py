"""Autoencoders, called as in diffusers."""

from typing import Any, ClassVar

import numpy as np

from diffusax.boundary.tensors import alike
from diffusax.models.autoencoders.tiling import (
    TILED_ENCODERS,
    encoder_tiles,
    tile_of,
    tiled_decode,
    tiled_encode,
)
from diffusax.models.table import MODELS
from diffusax.networks.arguments import arrays, check_rows, result, take_map, take_video
from diffusax.networks.model import Model
from diffusax.networks.outputs import (
    AutoencoderKLOutput,
    AutoencoderTinyOutput,
    DecoderOutput,
    DiagonalGaussianDistribution,
)
from diffusax.networks.pretrained import FromSingleFile


class _Autoencoder(FromSingleFile, Model):
    component = "vae"

    def encode(self, x: Any, return_dict: bool = True) -> AutoencoderKLOutput:
        """Encodes images: `.latent_dist`, with `sample(generator)`, `mode()`, `mean` and `std`.

        The latents are the autoencoder's own: multiply them by `config.scaling_factor`.

        Args:
            x: images in [-1, 1], b 3 H W.
            return_dict: whether to return an AutoencoderKLOutput instead of a tuple.

        Raises:
            ValueError: x has another shape.
        """
        return _encode(self, x, return_dict)

    def decode(self, z: Any, return_dict: bool = True, generator: Any = None) -> DecoderOutput:
        """Decodes latents to images: `.sample`, b 3 H W, about [-1, 1].

        Args:
            z: latents, b z h w: those of a diffusion model divided by `config.scaling_factor`.
            return_dict: whether to return a DecoderOutput instead of a tuple.
            generator: accepted, changes nothing, as in diffusers.

        Raises:
            ValueError: z has another shape.
        """
        return _decode(self, z, {}, return_dict)

    def __call__(
        self,
        sample: Any,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Any = None,
    ) -> DecoderOutput:
        """Encodes and decodes images b 3 H W.

        Args:
            sample: images in [-1, 1], b 3 H W.
            sample_posterior: whether to sample the latents instead of taking their mode.
            return_dict: whether to return a DecoderOutput instead of a tuple.
            generator: see `DiagonalGaussianDistribution.sample`.

        Raises:
            ValueError: sample has another shape.
        """
        z = _latents(self, sample, sample_posterior, generator)
        return self.decode(z, return_dict=return_dict)


class AutoencoderKL(_Autoencoder):
    """The autoencoder of Stable Diffusion, SDXL, FLUX.1 and Z-Image."""

    module_class = MODELS["AutoencoderKL"]


class AutoencoderKLFlux2(_Autoencoder):
    """The autoencoder of FLUX.2."""

    module_class = MODELS["AutoencoderKLFlux2"]


class AutoencoderKLQwenImage(_Autoencoder):
    """The autoencoder of Qwen-Image and Krea 2, for images: videos of one frame.

    Saved, it is one for images in diffusers, too: what its kernels do to earlier frames of videos
    is not read, and zeros are written for it.
    """

    module_class = MODELS["AutoencoderKLQwenImage"]
    clips_tiles: ClassVar[bool] = False
    """Whether diffusers clips images that are decoded in tiles, too."""

    def encode(self, x: Any, return_dict: bool = True) -> AutoencoderKLOutput:
        """Encodes images: `.latent_dist`, of latents b z 1 h w; see `AutoencoderKL.encode`.

        Latents of a diffusion model are these less `config.latents_mean`, over
        `config.latents_std`.

        Args:
            x: images in [-1, 1], b 3 1 H W.
            return_dict: whether to return an AutoencoderKLOutput instead of a tuple.

        Raises:
            ValueError: x has another shape, or more than one frame.
        """
        posterior = super().encode(_of_one_frame("x", x)).latent_dist
        mean, logvar = posterior.mean[:, :, None], posterior.logvar[:, :, None]
        output: Any = AutoencoderKLOutput(DiagonalGaussianDistribution(mean, logvar))
        return output if return_dict else output.to_tuple()

    def decode(self, z: Any, return_dict: bool = True) -> DecoderOutput:  # type: ignore[override]
        """Decodes latents to images: `.sample`, b 3 1 H W in [-1, 1].

        Args:
            z: latents, b z 1 h w: those of a diffusion model times `config.latents_std`, plus
                `config.latents_mean`.
            return_dict: whether to return a DecoderOutput instead of a tuple.

        Raises:
            ValueError: z has another shape, or more than one frame.
        """
        images = super().decode(_of_one_frame("z", z)).sample
        whole = not self.tiling
        in_range = images.clip(-1, 1) if whole or self.clips_tiles else images
        output: Any = DecoderOutput(in_range[:, :, None])
        return output if return_dict else output.to_tuple()


class AsymmetricAutoencoderKL(Model):
    """An autoencoder for inpainting, whose decoder sees what the mask keeps."""

    module_class = MODELS["AsymmetricAutoencoderKL"]

    def encode(self, x: Any, return_dict: bool = True) -> AutoencoderKLOutput:
        """Encodes images; see `AutoencoderKL.encode`."""
        return _encode(self, x, return_dict)

    def decode(
        self,
        z: Any,
        generator: Any = None,
        image: Any = None,
        mask: Any = None,
        return_dict: bool = True,
    ) -> DecoderOutput:
        """Decodes latents to images: `.sample`, b 3 H W, about [-1, 1].

        Args:
            z: latents, b z h w.
            generator: accepted, changes nothing, as in diffusers.
            image: the image that is kept, b 3 H W in [-1, 1]; both it and the mask, or neither.
            mask: b 1 H W, zero where the image is kept.
            return_dict: whether to return a DecoderOutput instead of a tuple.

        Raises:
            ValueError: an array has another shape.
        """
        shown = {}
        if image is not None and mask is not None:
            shown["image"] = take_map("image", image, self.config.out_channels)
            shown["mask"] = take_map("mask", mask, 1)
        return _decode(self, z, shown, return_dict)

    def __call__(
        self,
        sample: Any,
        mask: Any = None,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Any = None,
    ) -> DecoderOutput:
        """Encodes and decodes images b 3 H W, and keeps what the mask does.

        Args:
            sample: images in [-1, 1], b 3 H W.
            mask: b 1 H W, zero where the image is kept.
            sample_posterior: whether to sample the latents instead of taking their mode.
            return_dict: whether to return a DecoderOutput instead of a tuple.
            generator: see `DiagonalGaussianDistribution.sample`.

        Raises:
            ValueError: an array has another shape.
        """
        z = _latents(self, sample, sample_posterior, generator)
        return self.decode(z, image=sample, mask=mask, return_dict=return_dict)


class AutoencoderTiny(Model):
    """The tiny autoencoder TAESD."""

    module_class = MODELS["AutoencoderTiny"]

    def encode(self, x: Any, return_dict: bool = True) -> AutoencoderTinyOutput:
        """Encodes images b 3 H W in [-1, 1]: `.latents`, b z h w.

        Raises:
            ValueError: x has another shape.
        """
        pixels = take_map("x", x, self.config.in_channels)
        latents = self.run(pixels, method="encode", channels_first=True)
        return result(AutoencoderTinyOutput(latents), return_dict, x)

    def decode(self, x: Any, generator: Any = None, return_dict: bool = True) -> DecoderOutput:
        """Decodes latents b z h w: `.sample`, b 3 H W, about [-1, 1]. generator changes nothing.

        Raises:
            ValueError: x has another shape.
        """
        return _decode(self, x, {}, return_dict, name="x")

    def __call__(self, sample: Any, return_dict: bool = True) -> DecoderOutput:
        """Encodes and decodes images b 3 H W, with latents rounded to bytes between: `.sample`.

        Raises:
            ValueError: sample has another shape.
        """
        pixels = take_map("sample", sample, self.config.in_channels)
        y = self.run(pixels, channels_first=True)
        return result(DecoderOutput(y), return_dict, sample)


class AutoencoderKLQwenImage21(AutoencoderKLQwenImage):
    """The autoencoder of Qwen-Image 2.1, for images with an opacity: b 4 1 H W."""

    module_class = MODELS["AutoencoderKLQwenImage21"]
    clips_tiles = True


class AutoencoderKLWan(_Autoencoder):
    """The autoencoder of Wan 2.1 and 2.2, for videos b 3 f H W.

    The first frame is one frame of latents, and four frames that follow are another one.
    """

    module_class = MODELS["AutoencoderKLWan"]

    def encode(self, x: Any, return_dict: bool = True) -> AutoencoderKLOutput:
        """Encodes videos: `.latent_dist`, of latents b z f' h w; see `AutoencoderKL.encode`.

        Latents of a diffusion model are these less `config.latents_mean`, over
        `config.latents_std`.

        Args:
            x: videos in [-1, 1], b 3 f H W. Of frames after the first those beyond a multiple of
                four are left out, as in diffusers.
            return_dict: whether to return an AutoencoderKLOutput instead of a tuple.

        Raises:
            ValueError: x has another shape.
        """
        pixels = take_video("x", x, self.config.pixel_channels)
        return _encode(self, x, return_dict, pixels=pixels)

    def decode(self, z: Any, return_dict: bool = True) -> DecoderOutput:  # type: ignore[override]
        """Decodes latents to videos: `.sample`, b 3 F H W in [-1, 1].

        Args:
            z: latents, b z f h w: those of a diffusion model times `config.latents_std`, plus
                `config.latents_mean`.
            return_dict: whether to return a DecoderOutput instead of a tuple.

        Raises:
            ValueError: z has another shape.
        """
        latents = take_video("z", z, self.config.z_dim)
        videos = _decode(self, z, {}, True, latents=latents).sample
        output: Any = DecoderOutput(videos.clip(-1, 1))
        return output if return_dict else output.to_tuple()


def _of_one_frame(name: str, value: Any) -> Any:
    """Returns videos b c 1 h w as images b c h w.

    Raises:
        ValueError: they do not have five axes, or more than one frame.
    """
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 5 or shape[2] != 1:
        raise ValueError(
            f"{name} must have shape (batch, channels, 1, height, width): this autoencoder is for "
            f"images, which are videos of one frame (got shape {shape})"
        )
    return value[:, :, 0]


def _encode(model: Model, x: Any, return_dict: bool, *, pixels: Any = None) -> Any:
    """Encodes images, in tiles where tiling is on. pixels: x as an array, where it is checked."""
    if pixels is None:
        pixels = take_map("x", x, model.config.in_channels)
    if model.tiling and model.class_name in TILED_ENCODERS:
        moments = _encode_tiles(model, pixels)
    else:
        moments = model.run(pixels, method="encode", channels_first=True)
    mean, logvar = alike(moments, x)
    output = AutoencoderKLOutput(DiagonalGaussianDistribution(mean, logvar))
    return output if return_dict else output.to_tuple()


def _encode_tiles(model: Model, pixels: Any) -> tuple[np.ndarray, ...]:
    """Encodes images of more than the autoencoder's sample_size in overlapping tiles."""
    moments = tiled_encode(
        lambda part: np.concatenate(model.run(part, method="encode"), axis=-1),
        np.moveaxis(np.asarray(pixels), 1, -1),
        **encoder_tiles(model.config),
    )
    return tuple(np.split(np.moveaxis(moments, -1, 1), 2, axis=1))


def _latents(model: Any, sample: Any, sample_posterior: bool, generator: Any) -> Any:
    posterior = model.encode(sample).latent_dist
    return posterior.sample(generator) if sample_posterior else posterior.mode()


def _decode(
    model: Model,
    z: Any,
    shown: dict[str, Any],
    return_dict: bool,
    *,
    name: str = "z",
    latents: Any = None,
) -> Any:
    """Decodes latents, in tiles where tiling is on.

    Args:
        model: the autoencoder.
        z: the latents as they are given.
        shown: an image and a mask, or nothing.
        return_dict: whether to return a DecoderOutput instead of a tuple.
        name: the name of the latents' argument.
        latents: z as an array, where it is checked.

    Raises:
        ValueError: an array has another shape.
    """
    if latents is None:
        latents = take_map(name, z, model.config.latent_channels)
    shown = arrays(shown)
    for key, value in shown.items():
        check_rows(key, value, latents.shape[0])
    if model.tiling:
        y = _decode_tiles(model, latents, list(shown.values()))
    else:
        y = model.run(latents, method="decode", channels_first=True, **shown)
    return result(DecoderOutput(y), return_dict, z)


def _decode_tiles(model: Model, latents: Any, shown: list[Any]) -> np.ndarray:
    """Decodes latents of more than the autoencoder's sample_size in overlapping tiles."""
    factor = model.config.downsampling
    images = tiled_decode(
        lambda *parts: model.run(*parts, method="decode"),
        *(np.moveaxis(np.asarray(x), 1, -1) for x in (latents, *shown)),
        tile=tile_of(model.config, factor),
        factor=factor,
        patch=getattr(model.config, "patch", 1),
    )
    return np.moveaxis(images, -1, 1)
