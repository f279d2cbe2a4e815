"""Properties and methods of diffusers' pipelines besides calls, loading and saving."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any, Literal

import jax
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from diffusax.callers import for_reader, wants_tensors
from diffusax.images.vae_image_processor import VaeImageProcessor
from diffusax.models.network import floating_dtype
from diffusax.pipelines.components import Components
from diffusax.runtime.noise import draw_like
from diffusax.tensors import alike, as_array, as_tensor, is_tensor

log = logging.getLogger(__name__)


class DiffusersMethods:
    """The properties and methods of every pipeline under diffusers' names."""

    parts: Components
    progress_bar_options: dict[str, Any]
    _guidance_scale: float | None
    _num_timesteps: int
    _interrupt: bool
    _tensors: Literal["pt", "jax"] | None

    @property
    def dtype(self) -> Any:
        """The dtype of the denoiser's parameters; PyTorch's for programs that work with it."""
        return for_reader(self.parts.dtype)

    @property
    def device(self) -> Any:
        """The device of the denoiser's parameters; PyTorch's for programs that work with it."""
        leaf = jax.tree.leaves(self.parts.denoiser_params)[0]
        return for_reader(next(iter(leaf.devices())))

    @property
    def tensors(self) -> Literal["pt", "jax"] | None:
        """What embeddings, latents, prepared pixels and callbacks' values are returned as.

        "pt", tensors of PyTorch, which may be changed in place, also in callbacks; "jax", arrays;
        or None for what the program works with: tensors where the module that calls has imported
        PyTorch and not JAX, else arrays.
        """
        return self._tensors

    @tensors.setter
    def tensors(self, kind: Literal["pt", "jax"] | None) -> None:
        if kind not in ("pt", "jax", None):
            raise ValueError(f"tensors must be 'pt', 'jax' or None (got {kind!r})")
        self._tensors = kind

    @property
    def vae_scale_factor(self) -> int:
        """The number of pixels per latent of the autoencoder, in each direction."""
        return self.parts.latents.factor // self.parts.latents.fold

    @property
    def image_processor(self) -> VaeImageProcessor:
        """The processor of the autoencoder's images: `preprocess` and `postprocess`."""
        latents = self.parts.latents
        return VaeImageProcessor(
            vae_scale_factor=latents.factor,
            vae_latent_channels=latents.channels,
            tensors=self.tensors,
        )

    @property
    def guidance_scale(self) -> float | None:
        """The last call's guidance scale; a callback may set `_guidance_scale` to change it."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the last call used guidance by guidance_scale."""
        family, distilled = self.parts.family, self.parts.options.get("is_distilled")
        guided = bool(family.guidance(self._guidance_scale or 0.0))
        return guided and not family.true_guidance and not distilled

    @property
    def num_timesteps(self) -> int:
        """The number of network evaluations of the last call."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether a callback has set `_interrupt`, which ends the run."""
        return self._interrupt

    def set_progress_bar_config(self, **options: Any) -> None:
        """Sets options of the tqdm bar, such as `disable=True`."""
        self.progress_bar_options = options

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> Any:
        """Returns a tqdm bar with the options of `set_progress_bar_config`, for loops by hand.

        Raises:
            ValueError: neither iterable nor total is given.
        """
        if iterable is None and total is None:
            raise ValueError("iterable or total must be given")
        return tqdm(iterable, total=total, **self.progress_bar_options)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Converts arrays in [0, 1], h w c or b h w c, to PIL images."""
        return VaeImageProcessor.numpy_to_pil(images)

    def prepare_extra_step_kwargs(self, generator: Any, eta: float) -> dict[str, Any]:
        """Returns those of generator and eta that the scheduler's `step` takes."""
        known = inspect.signature(self.parts.scheduler.step).parameters
        given = {"eta": eta, "generator": generator}
        return {name: value for name, value in given.items() if name in known}

    def enable_vae_tiling(self) -> None:
        """Makes later calls encode and decode images above the autoencoder's sample_size in tiles.

        The tiles overlap, and their overlaps are blended.
        """
        self.parts.autoencoder_model.enable_tiling()

    def disable_vae_tiling(self) -> None:
        """Makes later calls decode every image in one piece."""
        self.parts.autoencoder_model.disable_tiling()

    def enable_freeu(self, s1: float, s2: float, b1: float, b2: float) -> None:
        """Runs the UNet with FreeU (Si et al. 2023) from the next call on.

        Other numbers compile nothing. If one of them is zero, FreeU is off, as in diffusers.

        Args:
            s1: the scale of the skip connections' low frequencies at the smallest feature maps.
            s2: the same at the next larger ones.
            b1: the scale of half the backbone's channels at the smallest feature maps.
            b2: the same at the next larger ones.

        Raises:
            ValueError: one of them is not a finite number.
        """
        self.parts.models[self.parts.denoiser.components[0]].enable_freeu(s1, s2, b1, b2)

    def disable_freeu(self) -> None:
        """Runs the UNet without FreeU."""
        self.parts.models[self.parts.denoiser.components[0]].disable_freeu()

    def fuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Changes nothing; diffusers' method of this name fuses products, with equal images.

        In diffusax, XLA decides whether query, key and value are one product or three.
        """
        _log_qkv("fuse_qkv_projections")

    def unfuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Changes nothing; see `fuse_qkv_projections`."""
        _log_qkv("unfuse_qkv_projections")


