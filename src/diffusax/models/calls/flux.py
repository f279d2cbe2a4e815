"""FLUX.1's transformer, called as in diffusers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.models.calls.arguments import check_absent, check_rows, result, take_numbers
from diffusax.models.network import Model
from diffusax.models.outputs import Transformer2DModelOutput
from diffusax.models.transformers.blocks import Rotation
from diffusax.models.transformers.flux import token_rotation
from diffusax.tensors import as_array, as_numpy


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
            controlnet_blocks_repeat: False; residuals are for blocks that follow each other.

        Raises:
            ValueError: an argument has another shape or value, or is missing.
        """
        check_absent(
            joint_attention_kwargs or None,
            "joint_attention_kwargs must be None: adapters belong to pipelines, see `adapters=`",
        )
        check_absent(
            controlnet_blocks_repeat or None,
            "controlnet_blocks_repeat must be False: each residual is for blocks that follow each "
            "other",
        )
        x, context = as_array(hidden_states), as_array(encoder_hidden_states)
        pooled = as_array(pooled_projections)
        rows = len(x)
        for name, value in (("encoder_hidden_states", context), ("pooled_projections", pooled)):
            check_rows(name, value, rows)
        if guidance is not None:
            guidance = spread("guidance", guidance, rows)
        residuals = {
            "block_residuals": tuple(map(as_array, controlnet_block_samples or ())),
            "single_residuals": tuple(map(as_array, controlnet_single_block_samples or ())),
        }
        rotation = rotation_of(self.config, txt_ids, img_ids, context.shape[1], x.shape[1])
        times = spread("timestep", timestep, rows)
        y = self.run(x, times, context, pooled, rotation, guidance, **residuals)
        return result(Transformer2DModelOutput(y), return_dict, hidden_states)


def spread(name: str, value: Any, rows: int) -> Any:
    """Returns one number or `rows` of them as an array of so many, float32."""
    return np.broadcast_to(take_numbers(name, value, rows), rows)


def rotation_of(config: Any, txt_ids: Any, img_ids: Any, text: int, image: int) -> Rotation:
    """Returns the rotations of the tokens at given positions, 1 (s + t) d/2.

    Raises:
        ValueError: they are not s 3 and t 3 integers of at least zero.
    """
    given = zip(("txt_ids", "img_ids"), (txt_ids, img_ids), (text, image))
    ids = np.concatenate([_ids(name, value, count) for name, value, count in given])
    return token_rotation(config.axes_dims_rope, ids)


def _ids(name: str, value: Any, count: int) -> np.ndarray:
    ids = as_numpy(value) if value is not None else np.zeros(0)
    ids = ids[0] if ids.ndim == 3 else ids
    if ids.shape != (count, 3) or (ids < 0).any() or (ids != np.round(ids)).any():
        raise ValueError(
            f"{name} must be integers of at least 0, of shape ({count}, 3) (got shape {ids.shape})"
        )
    return ids.astype(np.int32)
