"""Stable Diffusion XL (Podell et al. 2023): two text encoders and micro-conditioning.

The context is the encoders' penultimate hidden states side by side; the last encoder's pooled
output and the sizes go in with the timestep. The refiner has only the second encoder.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.network import Network, Params
from diffusax.pipelines.families.family import Encoded, Family
from diffusax.text.prompts import apply_weights


def encode(
    encoders: tuple[Network, ...],
    params: tuple[Params, ...],
    ids: tuple[jax.Array, ...],
    weights: jax.Array | None = None,
    clip_skip: int | None = None,
) -> Encoded:
    """Token ids to the context, n (w t) (d + e), and the pooled output of the first window, n p.

    Args:
        encoders: one or two text encoders, the last with a projection.
        params: their parameters.
        ids: an array for each, n w t: w windows of t tokens.
        weights: n w t, of the tokens; None leaves them all one.
        clip_skip: how many layers to leave out besides the last (diffusers
            pipeline_stable_diffusion_xl.py, encode_prompt).

    Raises:
        ValueError: clip_skip leaves no layer.
    """
    n, w, t = ids[0].shape
    contexts, skipped = [], 2 + (clip_skip or 0)
    for encoder, p, i in zip(encoders, params, ids, strict=True):
        output = encoder.apply(p, i.reshape(n * w, t))
        if skipped > len(output.hidden_states):
            limit = len(output.hidden_states) - 2
            raise ValueError(f"clip_skip must be from 0 to {limit} (got {clip_skip})")
        hidden = output.hidden_states[-skipped]
        if weights is not None:
            hidden = apply_weights(hidden, weights.reshape(n * w, t))
        contexts.append(hidden.reshape(n, w * t, -1))
    return jnp.concatenate(contexts, axis=-1), output.text_embeds.reshape(n, w, -1)[:, 0]


def added(components: Any, call: Any, pooled: Any, height: int, width: int) -> dict[str, Any]:
    """The pooled output and the micro-conditioning (Podell et al. 2023, section 2.2).

    pooled: b k p. height, width: of the picture, in pixels.

    Returns:
        text_embeds b k p, time_ids b k 6 (or 5, with an aesthetic score in the place of a size).
    """
    positive, negative = time_ids(components, call, height, width)
    b, k, _ = pooled.shape
    ids = np.array([positive] + [negative] * (k - 1), np.float32)
    _check_width(components, pooled.shape[-1], ids.shape[-1])
    return {"text_embeds": pooled, "time_ids": np.broadcast_to(ids, (b, *ids.shape))}


def time_ids(components: Any, call: Any, height: int, width: int) -> tuple[list[float], ...]:
    """The numbers for the prompt and for the negative prompt."""
    original = call.original_size or (height, width)
    target = call.target_size or (height, width)
    crop, negative_crop = call.crops_coords_top_left, call.negative_crops_coords_top_left
    negative_original = call.negative_original_size or original
    negative_target = call.negative_target_size or target
    if components.options["requires_aesthetics_score"]:
        return (
            [*original, *crop, call.aesthetic_score],
            [*negative_original, *negative_crop, call.negative_aesthetic_score],
        )
    if call.image is None and (call.negative_original_size and call.negative_target_size) is None:
        return [*original, *crop, *target], [*original, *crop, *target]
    # With a picture diffusers uses the prompt's crop for the negative prompt too
    # (pipeline_stable_diffusion_xl_img2img.py, _get_add_time_ids).
    corner = negative_crop if call.image is None else crop
    return [*original, *crop, *target], [*negative_original, *corner, *negative_target]


def _check_width(components: Any, pooled: int, ids: int) -> None:
    config = components.networks["unet"].config
    expected = config.projection_class_embeddings_input_dim
    actual = pooled + ids * config.addition_time_embed_dim
    if expected != actual:
        raise ValueError(
            f"the UNet's projection_class_embeddings_input_dim is {expected}, but {pooled} pooled "
            f"numbers and {ids} sizes make {actual}; does requires_aesthetics_score="
            f"{components.options['requires_aesthetics_score']} in model_index.json fit the UNet?"
        )


STABLE_DIFFUSION_XL = Family(
    name="Stable Diffusion XL",
    text=(("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2")),
    optional=("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    options=(
        ("force_zeros_for_empty_prompt", True),
        ("requires_aesthetics_score", False),
        ("is_cosxl_edit", False),
    ),
    encode=encode,
    added=added,
    normalizes_latents=True,
    resizes_edits=True,
    upcasts_vae=True,
)
