"""Stable Diffusion as diffusers' Flax pipelines: the arguments and their order are theirs.

As there, every call is guided, whatever the scale; the initial noise is normal numbers of the key,
b c h w; and num_inference_steps evaluations are made, also of a sampler that has more.

In all calls:

    prompt_ids: b t, from `prepare_inputs`. params: by component. prng_seed: a random key.
    guidance_scale: a number, or one per picture. neg_prompt_ids: b t; None for empty texts.
    latents, noise: b c h w, instead of numbers drawn from the key.
    jit: whether to run on all devices by `jax.pmap`. All arrays then have an axis of the devices
        first (`flax.training.common_utils.shard`, `flax.jax_utils.replicate`), and so have the
        pictures. Without it the call is one compiled program of one device.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.interop.flax import generation
from diffusax.interop.flax.generation import Params
from diffusax.interop.flax.inputs import pictures
from diffusax.interop.flax.outputs import FlaxStableDiffusionPipelineOutput
from diffusax.interop.flax.pipeline import FlaxDiffusionPipeline, of_components
from diffusax.interop.flax.text import empty_ids, prompt_ids
from diffusax.pipelines import guidance
from diffusax.pipelines.plan import Conditions

CFG = (0, 1)
"""The branches of classifier-free guidance: the prompt, the negative prompt."""
_LAST = ("scheduler", "safety_checker", "feature_extractor")


class StableDiffusion(FlaxDiffusionPipeline):
    """What the tasks of Stable Diffusion share."""

    arguments = of_components("vae", "text_encoder", "tokenizer", "unet", *_LAST)

    _generate: Any

    def _size(self, height: int | None, width: int | None) -> dict[str, int]:
        """The height and width of pictures, by default those that the UNet was trained at."""
        side = self.unet.config.sample_size
        rows, columns = side if isinstance(side, list | tuple) else (side, side)
        factor = self.vae_scale_factor
        return {"height": height or rows * factor, "width": width or columns * factor}

    def _context(
        self, params: Params, ids: Any, negative_ids: Any, branches: tuple[int, ...] = CFG
    ) -> jax.Array:
        if negative_ids is None:
            negative_ids = empty_ids(self.tokenizer, ids)
        return generation.encode_prompts(self, params, ids, negative_ids, branches)

    def _called(self, given: dict[str, Any], **static: Any) -> Any:
        """The result of a call: `given` holds its arguments, as `locals()` has them.

        static: those arguments of `_generate` that are compiled into the program.
        """
        if given["neg_prompt_ids"] is None:
            given["neg_prompt_ids"] = empty_ids(self.tokenizer, given["prompt_ids"])
        images = jax.device_get(self._compiled(given, static))
        output = FlaxStableDiffusionPipelineOutput(images=images)
        return output if given["return_dict"] else output.to_tuple()

    def _compiled(self, given: dict[str, Any], static: dict[str, Any]) -> jax.Array:
        names = inspect.signature(self._generate).parameters.keys() - static
        return generation.call(self, given["jit"], {name: given[name] for name in names}, static)

    def _sampled(
        self,
        params: Params,
        key: jax.Array,
        noise: jax.Array,
        n: int,
        conditions: Conditions,
        weights: jax.Array,
        control: Any = None,
    ) -> jax.Array:
        """Pictures b h w 3 of n evaluations from noise b h w c."""
        x = generation.denoise(
            self,
            params,
            self.scheduler.schedule(n, end=n),
            noise * params["scheduler"].init_noise_sigma,
            conditions,
            weights,
            key,
            control,
        )
        return generation.decode(self, params, x)


class FlaxStableDiffusionPipeline(StableDiffusion):
    """Pictures for prompts."""

    def prepare_inputs(self, prompt: str | list[str]) -> Any:
        """The prompts' token ids, b t."""
        return prompt_ids(self.tokenizer, prompt)

    def __call__(
        self,
        prompt_ids: Any,
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
        """Pictures b h w 3 in [0, 1]; see the top of the module."""
        size = self._size(height, width)
        return self._called(locals(), num_inference_steps=num_inference_steps, **size)

    def _generate(
        self,
        prompt_ids: Any,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
    ) -> jax.Array:
        b, size = prompt_ids.shape[0], self._size(height, width)
        generation.check_size(**size, multiple=8)
        x = generation.initial_noise(self, prng_seed, (b, *size.values()), latents)
        conditions = Conditions(self._context(params, prompt_ids, neg_prompt_ids))
        weights = guided(guidance_scale, b)
        return self._sampled(params, prng_seed, x, num_inference_steps, conditions, weights)


class FlaxStableDiffusionControlNetPipeline(StableDiffusion):
    """Pictures for prompts, steered by a picture through a ControlNet."""

    arguments = of_components("vae", "text_encoder", "tokenizer", "unet", "controlnet", *_LAST)

    def prepare_text_inputs(self, prompt: str | list[str]) -> Any:
        """The prompts' token ids, b t."""
        return prompt_ids(self.tokenizer, prompt)

    def prepare_image_inputs(self, image: Any) -> jax.Array:
        """PIL images as b 3 h w in [0, 1], each side cut to a multiple of 64 by resizing."""
        return pictures(image, 64)

    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        controlnet_conditioning_scale: Any = 1.0,
        return_dict: bool = True,
        jit: bool = False,
    ) -> Any:
        """Pictures b h w 3 in [0, 1]; see the top of the module.

        image: b 3 h w in [0, 1], from `prepare_image_inputs`; the pictures have its size.
        controlnet_conditioning_scale: what the ControlNet counts for, a number or one per picture.
        """
        return self._called(locals(), num_inference_steps=num_inference_steps)

    def _generate(
        self,
        prompt_ids: Any,
        image: jax.Array,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        controlnet_conditioning_scale: Any = 1.0,
    ) -> jax.Array:
        b, (height, width) = prompt_ids.shape[0], image.shape[-2:]
        generation.check_size(height, width, 64)
        x = generation.initial_noise(self, prng_seed, (b, height, width), latents)
        control = generation.per_image(
            controlnet_conditioning_scale, b, "controlnet_conditioning_scale"
        )
        hint = generation.channels_last(image)[:, None]
        context = self._context(params, prompt_ids, neg_prompt_ids)
        return self._sampled(
            params,
            prng_seed,
            x,
            num_inference_steps,
            Conditions(context, control=(hint,)),
            guided(guidance_scale, b),
            control,
        )


def guided(scale: Any, b: int) -> jax.Array:
    """The weights of classifier-free guidance, b 1, from a scale or one for each picture."""
    scale = generation.per_image(scale, b, "guidance_scale")
    return jnp.stack(guidance.classifier_free(scale), -1)
