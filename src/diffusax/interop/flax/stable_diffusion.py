"""Stable Diffusion as diffusers' Flax pipelines: the arguments and their order are theirs.

As in diffusers, every call is guided, whatever the scale; the initial noise is normal numbers of
the key, b c h w; and num_inference_steps evaluations are made, also of a sampler that has more.

The arguments of all calls:

    prompt_ids: b t, from `prepare_inputs`.
    params: the parameters by component.
    prng_seed: a random key.
    guidance_scale: a number, or one per image.
    neg_prompt_ids: b t; None for empty texts.
    latents, noise: b c h w, instead of numbers drawn from the key.
    jit: whether to run on all devices by `jax.pmap`. All arrays then have an axis of the devices
        first (`flax.training.common_utils.shard`, `flax.jax_utils.replicate`), and so have the
        images. Without it the call is one compiled program of one device.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.interop.flax import generation
from diffusax.interop.flax.generation import Params
from diffusax.interop.flax.inputs import to_unit_arrays
from diffusax.interop.flax.outputs import FlaxStableDiffusionPipelineOutput
from diffusax.interop.flax.pipeline import FlaxDiffusionPipeline, of_components
from diffusax.interop.flax.text import empty_ids, prompt_ids
from diffusax.pipelines.plan import guidance
from diffusax.pipelines.plan.plan import Conditions

CFG = (0, 1)
"""The branches of classifier-free guidance: the prompt, the negative prompt."""
_LAST = ("scheduler", "safety_checker", "feature_extractor")


class StableDiffusion(FlaxDiffusionPipeline):
    """The methods that the tasks of Stable Diffusion share."""

    arguments = of_components("vae", "text_encoder", "tokenizer", "unet", *_LAST)

    _generate: Any

    def _size(self, height: int | None, width: int | None) -> dict[str, int]:
        """Returns height and width of the images, by default those that the UNet was trained at."""
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
        """Returns the result of a call, whose arguments are in `given` as `locals()` has them.

        static: the arguments of `_generate` that are compiled into the program.
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
        """Generates images b h w 3 in n evaluations from noise b h w c."""
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
    """Generates images from prompts."""

    def prepare_inputs(self, prompt: str | list[str]) -> Any:
        """Returns the prompts' token ids, b t."""
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
        """Generates images b h w 3 in [0, 1]; the module's docstring describes the arguments."""
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
        x = generation.initial_noise(self, prng_seed, (b, *size.values()), latents)
        conditions = Conditions(self._context(params, prompt_ids, neg_prompt_ids))
        weights = guided(guidance_scale, b)
        return self._sampled(params, prng_seed, x, num_inference_steps, conditions, weights)


class FlaxStableDiffusionControlNetPipeline(StableDiffusion):
    """Generates images from prompts, steered by an image through a ControlNet."""

    arguments = of_components("vae", "text_encoder", "tokenizer", "unet", "controlnet", *_LAST)

    def prepare_text_inputs(self, prompt: str | list[str]) -> Any:
        """Returns the prompts' token ids, b t."""
        return prompt_ids(self.tokenizer, prompt)

    def prepare_image_inputs(self, image: Any) -> jax.Array:
        """Converts PIL images to b 3 h w in [0, 1], resized to sides that are multiples of 64."""
        return to_unit_arrays(image, 64)

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
        """Generates images b h w 3 in [0, 1]; the module's docstring describes most arguments.

        image: b 3 h w in [0, 1], from `prepare_image_inputs`; the results have its size.
        controlnet_conditioning_scale: the scale of the ControlNet's residuals, one or one per
        image.
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
        x = generation.initial_noise(self, prng_seed, (b, height, width), latents, multiple=64)
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
    """Returns the weights of classifier-free guidance, b 1, from a scale or one for each image."""
    scale = generation.per_image(scale, b, "guidance_scale")
    return jnp.stack(guidance.classifier_free(scale), -1)
