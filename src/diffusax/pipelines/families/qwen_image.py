"""Qwen-Image (Qwen 2025): a transformer over a text of any length and an image.

The text is the last hidden state of a language model of a prompt in the form of a chat, of which
what stands before the prompt is left out. Guidance keeps the norm of each token's prediction.
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
from diffusax.models.autoencoders.qwen_image import AutoencoderKLQwenImageConfig
from diffusax.models.network import Params
from diffusax.models.transformers.qwen_image import PATCH
from diffusax.pipelines.families import policies, transformer
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import MaskedTokens
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.transformer import (
    DESCRIBING_CHAT,
    TransformerDenoiser,
    even_sigmas,
    most_tokens,
    pad_embeds,
    padded_length,
    padded_tokens,
)
from diffusax.pipelines.plan.guidance import apply_guidance, keep_norms
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.text.language_tokenizer import Qwen2Tokenizer

_LONGEST = 1024
_CAPTION = 512
"""The tokens of captions in training."""
_BEGIN_TOKENS = 34
"""The tokens of the chat before a prompt, which are not read."""


@dataclasses.dataclass(frozen=True)
class QwenImageDenoiser(TransformerDenoiser):
    """Qwen-Image's transformer."""

    references_layout = "joint"

    @property
    def in_channels(self) -> int:
        """The channels of latents, of which a patch is a token."""
        return int(self.network.config.in_channels) // PATCH**2

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, and their lengths, b, and among the added ones
        "references", a tuple of the latents of images to look at, b h w c each. Of the inputs it
        reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        options["references"] = (conditions.added or {}).get("references", ())
        time = timestep.astype(jnp.float32) / 1000
        read = x, time, conditions.context, conditions.lengths
        prediction: jax.Array = self.network.apply(params["transformer"], *read, **options)
        return prediction

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Applies classifier-free guidance, and gives each token the norm of the first branch's."""
        guided = apply_guidance(predictions, inputs.weights, jnp.float32(0))
        return guided if predictions.shape[1] == 1 else keep_norms(predictions[:, 0], guided, PATCH)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts and their lengths, of which at most max_sequence_length tokens are read.

    Upstream: pipeline_qwenimage.py, encode_prompt, which cuts embeddings, too.
    """
    most = call.max_sequence_length
    context = prompt.context[:, :, : padded_length(_LONGEST, most)]
    return Conditions(context, lengths=prompt.lengths.clip(max=most))


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu where the shift depends on the size.

    Upstream: pipeline_qwenimage.py, __call__.
    """
    options = transformer.schedule_options(components, call, size, even=False)
    return options | even_sigmas(components.scheduler, call, np.float64)


def check_length(call: Any) -> None:
    """Raises ValueError where a call's texts may be longer than 1024 tokens."""
    if call.max_sequence_length > _LONGEST:
        raise ValueError(
            f"max_sequence_length must be at most {_LONGEST} (got {call.max_sequence_length})"
        )


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths.

    What is read of them has one of few lengths, see `padded_length`. length has no effect, as
    embeddings of any length are filled up.

    Raises:
        ValueError: texts may be longer than 1024 tokens.
    """
    check_length(call)
    most = call.max_sequence_length
    rows = [_chat(tokenizers[0], text, most) for text in texts[0]]
    read = padded_length(max(map(len, rows)) - _BEGIN_TOKENS, most)
    return padded_tokens(tokenizers[0], rows, _BEGIN_TOKENS + read)


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    most = length or _CAPTION
    rows = [_chat(tokenizers[0], caption, most)]
    tokens = padded_tokens(tokenizers[0], rows, _BEGIN_TOKENS + most)
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def text_length(components: Any, call: Any) -> int:
    """Returns the length of a call's texts with padding, which is that of all in a batch."""
    most = call.max_sequence_length
    tokens = most_tokens(components, call, functools.partial(_chat, most=most))
    return padded_length(tokens - _BEGIN_TOKENS, most)


def _chat(tokenizer: Any, text: str, most: int) -> list[int]:
    """Returns the ids of a prompt in the form of a chat, of which at most so many are read."""
    cut = {"truncation": True, "max_length": most + _BEGIN_TOKENS}
    begin, end = DESCRIBING_CHAT
    return list(tokenizer(begin + text + end, **cut).input_ids)


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to the last hidden states, n t d, and their lengths.

    What stands before the prompt is left out. clip_skip has no effect.
    """
    options: dict[str, Any] = {"method": "hidden_states", "layers": (-1,)}
    (states,) = encoders[0].apply(params[0], tokens.ids[0], tokens.lengths, **options)
    return Prompt(states[:, _BEGIN_TOKENS:], lengths=tokens.lengths - _BEGIN_TOKENS)


QWEN_IMAGE = Family(
    name="Qwen-Image",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=Qwen2Tokenizer,
        optional=TEXT_COMPONENTS,
        text_options=(("vision_config", None),),
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=QwenImageDenoiser.of,
    usual_autoencoder=AutoencoderKLQwenImageConfig(),
    latents=functools.partial(LatentFormat.of, normalize=True, patch=PATCH, packed=True),
    schedule_options=schedule_options,
    lengths=MaskedTokens(pad_embeds),
    batch_key=text_length,
    guidance=policies.EitherScale(),
    start=policies.FlowSteps(),
    encoding=policies.sample_once,
    resize=policies.ModelSize(),
    inpaint=policies.Inpaint(normalizes=True),
    callback_view=policies.prompts_alone,
)
"""Qwen-Image, and -2512."""
