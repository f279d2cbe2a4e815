"""Stable Diffusion's Flax pipelines that start from an image; see `stable_diffusion`."""

from typing import Any

import jax
import jax.numpy as jnp

from diffusax.interop.flax import generation
from diffusax.interop.flax.generation import Params
from diffusax.interop.flax.inputs import masks, to_unit_arrays
from diffusax.interop.flax.stable_diffusion import StableDiffusion, guided
from diffusax.interop.flax.text import prompt_ids
from diffusax.pipelines.plan import guidance
from diffusax.pipelines.plan.plan import Conditions
from diffusax.pipelines.run import programs
from diffusax.runtime.random.noise import as_key


class FlaxStableDiffusionImg2ImgPipeline(StableDiffusion):
    """Generates images from images, noised to the level of the strength (Meng et al. 2022)."""

    def prepare_inputs(self, prompt: str | list[str], image: Any) -> tuple[Any, jax.Array]:
        """Returns token ids b t, and images b 3 h w in [-1, 1] with sides multiples of 32."""
        return prompt_ids(self.tokenizer, prompt), 2 * to_unit_arrays(image, 32) - 1

    def get_timestep_start(self, num_inference_steps: int, strength: float) -> int:
        """Returns the first row of the run."""
        kept = min(int(num_inference_steps * strength), num_inference_steps)
        return max(num_inference_steps - kept, 0)

    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Params,
        prng_seed: jax.Array,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        noise: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> Any:
        """Generates images b h w 3 in [0, 1]; `stable_diffusion` describes most arguments.

        image: b 3 height width in [-1, 1]. strength: the share of the rows that is run.
        """
        return self._called(
            locals(),
            start_timestep=self.get_timestep_start(num_inference_steps, strength),
            num_inference_steps=num_inference_steps,
            **self._size(height, width),
        )

    def _generate(
        self,
        prompt_ids: Any,
        image: jax.Array,
        params: Params,
        prng_seed: jax.Array,
        start_timestep: int,
        num_inference_steps: int,
        height: int,
        width: int,
        guidance_scale: Any = 7.5,
        noise: Any = None,
        neg_prompt_ids: Any = None,
    ) -> jax.Array:
        b = prompt_ids.shape[0]
        eps = generation.initial_noise(self, prng_seed, (b, height, width), noise)
        if image.shape[-2:] != (height, width):
            raise ValueError(
                f"image is {image.shape[-2]} by {image.shape[-1]}, but `height` and `width` are "
                f"{height} and {width}; resize it or pass its own"
            )
        # As in diffusers, the latents are drawn with the key that the noise was drawn with.
        clean = generation.encode_images(self, params, image, prng_seed)
        schedule = self.scheduler.schedule(
            num_inference_steps, begin=start_timestep, end=num_inference_steps
        )
        signal, level = schedule.levels[0].tolist()
        x = generation.denoise(
            self,
            params,
            schedule,
            programs.initial_latents(eps, level, clean, signal),
            Conditions(self._context(params, prompt_ids, neg_prompt_ids)),
            guided(guidance_scale, b),
            prng_seed,
        )
        return generation.decode(self, params, x)


class FlaxStableDiffusionInpaintPipeline(StableDiffusion):
    """Inpaints images where a mask is white, with a UNet that takes the mask and masked image."""

    def prepare_inputs(
        self, prompt: str | list[str], image: Any, mask: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Returns token ids b t, masked images b 3 h w in [-1, 1] and masks b 1 h w.

        image, mask: PIL images. The call takes the masks before the masked images.
        """
        found, mask = 2 * to_unit_arrays(image, 32) - 1, masks(mask, 32)
        return prompt_ids(self.tokenizer, prompt), found * (mask < 0.5), mask

    def __call__(
        self,
        prompt_ids: Any,
        mask: Any,
        masked_image: Any,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> Any:
        """Generates images b height width 3 in [0, 1]; `stable_diffusion` describes most arguments.

        mask, masked_image: from `prepare_inputs`; they are resized to height and width.
        """
        size = self._size(height, width)
        mask = _resized(mask, size, "nearest")
        masked_image = _resized(masked_image, size, "bicubic")
        return self._called(locals(), num_inference_steps=num_inference_steps, **size)

    def _generate(
        self,
        prompt_ids: Any,
        mask: jax.Array,
        masked_image: jax.Array,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int,
        height: int,
        width: int,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
    ) -> jax.Array:
        b, dtype = prompt_ids.shape[0], self.dtype or jnp.float32
        x = generation.initial_noise(self, prng_seed, (b, height, width), latents, dtype)
        self._check_channels()
        key, mask_key = jax.random.split(as_key(prng_seed))
        masked = generation.encode_images(self, params, masked_image, mask_key)
        small = jax.image.resize(mask, (*mask.shape[:2], *masked.shape[1:3]), "nearest")
        channels = programs.join_channels(generation.channels_last(small), masked)
        conditions = Conditions(
            self._context(params, prompt_ids, neg_prompt_ids), channels=channels
        )
        weights = guided(guidance_scale, b)
        return self._sampled(params, key, x, num_inference_steps, conditions, weights)

    def _check_channels(self) -> None:
        wanted = 2 * self.vae.config.latent_channels + 1
        if self.unet.config.in_channels != wanted:
            raise ValueError(
                f"the UNet must have {wanted} in_channels for inpainting (got "
                f"{self.unet.config.in_channels}); load an inpainting checkpoint"
            )


class FlaxStableDiffusionInstructPix2PixPipeline(StableDiffusion):
    """Edits images as the prompt says (Brooks et al. 2023, InstructPix2Pix).

    diffusers never had this class; its arguments follow those of the others.
    """

    prepare_inputs = FlaxStableDiffusionImg2ImgPipeline.prepare_inputs

    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 100,
        guidance_scale: Any = 7.5,
        image_guidance_scale: Any = 1.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> Any:
        """Generates images b h w 3 in [0, 1]; `stable_diffusion` describes most arguments.

        image: b 3 h w in [-1, 1]; the results have its size. image_guidance_scale: the guidance
        towards the image, a number or one per image.
        """
        return self._called(locals(), num_inference_steps=num_inference_steps)

    def _generate(
        self,
        prompt_ids: Any,
        image: jax.Array,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 100,
        guidance_scale: Any = 7.5,
        image_guidance_scale: Any = 1.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
    ) -> jax.Array:
        b, (height, width) = prompt_ids.shape[0], image.shape[-2:]
        x = generation.initial_noise(self, prng_seed, (b, height, width), latents)
        clean = generation.encode_images(self, params, image, None, scale=False)
        (channels,) = programs.stack_branches(((clean,),), order=(0, 0, None), repeats=1)
        context = self._context(params, prompt_ids, neg_prompt_ids, (0, 1, 1))
        text = generation.per_image(guidance_scale, b, "guidance_scale")
        kept = generation.per_image(image_guidance_scale, b, "image_guidance_scale")
        weights = jnp.stack(guidance.instruct(text, kept), -1)
        conditions = Conditions(context, channels=channels)
        return self._sampled(params, prng_seed, x, num_inference_steps, conditions, weights)


def _resized(x: Any, size: dict[str, int], method: str) -> jax.Array:
    return jax.image.resize(x, (*x.shape[:-2], *size.values()), method)
