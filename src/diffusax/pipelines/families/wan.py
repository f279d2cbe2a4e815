"""Wan 2.1 and 2.2 (Team Wan 2025): a transformer over the frames of a video, and a text.

The text is the hidden states of UMT5, zeros behind its end. What cross-attention reads of it is the
same in all steps, and is computed once.
"""

import dataclasses
import functools
import html
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.autoencoders.wan import AutoencoderKLWanConfig
from diffusax.models.network import Params
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.transformer import TransformerDenoiser, longest_text
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.text.language_tokenizer import T5Tokenizer

PATCH = 2
"""Latents per token, in each direction."""
_LONGEST = 512
_SIZE = 480, 832
"""The height and width that diffusers' pipelines have by default."""


@dataclasses.dataclass(frozen=True)
class WanDenoiser(TransformerDenoiser):
    """Wan's transformer."""

    sample_size = (60, 104)

    @property
    def context_dim(self) -> int:
        """The width of the text's embeddings."""
        return int(self.network.config.text_dim)

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what cross-attention reads of the texts."""
        options = adapter_options(params, "transformer", inputs.adapters)
        read = self.network.apply(
            params["transformer"], conditions.context, method="prefix", **options
        )
        return conditions._replace(keys={"transformer": read})

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from videos to noise for each branch, b f h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d. Of the inputs it reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        if conditions.keys is None:
            options["text"] = conditions.context
        else:
            options["prefix"] = conditions.keys["transformer"]
        prediction: jax.Array = self.network.apply(params["transformer"], x, timestep, **options)
        return prediction


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts."""
    return Conditions(prompt.context)


def default_size(components: Any, call: Any) -> tuple[int, int]:
    """Returns 480 and 832, also of networks that were trained at larger sizes, as in diffusers."""
    return _SIZE


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts, n max_sequence_length, with their lengths.

    length has no effect, as texts are as long as the call says.
    """
    return _ids(tokenizers[0], list(texts[0]), call.max_sequence_length)


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption, t of a fixed length, and how many are no padding."""
    tokens = _ids(tokenizers[0], [caption], length or _LONGEST)
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def _ids(tokenizer: Any, texts: list[str], length: int) -> Tokens:
    given = {"padding": "max_length", "truncation": True, "max_length": length}
    found = tokenizer([clean(text) for text in texts], return_tensors="np", **given)
    lengths = found.attention_mask.sum(1).astype(np.int32)
    return Tokens((np.asarray(found.input_ids, np.int32),), lengths=lengths)


def clean(text: str) -> str:
    """Returns a text without characters in HTML's words, and with single spaces between words.

    Upstream: pipeline_wan.py, prompt_clean, which also mends broken encodings where ftfy is there.
    """
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to UMT5's hidden states, n t d, zeros behind each text. clip_skip: no effect.

    Upstream: pipeline_wan.py, _get_t5_prompt_embeds.
    """
    options: dict[str, Any] = {"method": "hidden_states", "layers": (-1,)}
    (states,) = encoders[0].apply(params[0], tokens.ids[0], tokens.lengths, **options)
    read = jnp.arange(states.shape[1]) < tokens.lengths[:, None]
    return Prompt(jnp.where(read[..., None], states, 0))


WAN = Family(
    name="Wan",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=T5Tokenizer,
        optional=TEXT_COMPONENTS,
    ),
    options=(("expand_timesteps", False),),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=WanDenoiser.of,
    usual_autoencoder=AutoencoderKLWanConfig(),
    latents=functools.partial(LatentFormat.of, normalize=True, patch=PATCH),
    batch_key=longest_text,
    default_size=default_size,
    start=policies.FlowSteps(),
    encoding=policies.take_mode,
    callback_view=policies.prompts_alone,
)
"""Wan 2.1, and 2.2 with one transformer, of text to video."""
