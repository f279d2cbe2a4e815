"""Properties and methods of diffusers' pipelines besides calls, loading and saving."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from diffusax.boundary.tensors import (
    alike,
    as_array,
    as_numpy,
    as_tensor,
    for_reader,
    is_tensor,
    wants_tensors,
)
from diffusax.images.vae_image_processor import VaeImageProcessor
from diffusax.models.layers.embeddings import guidance_scale_embedding
from diffusax.models.network import floating_dtype
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, check_call
from diffusax.pipelines.tasks.setup import check_memory, count_images, image_size
from diffusax.runtime.random.noise import draw_like

log = logging.getLogger(__name__)

LAST_CALL = (
    *("clip_skip", "guidance_rescale", "image_guidance_scale", "lora_scale"),
    *("denoising_start", "denoising_end"),
)
"""The arguments that properties tell of the last call."""


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
        """The dtype of the denoiser's parameters; PyTorch's for programs that work with it.

        Without a denoiser it is that of the first network.
        """
        return for_reader(self.parts.dtype)

    @property
    def device(self) -> Any:
        """The device of the denoiser's parameters; PyTorch's for programs that work with it.

        Without a denoiser it is that of the first network.
        """
        return for_reader(next(iter(self.parts.first_leaf.devices())))

    _execution_device = device

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
        call = Call(guidance_scale=self._guidance_scale or 0.0)
        return bool(self.parts.family.guidance.weights(self.parts, call))

    @property
    def num_timesteps(self) -> int:
        """The number of network evaluations of the last call."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether a callback has set `_interrupt`, which ends the run."""
        return self._interrupt

    @property
    def clip_skip(self) -> int | None:
        """The number of the text encoder's last layers that the last call left out."""
        return self._last("clip_skip")

    @property
    def guidance_rescale(self) -> float:
        """The last call's guidance_rescale."""
        return float(self._last("guidance_rescale") or 0.0)

    @property
    def image_guidance_scale(self) -> float | None:
        """The last call's image_guidance_scale."""
        return self._last("image_guidance_scale")

    @property
    def denoising_start(self) -> float | None:
        """The last call's denoising_start."""
        return self._last("denoising_start")

    @property
    def denoising_end(self) -> float | None:
        """The last call's denoising_end."""
        return self._last("denoising_end")

    @property
    def cross_attention_kwargs(self) -> dict[str, Any] | None:
        """The strength of LoRAs that the last call gave, as {"scale": 0.5}; None without one."""
        scale = self._last("lora_scale")
        return None if scale in (None, 1.0) else {"scale": scale}

    joint_attention_kwargs = attention_kwargs = cross_attention_kwargs

    def _last(self, name: str) -> Any:
        """Returns a number of the last call; None before the first."""
        return vars(self).get("_last_call", {}).get(name)

    @property
    def current_timestep(self) -> float | None:
        """The timestep of the step that a run is at, for callbacks; None between runs."""
        return vars(self).get("_current_timestep")

    @property
    def hf_device_map(self) -> None:
        """None: a mesh says where parameters are, see `mesh`."""
        return None

    @property
    def name_or_path(self) -> str | None:
        """The folder or repository that was loaded; None for a pipeline made of components."""
        return vars(self).get("_name_or_path")

    def register_modules(self, **components: Any) -> None:
        """Assigns components by name, as diffusers' constructors do."""
        for name, value in components.items():
            setattr(self, name, value)

    def run_safety_checker(self, image: Any, device: Any = None, dtype: Any = None) -> Any:
        """Returns the images and None, because no safety checker runs."""
        return image, None

    def get_timesteps(
        self, num_inference_steps: int, strength: float, device: Any = None
    ) -> tuple[Any, int]:
        """Returns the timesteps of a run that starts from an image, and the number of its steps.

        After `scheduler.set_timesteps`, for loops by hand (Meng et al. 2022, SDEdit).
        """
        scheduler = self.parts.scheduler
        first = max(num_inference_steps - int(num_inference_steps * strength), 0)
        scheduler.set_begin_index(first * scheduler.order)
        return scheduler.timesteps[first * scheduler.order :], num_inference_steps - first

    def get_guidance_scale_embedding(
        self, w: Any, embedding_dim: int = 512, dtype: Any = np.float32
    ) -> Any:
        """Returns the embedding of guidance scales minus one, n, for consistency models: n d."""
        found = guidance_scale_embedding(jnp.asarray(as_numpy(w), jnp.float32), embedding_dim)
        return alike(found.astype(floating_dtype(dtype) or np.float32), w)

    def check_inputs(self, *args: Any, **given: Any) -> None:
        """Checks arguments of a call without making it.

        Args:
            *args: in the order of diffusers' method for text to image.
            **given: by name.

        Raises:
            ValueError: one is not valid; says which, and what is.
        """
        several = len(self.parts.family.text_encoders) > 1
        order = [name for name in _INPUTS if several or not name.endswith("_2")]
        values = {**dict(zip(order, args)), **given}
        steps = values.pop("callback_steps", None)
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"callback_steps must be an integer of at least 1 (got {steps!r})")
        call = check_call({k: v for k, v in values.items() if v is not None})
        if self.parts.family.text_encoders:
            images = count_images(call)
            if call.height or call.width:
                check_memory(self.parts, images, *image_size(self.parts, call))

    def upcast_vae(self) -> None:
        """Casts the autoencoder to float32."""
        self.parts.autoencoder_model.to(dtype=np.float32)

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


_INPUTS = (
    *("prompt", "prompt_2", "height", "width", "callback_steps"),
    *("negative_prompt", "negative_prompt_2", "prompt_embeds", "negative_prompt_embeds"),
)
"""The first arguments of diffusers' check_inputs of text to image."""


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
    "set_attention_slice",
    "set_use_memory_efficient_attention_xformers",
    "enable_vae_slicing",
    "disable_vae_slicing",
):
    setattr(DiffusersMethods, _name, _no_meaning(_name))
