"""Stable Diffusion XL (Podell et al. 2023): two text encoders and micro-conditioning.

The context is the encoders' penultimate hidden states, concatenated along the width. The last
encoder's pooled output and the sizes are added to the timestep embedding. The refiner has only the
second encoder.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Params
from diffusax.pipelines.families.clip import as_windows, count_windows, tokenize, tokenize_caption
from diffusax.pipelines.families.family import (
    TEXT_COMPONENTS,
    Family,
    diffusers_components,
    usual_autoencoder,
)
from diffusax.pipelines.families.policies import Channels, ModelSize
from diffusax.pipelines.families.unet import CALLBACK_TENSORS, UNetDenoiser, timestep_condition
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, Tokens
from diffusax.text.prompts import apply_weights
from diffusax.text.tokenizer import CLIPTokenizer

_SIZES = ("target_size", "negative_target_size")
_SCORES = ("aesthetic_score", "negative_aesthetic_score")
_NEGATIVE_SIZES = (
    *("negative_original_size", "negative_crops_coords_top_left", "negative_target_size"),
)


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to the context, n (w t) (d + e), and the first window's pooled output, n p.

    Args:
        encoders: one or two text encoders, the last with a projection.
        params: their parameters.
        tokens: ids for each, n w t or n t: w windows of t tokens, and their weights, if any.
        clip_skip: the number of layers to leave out besides the last (diffusers
            pipeline_stable_diffusion_xl.py, encode_prompt).

    Raises:
        ValueError: clip_skip leaves no layer, or the second encoder is missing.
    """
    ids, weights = tuple(map(as_windows, tokens.ids)), tokens.weights
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
    if output.text_embeds is None:
        raise ValueError(
            "the text encoders give no pooled embedding, which text_encoder_2 does; load the "
            "pipeline with it, or give prompt_embeds and pooled_prompt_embeds"
        )
    pooled = output.text_embeds.reshape(n, w, -1)[:, 0]
    return Prompt(jnp.concatenate(contexts, axis=-1), pooled)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the prompt and the micro-conditioning (Podell et al. 2023, section 2.2).

    The micro-conditioning is time_ids, b k 6, or b k 5 where an aesthetic score replaces a size.
    """
    positive, negative = time_ids(components, call, *size)
    b, k, width = prompt.pooled.shape
    ids = np.array([positive] + [negative] * (k - 1), np.float32)
    _check_width(components, width, ids.shape[-1])
    added = {"time_ids": np.broadcast_to(ids, (b, *ids.shape))}
    if components.denoiser.embeds_guidance:
        added |= timestep_condition(components.denoiser, scales)
    return Conditions(prompt.context, prompt.pooled, added=added)


def time_ids(components: Any, call: Any, height: int, width: int) -> tuple[list[float], ...]:
    """Returns the micro-conditioning for the prompt and for the negative prompt."""
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
    # With an image diffusers uses the prompt's crop for the negative prompt too
    # (pipeline_stable_diffusion_xl_img2img.py, _get_add_time_ids).
    corner = negative_crop if call.image is None else crop
    return [*original, *crop, *target], [*negative_original, *corner, *negative_target]


def unused(components: Any, call: Any, run: Any) -> Iterator[tuple[Sequence[str], str]]:
    """Returns the sizes that change nothing in a run, with the reasons; see `time_ids`."""
    if components.options.get("requires_aesthetics_score"):
        yield _SIZES, "this network is told an aesthetic score in place of a target size"
        return
    yield _SCORES, "this network is told a target size in place of an aesthetic score"
    if not run.weights:
        return
    steers = bool(components.controlnets or components.of_role("t2i_adapter"))
    if call.image is not None and not (steers and call.control_image is None):
        yield ("negative_crops_coords_top_left",), "with an image crops_coords_top_left counts here"
    elif not (call.negative_original_size and call.negative_target_size):
        yield _NEGATIVE_SIZES, "negative_original_size and negative_target_size count together only"


def _check_width(components: Any, pooled: int, ids: int) -> None:
    config = components.denoiser.network.config
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
    components=diffusers_components(
        "unet",
        ("tokenizer", "text_encoder"),
        ("tokenizer_2", "text_encoder_2"),
        tokenizer=CLIPTokenizer,
        optional=TEXT_COMPONENTS,
    ),
    options=(
        ("force_zeros_for_empty_prompt", True),
        ("requires_aesthetics_score", False),
        ("is_cosxl_edit", False),
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=UNetDenoiser.of,
    usual_autoencoder=usual_autoencoder(),
    latents=functools.partial(LatentFormat.of, normalize=True, upcasts=True),
    batch_key=count_windows,
    embeds=("prompt_embeds", "pooled_prompt_embeds"),
    edits=Channels(ModelSize()),
    size_inputs=("time_ids",),
    callback_tensors=CALLBACK_TENSORS,
    unused=unused,
)
"""Stable Diffusion XL and its refiner."""
