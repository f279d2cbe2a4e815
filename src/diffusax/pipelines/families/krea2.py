"""Krea 2 (Krea AI 2026): a transformer over an image and a text of any length.

The text is several hidden states of a language model, side by side, of a prompt in the form of a
chat. Upstream has padding before the end of the chat; here it follows the text, which changes
nothing, as all tokens of a text have one position in the transformer.
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
from diffusax.models.transformers.krea2 import PATCH
from diffusax.models.transformers.references import BLIND, JOINT
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import Masked
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.references import (
    Learned,
    looked_at,
    references,
    with_prefix,
)
from diffusax.pipelines.families.transformer import (
    DESCRIBING_CHAT,
    TransformerDenoiser,
    even_sigmas,
    most_tokens,
    pad_embeds,
    padded_length,
    padded_tokens,
    shifts_by_size,
)
from diffusax.pipelines.plan.guidance import above_zero
from diffusax.pipelines.plan.plan import (
    Conditions,
    Encoders,
    HiddenLayers,
    Prompt,
    StepInputs,
    Texts,
    Tokens,
)
from diffusax.samplers.noise_levels import dynamic_mu
from diffusax.text.language_tokenizer import Qwen2Tokenizer

_LONGEST = 512
_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
_DISTILLED_MU = 1.15
_BEGIN, _END = DESCRIBING_CHAT
_BEGIN_TOKENS, _END_TOKENS = 34, 5
"""The tokens of the chat before a prompt, which are not read, and of those after it."""


@dataclasses.dataclass(frozen=True)
class Krea2Denoiser(TransformerDenoiser):
    """Krea 2's transformer."""

    @property
    def context_dim(self) -> int:
        """The width of the language model's hidden states side by side."""
        config = self.network.config
        return int(config.num_text_layers * config.text_hidden_dim)

    @property
    def in_channels(self) -> int:
        """The channels of latents, of which a patch is a token."""
        return int(self.network.config.in_channels) // PATCH**2

    @property
    def references_layout(self) -> str:
        return self.network.config.references_layout or BLIND

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what a run computes once: the fused texts, and what steps
        read of images to look at that see each other alone.
        """
        options = adapter_options(params, "transformer", inputs.adapters)
        given = self._layers(conditions.context), conditions.lengths
        fused = self.network.apply(params["transformer"], *given, method="fuse_text", **options)
        found, images = conditions._replace(keys={"transformer": fused}), references(conditions)
        if not images or self.references_layout == JOINT:
            return found
        read = self.network.apply(params["transformer"], images, method="prefix", **options)
        return with_prefix(found, read)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s (l d), and their lengths, b, and among the added
        ones "references", a tuple of the latents of images to look at, b h w c each. Of the inputs
        it reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        fused = (conditions.keys or {}).get("transformer")
        options["fused"] = fused is not None
        options |= looked_at(conditions)
        text = self._layers(conditions.context) if fused is None else fused
        time = timestep.astype(jnp.float32) / 1000
        read = x, time, text, conditions.lengths
        prediction: jax.Array = self.network.apply(params["transformer"], *read, **options)
        return prediction

    def _layers(self, context: jax.Array) -> jax.Array:
        """Returns hidden states that stand side by side, b s (l d), as b s l d."""
        return context.reshape(*context.shape[:2], self.network.config.num_text_layers, -1)


def hidden_layers(components: Any) -> HiddenLayers | None:
    """Returns the hidden states that a checkpoint's `text_encoder_select_layers` asks for."""
    chosen = components.options.get("text_encoder_select_layers")
    return None if chosen is None else HiddenLayers(tuple(chosen))


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts and their lengths."""
    return Conditions(prompt.context, lengths=prompt.lengths)


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu: one for distilled checkpoints.

    Upstream: pipeline_krea2.py, __call__.

    Raises:
        ValueError: the scheduler cannot shift as the checkpoint's own does, or tokens of the
            checkpoint are other patches than 2x2.
    """
    if (size_of_patch := components.options.get("patch_size", PATCH)) != PATCH:
        raise ValueError(f"patch_size must be {PATCH} in diffusax (got {size_of_patch})")
    scheduler, options = components.scheduler, dict[str, Any]()
    if shifts_by_size(scheduler):
        rows, columns, _ = components.latents.shape(*size)
        tokens = (rows // PATCH) * (columns // PATCH)
        distilled = components.options.get("is_distilled")
        options["mu"] = _DISTILLED_MU if distilled else dynamic_mu(scheduler.config, tokens)
    return options | even_sigmas(scheduler, call, np.float64)


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths.

    What is read of them has one of few lengths, see `padded_length`. length has no effect,
    as embeddings of any length are filled up.
    """
    most = call.max_sequence_length
    rows = [_chat(tokenizers[0], text, most) for text in texts[0]]
    return padded_tokens(
        tokenizers[0], rows, _BEGIN_TOKENS + _read_length(max(map(len, rows)), most)
    )


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    most = length or _LONGEST
    rows = [_chat(tokenizers[0], caption, most)]
    tokens = padded_tokens(tokenizers[0], rows, max(_BEGIN_TOKENS + most, len(rows[0])))
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def text_length(components: Any, call: Any) -> int:
    """Returns the length of a call's texts with padding, which is that of all in a batch."""
    most = call.max_sequence_length
    return _read_length(most_tokens(components, call, functools.partial(_chat, most=most)), most)


def _chat(tokenizer: Any, text: str, most: int) -> list[int]:
    """Returns the ids of a prompt in the form of a chat, of which at most so many are read."""
    cut = {"truncation": True, "max_length": most + _BEGIN_TOKENS - _END_TOKENS}
    return [*tokenizer(_BEGIN + text, **cut).input_ids, *tokenizer(_END).input_ids]


def _read_length(tokens: int, most: int) -> int:
    """Returns the length that what is read of chats of at most so many tokens is filled up to."""
    longest = tokens - _BEGIN_TOKENS
    return padded_length(longest, max(longest, most))


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to hidden states of several layers side by side, n t (layers d), and lengths.

    What stands before the prompt is left out. clip_skip has no effect.
    """
    layers = _LAYERS if tokens.layers is None else tokens.layers.indices
    options: dict[str, Any] = {"method": "hidden_states", "layers": layers}
    states = encoders[0].apply(params[0], tokens.ids[0], tokens.lengths, **options)
    joined = jnp.concatenate(states, axis=-1)[:, _BEGIN_TOKENS:]
    return Prompt(joined, lengths=tokens.lengths - _BEGIN_TOKENS)


KREA2 = Family(
    name="Krea 2",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=Qwen2Tokenizer,
        optional=TEXT_COMPONENTS,
        text_options=(("vision_config", None),),
    ),
    options=(("text_encoder_select_layers", None), ("is_distilled", False), ("patch_size", PATCH)),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=Krea2Denoiser.of,
    usual_autoencoder=AutoencoderKLQwenImageConfig(),
    latents=functools.partial(LatentFormat.of, normalize=True, patch=PATCH, packed=True),
    schedule_options=schedule_options,
    lengths=Masked(pad_embeds),
    hidden_layers=hidden_layers,
    batch_key=text_length,
    guidance=policies.TwoBranches(above_zero),
    start=policies.FlowSteps(),
    encoding=policies.sample_once,
    edits=Learned(),
    callback_view=policies.prompts_alone,
)
"""Krea 2, distilled (Turbo) and not (Raw)."""
