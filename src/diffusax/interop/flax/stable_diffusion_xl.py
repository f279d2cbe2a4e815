"""Stable Diffusion XL as diffusers' Flax pipeline; see `stable_diffusion`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.interop.flax import generation
from diffusax.interop.flax.generation import Params
from diffusax.interop.flax.models import channels_first
from diffusax.interop.flax.outputs import FlaxStableDiffusionXLPipelineOutput
from diffusax.interop.flax.pipeline import of_components
from diffusax.interop.flax.stable_diffusion import StableDiffusion, guided
from diffusax.interop.flax.text import prompt_ids
from diffusax.pipelines.plan.plan import Conditions
from diffusax.pipelines.run import programs


class FlaxStableDiffusionXLPipeline(StableDiffusion):
    """Generates images from prompts with Stable Diffusion XL."""

    arguments = of_components(
        "text_encoder", "text_encoder_2", "vae", "tokenizer", "tokenizer_2", "unet", "scheduler"
    )

    def _configure(self, given: Mapping[str, Any]) -> None:
        """Sets the components, without parameters."""
        super()._configure(given)

    def prepare_inputs(self, prompt: str | list[str]) -> jax.Array:
        """Returns the prompts' token ids for both text encoders, b 2 t."""
        both = (self.tokenizer, self.tokenizer_2)  # type: ignore[attr-defined]
        return jnp.stack([prompt_ids(tokenizer, prompt) for tokenizer in both], axis=1)

    def __call__(
        self,
        prompt_ids: Any,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        height: int | None = None,
        width: int | None = None,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        output_type: str | None = None,
        jit: bool = False,
    ) -> Any:
        """Generates images b h w 3 in [0, 1], or latents b c h w with output_type="latent".

        prompt_ids, neg_prompt_ids: b 2 t. Without the latter, the embeddings are zeros.
        `stable_diffusion` describes the other arguments.
        """
        static = {
            "num_inference_steps": num_inference_steps,
            **self._size(height, width),
            "return_latents": output_type == "latent",
        }
        images = self._compiled(locals(), static)
        output = FlaxStableDiffusionXLPipelineOutput(images=images)
        return output if return_dict else output.to_tuple()

    def get_embeddings(self, prompt_ids: Any, params: Params) -> tuple[jax.Array, jax.Array]:
        """Returns the context b t d and the pooled output b p of prompts, b 2 t."""
        prompt = generation.encode_xl(self, params, prompt_ids)
        return prompt.context, prompt.pooled

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
        return_latents: bool = False,
    ) -> jax.Array:
        b, size = prompt_ids.shape[0], self._size(height, width)
        branches: tuple[Any, ...] = (self.get_embeddings(prompt_ids, params),)
        if neg_prompt_ids is not None:
            branches += (self.get_embeddings(neg_prompt_ids, params),)
        order = (0, None if neg_prompt_ids is None else 1)
        context, pooled = programs.stack_branches(branches, order=order, repeats=1)
        rows, columns = size.values()
        ids = np.array([rows, columns, 0, 0, rows, columns], np.float32)
        added = {"time_ids": jnp.broadcast_to(ids, (b, 2, 6))}
        schedule = self.scheduler.schedule(num_inference_steps, end=num_inference_steps)
        x = generation.initial_noise(self, prng_seed, (b, rows, columns), latents)
        x = generation.denoise(
            self,
            params,
            schedule,
            x * schedule.init_noise_sigma,
            Conditions(context, pooled, added=added),
            guided(guidance_scale, b),
            prng_seed,
        )
        return channels_first(x) if return_latents else generation.decode(self, params, x)
