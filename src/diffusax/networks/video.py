"""Networks of videos, called as in diffusers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from diffusax.boundary.tensors import as_array
from diffusax.models.table import MODELS
from diffusax.models.transformers.wan_vace import Control
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
from diffusax.networks.pretrained import FromSingleFile


class WanTransformer3DModel(FromSingleFile, Model):
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
        given = (hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image)
        return self._run(given, hooks, return_dict)

    def _run(
        self, given: tuple[Any, Any, Any, Any], hooks: Any, return_dict: bool, *more: Any
    ) -> Transformer2DModelOutput:
        """Returns the result of a call. more: the network's further inputs."""
        hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image = given
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
        inputs = jnp.moveaxis(jnp.asarray(x), 1, -1), times, text, images, *more
        y, kept = self.run_with_hooks(hooks, *inputs)
        output = Transformer2DModelOutput(jnp.moveaxis(y, -1, 1), kept)
        return result(output, return_dict, hidden_states)


class WanVACETransformer3DModel(WanTransformer3DModel):
    """The transformer of Wan's VACE."""

    module_class = MODELS["WanVACETransformer3DModel"]

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Any,
        timestep: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_image: Any = None,
        control_hidden_states: Any = None,
        control_hidden_states_scale: Any = None,
        return_dict: bool = True,
        attention_kwargs: None = None,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from videos to noise: `.sample`, b c f h w.

        Args:
            hidden_states: as of WanTransformer3DModel, like all others that are not named here.
            timestep: see there.
            encoder_hidden_states: see there.
            encoder_hidden_states_image: see there.
            control_hidden_states: the control, b vace_in_channels f h w: latents of what is kept,
                of what is to change, and the mask.
            control_hidden_states_scale: a weight for each of vace_layers; None for 1.
            return_dict: see there.
            attention_kwargs: see there.
            hooks: see there.

        Raises:
            ValueError: an argument has another shape or value, or control_hidden_states is missing.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        if control_hidden_states is None:
            raise ValueError("control_hidden_states must be given: what the network is shown")
        config: Any = self.config
        given = (hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image)
        shown = take_video("control_hidden_states", control_hidden_states, config.vace_in_channels)
        layers = len(config.vace_layers)
        scale = jnp.ones(layers)
        if control_hidden_states_scale is not None:
            scale = jnp.asarray(as_array(control_hidden_states_scale))
            if scale.shape != (layers,):
                raise ValueError(
                    f"control_hidden_states_scale must have {layers} numbers, one for each of "
                    f"vace_layers (got shape {scale.shape})"
                )
        rows = jnp.broadcast_to(scale, (len(shown), layers))
        control = Control(jnp.moveaxis(jnp.asarray(shown), 1, -1), rows)
        return self._run(given, hooks, return_dict, control)
