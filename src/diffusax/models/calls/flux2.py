"""FLUX.2's transformer, called as in diffusers."""

from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_array
from diffusax.models.calls.arguments import check_absent, check_rows, result
from diffusax.models.calls.flux import spread, take_positions
from diffusax.models.calls.outputs import Transformer2DModelOutput
from diffusax.models.network import Model
from diffusax.models.transformers.blocks import rotation_at


class Flux2Transformer(Model):
    """The transformer, called as diffusers' Flux2Transformer2DModel."""

    class_names = ("Flux2Transformer2DModel",)

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        timestep: Any = None,
        img_ids: Any = None,
        txt_ids: Any = None,
        guidance: Any = None,
        joint_attention_kwargs: None = None,
        return_dict: bool = True,
        kv_cache: None = None,
        kv_cache_mode: None = None,
        num_ref_tokens: int = 0,
        ref_fixed_timestep: float = 0.0,
    ) -> Any:
        """Predicts the velocity from images to noise: `.sample`, b t c.

        Args:
            hidden_states: the image's tokens, b t c.
            encoder_hidden_states: the language model's hidden states, b s d.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            img_ids: the positions of the image's tokens, t 4 integers.
            txt_ids: the positions of the text's tokens, s 4 integers.
            guidance: the guidance scales, one number or b, where the config has guidance_embeds.
            joint_attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            kv_cache: None, because keys are not kept between calls here.
            kv_cache_mode: None, likewise.
            num_ref_tokens: 0, likewise.
            ref_fixed_timestep: has no effect without kv_cache_mode, as in diffusers.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_absent(
            joint_attention_kwargs or None,
            "joint_attention_kwargs must be None: adapters belong to pipelines, see `adapters=`",
        )
        check_absent(
            kv_cache or kv_cache_mode or num_ref_tokens or None,
            "kv_cache, kv_cache_mode and num_ref_tokens must be left out: keys are not kept "
            "between calls",
        )
        x, context = as_array(hidden_states), as_array(encoder_hidden_states)
        check_rows("encoder_hidden_states", context, len(x))
        if guidance is not None:
            guidance = spread("guidance", guidance, len(x))
        given = zip(("txt_ids", "img_ids"), (txt_ids, img_ids), (context.shape[1], x.shape[1]))
        ids = np.concatenate([take_positions(*one, 4) for one in given])
        rotation = rotation_at(ids, self.config.axes_dims_rope, self.config.rope_theta)
        call = x, spread("timestep", timestep, len(x)), context, rotation, guidance
        y = self.run(*call, method="predict_tokens")
        return result(Transformer2DModelOutput(y), return_dict, hidden_states)
