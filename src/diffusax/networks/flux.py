"""The transformers of FLUX.1, its ControlNets, FLUX.2 and FLUX.3, called as in diffusers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_array
from diffusax.models.ops.rotation import Rotation
from diffusax.models.table import MODELS
from diffusax.models.transformers.blocks import rotation_at
from diffusax.models.transformers.flux import token_rotation
from diffusax.models.transformers.flux3 import Stream
from diffusax.networks.arguments import (
    check_absent,
    check_no_adapters,
    check_rows,
    result,
    spread,
    take_map,
    take_positions,
)
from diffusax.networks.model import Model
from diffusax.networks.outputs import FluxControlNetOutput, Transformer2DModelOutput
from diffusax.networks.pretrained import FromSingleFile


class FluxTransformer2DModel(FromSingleFile, Model):
    """The transformer of FLUX.1."""

    module_class = MODELS["FluxTransformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        pooled_projections: Any = None,
        timestep: Any = None,
        img_ids: Any = None,
        txt_ids: Any = None,
        guidance: Any = None,
        joint_attention_kwargs: None = None,
        controlnet_block_samples: Sequence[Any] | None = None,
        controlnet_single_block_samples: Sequence[Any] | None = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from images to noise: `.sample`, b t d.

        Args:
            hidden_states: the image's tokens, b t c.
            encoder_hidden_states: T5's hidden states, b s d.
            pooled_projections: CLIP's pooled output, b p.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            img_ids: the positions of the image's tokens, t 3 integers.
            txt_ids: the positions of the text's tokens, s 3 integers.
            guidance: the guidance scales, one number or b, where the config has guidance_embeds.
            joint_attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            controlnet_block_samples: a ControlNet's residuals for the first blocks, each b t c.
            controlnet_single_block_samples: its residuals for the others, each b t c.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            controlnet_blocks_repeat: whether fewer residuals than blocks are begun again, instead
                of each being for blocks that follow each other.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_no_adapters("joint_attention_kwargs", joint_attention_kwargs)
        residuals: dict[str, Any] = {
            "block_residuals": tuple(map(as_array, controlnet_block_samples or ())),
            "single_residuals": tuple(map(as_array, controlnet_single_block_samples or ())),
        }
        given = _inputs(
            self.config,
            hidden_states,
            encoder_hidden_states,
            pooled_projections,
            timestep,
            img_ids,
            txt_ids,
            guidance,
        )
        method = "with_cycled_residuals" if controlnet_blocks_repeat else "__call__"
        y, kept = self.run_with_hooks(hooks, *given, method=method, **residuals)
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


class FluxControlNetModel(Model):
    """A ControlNet for FLUX.1."""

    module_class = MODELS["FluxControlNetModel"]

    def __call__(
        self,
        hidden_states: Any,
        controlnet_cond: Any,
        controlnet_mode: Any = None,
        conditioning_scale: float = 1.0,
        encoder_hidden_states: Any = None,
        pooled_projections: Any = None,
        timestep: Any = None,
        img_ids: Any = None,
        txt_ids: Any = None,
        guidance: Any = None,
        joint_attention_kwargs: None = None,
        return_dict: bool = True,
    ) -> FluxControlNetOutput:
        """Computes the transformer's residuals, lists of b t c; None for no blocks of a kind.

        Args:
            hidden_states: the image's tokens, b t c.
            controlnet_cond: the tokens of the control image's latents, b t c, or for a network with
                conditioning_embedding_channels its pixels in [-1, 1], b 3 H W.
            controlnet_mode: the kind of the image, b 1 integers, for a network with num_mode.
            conditioning_scale: what the residuals are multiplied by.
            encoder_hidden_states: see `FluxTransformer2DModel`.
            pooled_projections: see `FluxTransformer2DModel`.
            timestep: see `FluxTransformer2DModel`.
            img_ids: see `FluxTransformer2DModel`.
            txt_ids: see `FluxTransformer2DModel`.
            guidance: see `FluxTransformer2DModel`.
            joint_attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            return_dict: whether to return a FluxControlNetOutput instead of a tuple.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_no_adapters("joint_attention_kwargs", joint_attention_kwargs)
        given = _inputs(
            self.config,
            hidden_states,
            encoder_hidden_states,
            pooled_projections,
            timestep,
            img_ids,
            txt_ids,
            guidance,
        )
        cond = as_array(controlnet_cond)
        if self.config.conditioning_embedding_channels is not None:
            cond = take_map("controlnet_cond", controlnet_cond, 3).transpose(0, 2, 3, 1)
        mode = None
        if self.config.num_mode is not None and controlnet_mode is not None:
            mode = as_array(controlnet_mode).reshape(-1)
        scale = np.float32(conditioning_scale)
        found = self.run(given, cond, mode, scale, method="scaled_residuals")
        output = FluxControlNetOutput(*(list(part) or None for part in found))
        return result(output, return_dict, hidden_states)


