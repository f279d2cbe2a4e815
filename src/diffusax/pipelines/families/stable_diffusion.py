"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, whose last hidden states are the context."""

import jax

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
    """Token ids to the context, n (w t) d.

    Args:
        encoders: the text encoder.
        params: its parameters.
        ids: one array, n w t: w windows of t tokens.
        weights: n w t, of the tokens; None leaves them all one.
        clip_skip: how many of the encoder's last layers to leave out.
    """
    n, w, t = ids[0].shape
    hidden = encoders[0].apply(
        params[0], ids[0].reshape(n * w, t), method="encode", clip_skip=clip_skip
    )
    if weights is not None:
        hidden = apply_weights(hidden, weights.reshape(n * w, t))
    return (hidden.reshape(n, w * t, -1),)


STABLE_DIFFUSION = Family(
    name="Stable Diffusion",
    text=(("tokenizer", "text_encoder"),),
    optional=("text_encoder", "tokenizer"),
    options=(("requires_safety_checker", False),),
    encode=encode,
    shows_kept=True,
)