def _mask_processor(self: DiffusersMethods) -> VaeImageProcessor:
    """The processor of masks: `preprocess` and `blur`."""
    return VaeImageProcessor(
        vae_scale_factor=self.vae_scale_factor,
        vae_latent_channels=self.parts.latents.channels,
        do_normalize=False,
        do_binarize=True,
        do_convert_grayscale=True,
        tensors=self.tensors,
    )


def _control_image_processor(self: DiffusersMethods) -> VaeImageProcessor:
    """The processor of control images, whose pixels stay in [0, 1]."""
    return VaeImageProcessor(
        vae_scale_factor=self.vae_scale_factor,
        do_convert_rgb=True,
        do_normalize=False,
        tensors=self.tensors,
    )


def prepare_latents(
    self: DiffusersMethods,
    batch_size: int,
    num_channels_latents: int,
    height: int,
    width: int,
    dtype: Any = None,
    device: Any = None,
    generator: Any = None,
    latents: Any = None,
) -> Any:
    """Returns the latents that a loop by hand begins with, noise of the scheduler's deviation.

    Args:
        batch_size: the number of images.
        num_channels_latents: their channels.
        height: in pixels.
        width: in pixels.
        dtype: that of the result, float32 by default.
        device: changes nothing.
        generator: see `draw_like`.
        latents: standard normal numbers b c h w, instead of drawing them.

    Raises:
        ValueError: generator is not valid.
    """
    sides = (int(side) // self.vae_scale_factor for side in (height, width))
    x: Any = np.zeros((batch_size, num_channels_latents, *sides), np.float32)
    if wants_tensors(self.tensors, latents):
        x = as_tensor(x)
    noise = draw_like(x, generator) if latents is None else latents
    found = alike(as_array(noise) * np.float32(self.parts.scheduler.init_noise_sigma), x)
    if dtype is None:
        return found
    return found.to(dtype) if is_tensor(found) else found.astype(floating_dtype(dtype))


mask_processor = property(_mask_processor)
"""The attribute of pipelines that take masks."""
control_image_processor = property(_control_image_processor)
"""The attribute of pipelines with ControlNets."""


def _log_qkv(name: str) -> None:
    log.info("%s changes nothing in diffusax: XLA plans the products of attention", name)


def _no_meaning(name: str) -> Any:
    def method(self: DiffusersMethods, *args: Any, **kwargs: Any) -> None:
        log.info("%s changes nothing in diffusax: XLA plans memory and fuses attention", name)

    method.__doc__ = "Accepted, as diffusers' method of this name; XLA does without it."
    method.__name__ = name
    return method


for _name in (
    "enable_attention_slicing",
    "disable_attention_slicing",
    "enable_xformers_memory_efficient_attention",
    "disable_xformers_memory_efficient_attention",
    "enable_vae_slicing",
    "disable_vae_slicing",
):
    setattr(DiffusersMethods, _name, _no_meaning(_name))