class Flux2Transformer2DModel(FromSingleFile, Model):
    """The transformer of FLUX.2."""

    module_class = MODELS["Flux2Transformer2DModel"]
    component = "transformer"

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
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
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
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_no_adapters("joint_attention_kwargs", joint_attention_kwargs)
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
        y, kept = self.run_with_hooks(hooks, *call, method="predict_tokens")
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


class Flux3Transformer2DModel(FromSingleFile, Model):
    """The transformer of FLUX.3."""

    module_class = MODELS["Flux3Transformer2DModel"]
    component = "transformer"

    def __call__(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        timestep: Any,
        img_ids: Any,
        txt_ids: Any,
        image_cond_hidden_states: Any = None,
        image_cond_ids: Any = None,
        target_timestep: Any = None,
        attention_kwargs: None = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput:
        """Predicts the velocity from images to noise: `.sample`, b t c.

        Args:
            hidden_states: the image's tokens, b t c.
            encoder_hidden_states: the language model's hidden states, b s d.
            timestep: the times, from 1 for noise to 0 for images, one number or b.
            img_ids: the positions of the image's tokens, t 4.
            txt_ids: the positions of the text's tokens, s 4.
            image_cond_hidden_states: the tokens of images to look at, b r c, or None.
            image_cond_ids: the positions of these, r 4.
            target_timestep: the times that the step leads to, for a config with flow_map.
            attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_no_adapters("attention_kwargs", attention_kwargs)
        if (image_cond_hidden_states is None) != (image_cond_ids is None):
            raise ValueError("image_cond_hidden_states and image_cond_ids must be given together")
        rows = len(hidden_states)
        given = [
            ("img_ids", hidden_states, img_ids),
            ("txt_ids", encoder_hidden_states, txt_ids),
            ("image_cond_ids", image_cond_hidden_states, image_cond_ids),
        ]
        streams = []
        for name, tokens, ids in given[: 2 if image_cond_ids is None else 3]:
            x = as_array(tokens)
            check_rows("encoder_hidden_states and image_cond_hidden_states", x, rows)
            places = take_positions(name, ids, x.shape[1], 4, whole=False)
            rotation = rotation_at(places, self.config.axes_dims_rope, self.config.rope_theta)
            streams.append(Stream(x, rotation))
        target = None
        if target_timestep is not None:
            target = spread("target_timestep", target_timestep, rows)
        image, *conditions = streams
        call = image, spread("timestep", timestep, rows), conditions, None, target
        y, kept = self.run_with_hooks(hooks, *call, method="predict_tokens")
        return result(Transformer2DModelOutput(y, kept), return_dict, hidden_states)


def _inputs(
    config: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    pooled_projections: Any,
    timestep: Any,
    img_ids: Any,
    txt_ids: Any,
    guidance: Any,
) -> tuple[Any, ...]:
    """Returns the first arguments of the networks, as arrays that were checked."""
    x, context, pooled = map(as_array, (hidden_states, encoder_hidden_states, pooled_projections))
    rows = len(x)
    for name, value in (("encoder_hidden_states", context), ("pooled_projections", pooled)):
        check_rows(name, value, rows)
    scales = None if guidance is None else spread("guidance", guidance, rows)
    rotation = rotation_of(config, txt_ids, img_ids, context.shape[1], x.shape[1])
    return x, spread("timestep", timestep, rows), context, pooled, rotation, scales


def rotation_of(config: Any, txt_ids: Any, img_ids: Any, text: int, image: int) -> Rotation:
    """Returns the rotations of the tokens at given positions, 1 (s + t) d/2.

    Raises:
        ValueError: they are not s 3 and t 3 integers of at least zero.
    """
    given = zip(("txt_ids", "img_ids"), (txt_ids, img_ids), (text, image))
    ids = np.concatenate([take_positions(name, value, count, 3) for name, value, count in given])
    return token_rotation(config.axes_dims_rope, ids)
