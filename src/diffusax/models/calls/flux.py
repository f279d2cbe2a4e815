"""FLUX.1's transformer and ControlNets, called as in diffusers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_array, as_numpy
from diffusax.models.calls.arguments import (
    check_absent,
    check_rows,
    result,
    take_map,
    take_numbers,
)
from diffusax.models.calls.outputs import FluxControlNetOutput, Transformer2DModelOutput
from diffusax.models.network import Model
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.flux import token_rotation


class FluxTransformer(Model):
    """The transformer, called as diffusers' FluxTransformer2DModel."""

    class_names = ("FluxTransformer2DModel",)

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
    ) -> Any:
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

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        _check_options(joint_attention_kwargs)
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
        y = self.run(*given, method=method, **residuals)
        return result(Transformer2DModelOutput(y), return_dict, hidden_states)


class FluxControlNet(Model):
    """A ControlNet, called as diffusers' FluxControlNetModel."""

    class_names = ("FluxControlNetModel",)

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
    ) -> Any:
        """Computes the transformer's residuals, lists of b t c; None for no blocks of a kind.

        Args:
            hidden_states: the image's tokens, b t c.
            controlnet_cond: the tokens of the control image's latents, b t c, or for a network with
                conditioning_embedding_channels its pixels in [-1, 1], b 3 H W.
            controlnet_mode: the kind of the image, b 1 integers, for a network with num_mode.
            conditioning_scale: what the residuals are multiplied by.
            encoder_hidden_states: see `FluxTransformer`.
            pooled_projections: see `FluxTransformer`.
            timestep: see `FluxTransformer`.
            img_ids: see `FluxTransformer`.
            txt_ids: see `FluxTransformer`.
            guidance: see `FluxTransformer`.
            joint_attention_kwargs: None; the weights of LoRAs are an argument of pipelines.
            return_dict: whether to return a FluxControlNetOutput instead of a tuple.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        _check_options(joint_attention_kwargs)
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
        found = self.run(*given, cond, mode, scale, method="scaled_residuals")
        output = FluxControlNetOutput(*(list(part) or None for part in found))
        return result(output, return_dict, hidden_states)


def _check_options(joint_attention_kwargs: Any) -> None:
    check_absent(
        joint_attention_kwargs or None,
        "joint_attention_kwargs must be None: adapters belong to pipelines, see `adapters=`",
    )


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


def spread(name: str, value: Any, rows: int) -> Any:
    """Returns one number or `rows` of them as an array of so many, float32."""
    return np.broadcast_to(take_numbers(name, value, rows), rows)


def rotation_of(config: Any, txt_ids: Any, img_ids: Any, text: int, image: int) -> Rotation:
    """Returns the rotations of the tokens at given positions, 1 (s + t) d/2.

    Raises:
        ValueError: they are not s 3 and t 3 integers of at least zero.
    """
    given = zip(("txt_ids", "img_ids"), (txt_ids, img_ids), (text, image))
    ids = np.concatenate([take_positions(name, value, count, 3) for name, value, count in given])
    return token_rotation(config.axes_dims_rope, ids)


def take_positions(name: str, value: Any, count: int, axes: int) -> np.ndarray:
    """Returns the positions of tokens, count axes; a first axis of images that agree is left out.

    Raises:
        ValueError: they are not such integers of at least zero.
    """
    ids = as_numpy(value) if value is not None else np.zeros(0)
    ids = ids[0] if ids.ndim == 3 else ids
    if ids.shape != (count, axes) or (ids < 0).any() or (ids != np.round(ids)).any():
        raise ValueError(
            f"{name} must be integers of at least 0, of shape ({count}, {axes}) (got shape "
            f"{ids.shape})"
        )
    return ids.astype(np.int32)
