"""Properties and methods of diffusers' pipelines besides calls, loading and saving."""

import logging
from typing import Any, Literal

import jax

from diffusax.images.vae_image_processor import VaeImageProcessor
from diffusax.pipelines.components import Components

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
        """The dtype of the denoiser's parameters."""
        return self.parts.dtype

    @property
    def device(self) -> Any:
        """The device of the denoiser's parameters."""
        leaf = jax.tree.leaves(self.parts.denoiser_params)[0]
        return next(iter(leaf.devices()))

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
