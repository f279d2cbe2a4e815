"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, whose last hidden states are the context."""

from typing import Any

import numpy as np

from diffusax.models.network import Params
from diffusax.pipelines.families.clip import as_windows, count_windows, tokenize, tokenize_caption
from diffusax.pipelines.families.family import (
    TEXT_COMPONENTS,
    Family,
    diffusers_components,
    usual_autoencoder,
)
from diffusax.pipelines.families.policies import Inpaint
from diffusax.pipelines.families.unet import CALLBACK_TENSORS, UNetDenoiser, timestep_condition
from diffusax.pipelines.plan.plan import Conditions, DecoderCondition, Encoders, Prompt, Tokens
from diffusax.text.prompts import apply_weights
from diffusax.text.tokenizer import CLIPTokenizer


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to the context, n (w t) d.

    Args:
        encoders: the text encoder.
        params: its parameters.
        tokens: one array of ids, n w t or n t: w windows of t tokens, and their weights, if any.
        clip_skip: the number of the encoder's last layers to leave out.
    """
    ids, weights = as_windows(tokens.ids[0]), tokens.weights
    n, w, t = ids.shape
    hidden = encoders[0].apply(
        params[0], ids.reshape(n * w, t), method="encode", clip_skip=clip_skip
    )
    if weights is not None:
        hidden = apply_weights(hidden, weights.reshape(n * w, t))
    return Prompt(hidden.reshape(n, w * t, -1))


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the context and, for a distilled UNet, the embedded guidance scales."""
    denoiser = components.denoiser
    added = timestep_condition(denoiser, scales) if denoiser.embeds_guidance else None
    return Conditions(prompt.context, added=added)


def show_image(components: Any, image: Any, mask: Any) -> DecoderCondition | None:
    """Returns the inputs of an AsymmetricAutoencoderKL's decoder; None for other autoencoders.

    Raises:
        ValueError: the image is latents.
    """
    if components.autoencoder.class_name != "AsymmetricAutoencoderKL":
        return None
    if image.shape[-1] != 3:
        raise ValueError(
            "image must be pixels, not latents, where vae is an AsymmetricAutoencoderKL, whose "
            "decoder looks at it"
        )
    return DecoderCondition(image, mask)


STABLE_DIFFUSION = Family(
    name="Stable Diffusion",
    components=diffusers_components(
        "unet", ("tokenizer", "text_encoder"), tokenizer=CLIPTokenizer, optional=TEXT_COMPONENTS
    ),
    options=(("requires_safety_checker", False),),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=UNetDenoiser.of,
    usual_autoencoder=usual_autoencoder(),
    batch_key=count_windows,
    callback_tensors=CALLBACK_TENSORS,
    inpaint=Inpaint(decoder=show_image),
)
"""Stable Diffusion 1.x and 2.x, and what was made of them."""
