"""Z-Image (Z-Image Team 2025): a transformer over an image and a caption of any length.

The caption is the hidden states before a language model's last layer, of a prompt in the form of a
chat. Texts are filled up to one of few lengths, which programs are compiled for.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Params
from diffusax.models.transformers.references import BLIND, JOINT
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import OwnLengths
from diffusax.pipelines.families.family import (
    TEXT_COMPONENTS,
    Family,
    diffusers_components,
    usual_autoencoder,
)
from diffusax.pipelines.families.references import (
    Learned,
    looked_at,
    references,
    with_prefix,
)
from diffusax.pipelines.families.transformer import (
    TransformerDenoiser,
    chat_tokens,
    most_tokens,
    pad_embeds,
    padded_length,
    padded_tokens,
    schedule_options,
)
from diffusax.pipelines.plan.guidance import above_zero, apply_guidance, limit_norm
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.text.language_tokenizer import Qwen2Tokenizer

_LONGEST = 512


@dataclasses.dataclass(frozen=True)
class ZImageDenoiser(TransformerDenoiser):
    """Z-Image's transformer."""

    @property
    def context_dim(self) -> int:
        """The width of the language model's hidden states."""
        return int(self.network.config.cap_feat_dim)

    @property
    def references_layout(self) -> str:
        return self.network.config.references_layout or BLIND

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what a run computes once: the refined captions, and what
        steps read of images to look at that see each other alone.
        """
        options = adapter_options(params, "transformer", inputs.adapters)
        given = conditions.context, conditions.lengths
        refined = self.network.apply(
            params["transformer"], *given, method="refine_caption", **options
        )
        found, images = conditions._replace(keys={"transformer": refined}), references(conditions)
        if not images or self.references_layout == JOINT:
            return found
        read = self.network.apply(
            params["transformer"],
            images,
            conditions.lengths,
            refined.shape[1],
            method="prefix",
            **options,
        )
        return with_prefix(found, read)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        The network counts time from 0 for noise to 1. Of the conditions it reads the captions,
        b s d, and their lengths, b, and among the added ones "references", a tuple of the latents
        of images to look at, b h w c each. Of the inputs it reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        caption, refined = conditions.context, (conditions.keys or {}).get("transformer")
        if refined is not None:
            caption, options["refined"] = refined, True
        options |= looked_at(conditions)
        time = (1000 - timestep.astype(jnp.float32)) / 1000
        read = x, time, caption, conditions.lengths
        return -self.network.apply(params["transformer"], *read, **options)

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Applies classifier-free guidance, and limits its norm by cfg_normalization."""
        guided = apply_guidance(predictions, inputs.weights, jnp.float32(0))
        if predictions.shape[1] == 1:
            return guided
        limit = jnp.where((inputs.weights != 0).any(-1), inputs.rescale, 0)
        return limit_norm(predictions[:, 0], guided, limit)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the captions and their lengths.

    Raises:
        ValueError: captions are given as embeddings, and nothing to guide them away from
            (pipeline_z_image.py, __call__).
    """
    negative = call.negative_prompt_embeds is not None or call.negative_prompt is not None
    if call.prompt_embeds is not None and prompt.context.shape[1] > 1 and not negative:
        raise ValueError(
            "negative_prompt_embeds must be given with prompt_embeds where guidance_scale is above "
            "0; use guidance_scale=0 for Z-Image-Turbo"
        )
    return Conditions(prompt.context, lengths=prompt.lengths)


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths; t is `padded_length`.

    length has no effect, as embeddings of any length are filled up.
    """
    rows = [chat_tokens(tokenizers[0], text, call.max_sequence_length) for text in texts[0]]
    return padded_tokens(
        tokenizers[0], rows, padded_length(_longest(rows), call.max_sequence_length)
    )


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    most = length or _LONGEST
    ids = chat_tokens(tokenizers[0], caption, most)
    tokens = padded_tokens(tokenizers[0], [ids], most)
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def caption_length(components: Any, call: Any) -> int:
    """Returns the length of a call's texts with padding, which is that of all in a batch."""
    most = call.max_sequence_length
    return padded_length(
        most_tokens(components, call, functools.partial(chat_tokens, most=most)), most
    )


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to the hidden states before the last layer, n t d, and their lengths.

    Attention is causal, so that pads change nothing before. clip_skip has no effect.
    """
    options: dict[str, Any] = {"method": "hidden_states", "layers": (-2,)}
    (hidden,) = encoders[0].apply(params[0], tokens.ids[0], **options)
    return Prompt(hidden, lengths=tokens.lengths)


def _longest(rows: Sequence[Sequence[int]]) -> int:
    return max(map(len, rows))


Z_IMAGE = Family(
    name="Z-Image",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=Qwen2Tokenizer,
        optional=TEXT_COMPONENTS,
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=ZImageDenoiser.of,
    usual_autoencoder=usual_autoencoder(16),
    latents=functools.partial(LatentFormat.of, patch=2),
    schedule_options=schedule_options,
    lengths=OwnLengths(pad_embeds),
    batch_key=caption_length,
    guidance=policies.ClassifierFree(above_zero),
    start=policies.FlowSteps(),
    encoding=policies.sample_once,
    edits=Learned(),
    inpaint=policies.Inpaint(policies.KeepSize(), noise=policies.blend_drawn),
    callback_view=policies.prompts_alone,
)
"""Z-Image and Z-Image-Turbo."""
