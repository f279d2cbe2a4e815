"""Networks of videos, called as in diffusers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from diffusax.boundary.tensors import as_array
from diffusax.models.table import MODELS
from diffusax.networks.arguments import (
    check_no_adapters,
    check_rows,
    result,
    spread,
    take_numbers,
    take_video,
)
from diffusax.networks.model import Model
from diffusax.networks.outputs import Transformer2DModelOutput


class WanTransformer3DModel(Model):
    """The transformer of Wan 2.1 and 2.2."""

    module_class = MODELS["WanTransformer3DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        timestep: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_image: Any = None,
        return_dict: bool = True,
        attention_kwargs: None = None,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from videos to noise: `.sample`, b c f h w.

        Args:
            hidden_states: the latents, b c f h w.
            timestep: the times, from 1000 for noise to 0 for videos: one number, b, or b t for each
                token.
            encoder_hidden_states: the text's hidden states, b s d. All are read: those of padding
                are zeros.
            encoder_hidden_states_image: CLIP's hidden states of the first image, b i d, or of the
                first and the last, (2 b) i d; None for a network that reads none.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        x = take_video("hidden_states", hidden_states, self.config.in_channels)
        text, times = as_array(encoder_hidden_states), as_array(timestep)
        check_rows("encoder_hidden_states", text, len(x))
        if times.ndim == 2:
            times = take_numbers("timestep", times.reshape(-1), times.size).reshape(times.shape)
        else:
            times = spread("timestep", times, len(x))
        images = None
        if encoder_hidden_states_image is not None:
            images = as_array(encoder_hidden_states_image)
        given = jnp.moveaxis(jnp.asarray(x), 1, -1), times, text, images
        y, kept = self.run_with_hooks(hooks, *given)
        output = Transformer2DModelOutput(jnp.moveaxis(y, -1, 1), kept)
        return result(output, return_dict, hidden_states)
