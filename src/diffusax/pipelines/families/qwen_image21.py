"""Qwen-Image 2.1 (Qwen 2026): a transformer over a text of any length and an image.

The text is what a language model makes of a prompt in the form of a chat, before its last norm, and
what stands before the prompt is left out. The language model also reads the images to look at, and
the transformer their latents in the places where the text speaks of them. Nothing of that changes
from step to step, so that a run computes its keys and values once. Images have an opacity.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusax.images.references import on_white, size_of, size_of_area, with_opacity
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.autoencoders.qwen_image21 import AutoencoderKLQwenImage21Config
from diffusax.models.network import Params
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import MaskedTokens
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.transformer import (
    TransformerDenoiser,
    even_sigmas,
    most_tokens,
    pad_embeds,
    padded_length,
    padded_tokens,
    shifts_by_size,
)
from diffusax.pipelines.families.vision_texts import (
    PLACE,
    ReadWithText,
    apart,
    encode_with_images,
    images_of,
    token_ids,
    tokens_with_images,
)
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.samplers.noise_levels import dynamic_mu
from diffusax.text.language_tokenizer import ProcessorTokenizer
from diffusax.text.vision_language import Qwen3VLProcessor

_CAPTION = 512
"""The tokens of captions in training."""
_CHAT = (
    "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_SIDE = 1024
"""The square root of the area of images, unless a call says another."""
_PAIRS = 2
"""Images have an even number of tokens in each direction."""


@dataclasses.dataclass(frozen=True)
class QwenImage21Denoiser(TransformerDenoiser):
    """Qwen-Image 2.1's transformer."""

    sample_size = (64, 64)

    references_layout = "causal"

    @property
    def context_dim(self) -> int:
        """The width of the language model's hidden states."""
        return int(self.network.config.context_in_dim)

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with the text's keys and values, which a run computes once."""
        options = adapter_options(params, "transformer", inputs.adapters)
        given = conditions.context, conditions.lengths, _references(conditions)
        prefix = self.network.apply(params["transformer"], *given, method="prefix", **options)
        return conditions._replace(keys={"transformer": prefix})

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, and their lengths, b; and among the added ones
        "references", a tuple of the latents of images to look at, b h w c each, and "before", the
        texts before each of them, b s d. Of the inputs it reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        options["prefix"] = (conditions.keys or {}).get("transformer")
        time = timestep.astype(jnp.float32) / 1000
        if options["prefix"] is None:
            options["references"] = _references(conditions)
        read = x, time, conditions.context, conditions.lengths
        prediction: jax.Array = self.network.apply(params["transformer"], *read, **options)
        return prediction


def _references(conditions: Conditions) -> tuple[tuple[Any, Any], ...]:
    """Returns for each image to look at the text before it and its latents."""
    added = conditions.added or {}
    return tuple(zip(added.get("before", ()), added.get("references", ()), strict=True))


@dataclasses.dataclass(frozen=True)
class InText(ReadWithText):
    """The denoiser looks at images that the text speaks of, each in an area of 1024x1024 pixels."""

    def arguments(self, height: int, width: int) -> dict[str, Any]:
        return {"output_resolution": round((height * width) ** 0.5)}

    def references(self, call: Any, multiple: int) -> Sequence[np.ndarray]:
        images = (np.asarray(image, np.float32) / 255 for image in _read(call))
        return [2 * image[None] - 1 for image in images]


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts and their lengths, and the texts before images."""
    if images_of(call) and not prompt.before:
        raise ValueError(
            "image cannot be given after encode_first, which has read the texts without it; load "
            "the pipeline without encode_first"
        )
    return Conditions(prompt.context).told(prompt)


def default_size(components: Any, call: Any) -> tuple[int, int]:
    """Returns height and width of a square, or of the last image's shape, in the call's area."""
    width = height = call.output_resolution or max(components.default_size)
    if images := images_of(call):
        width, height = size_of_area(*size_of(images[-1]), _area(call))
    multiple = components.latents.multiple
    return height // multiple * multiple, width // multiple * multiple


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the noise levels, and mu where the shift depends on the size.

    They are the call's sigmas, or the checkpoint's sample_sigmas, or evenly spaced ones from 1 to
    1/steps (pipeline_qwenimage21.py, __call__).
    """
    scheduler, options = components.scheduler, dict[str, Any]()
    if shifts_by_size(scheduler):
        rows, columns, _ = components.latents.shape(*size)
        options["mu"] = dynamic_mu(scheduler.config, rows * columns)
    own = components.options.get("sample_sigmas")
    given = call.sigmas is not None or call.timesteps is not None
    if own is None or given:
        return options | even_sigmas(scheduler, call, np.float64)
    return options | {"steps": None, "sigmas": tuple(map(float, own))}


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths; t is `padded_length`.

    length: the tokens that texts with images are filled up to, if it is known.
    """
    if images := [on_white(image) for image in _read(call)]:
        chats = [_chat(text, len(images)) for text in texts[0]]
        padded = padded_length if length is None else lambda _: length
        return tokens_with_images(_processor(tokenizers[0]), chats, images, padded)
    rows = [_ids(tokenizers[0], text) for text in texts[0]]
    return padded_tokens(tokenizers[0], rows, padded_length(max(map(len, rows))))


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    rows = [_ids(tokenizers[0], caption)]
    tokens = padded_tokens(tokenizers[0], rows, max(length or _CAPTION, len(rows[0])))
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def text_length(components: Any, call: Any) -> tuple[int, ...]:
    """Returns the length of a call's texts with padding, and the sizes of the images that they
    speak of, which are those of all in a batch.
    """
    sizes = [size_of_area(*size_of(image), _area(call)) for image in images_of(call)]

    def read(tokenizer: Any, text: str) -> list[int]:
        if not sizes:
            return _ids(tokenizer, text)
        return token_ids(_processor(tokenizer), _chat(text, len(sizes)), sizes)

    return padded_length(most_tokens(components, call, read)), *itertools.chain(*sizes)


def _chat(text: str, images: int = 0) -> str:
    """Returns a prompt, and places for so many images before it, in the form of a chat."""
    places = " ".join(f"<image{i + 1}>{PLACE}" for i in range(images))
    # Upstream reads a space where there is no prompt.
    return _CHAT.format(places + (text or " "))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(_chat(text)).input_ids)


def _processor(tokenizer: ProcessorTokenizer) -> Qwen3VLProcessor:
    return Qwen3VLProcessor(tokenizer.image_processor, tokenizer)


def _area(call: Any) -> int:
    return int(call.output_resolution or _SIDE) ** 2


def _read(call: Any) -> list[Image.Image]:
    """Returns the images to look at in their sizes."""
    return [with_opacity(image, _area(call)) for image in images_of(call)]


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to the hidden states before the last norm, n t d, and their lengths.

    What stands before the prompt is left out: a chat's second turn begins with the token that its
    first begins with. Where it speaks of images, the texts before them are apart. clip_skip has no
    effect.
    """
    if tokens.images is not None:
        options = {"layers": (-1,), "final_norm": False}
        return apart(encode_with_images(encoders[0], params[0], tokens, **options), tokens)
    (ids,), index = tokens.ids, jnp.arange(tokens.ids[0].shape[1])
    (states,) = encoders[0].apply(
        params[0], ids, tokens.lengths, method="hidden_states", layers=(-1,), final_norm=False
    )
    begin = jnp.argmax((ids == ids[:, :1]) & (index > 0), axis=1)
    places = jnp.minimum(begin[:, None] + index, len(index) - 1)
    context = jnp.take_along_axis(states, places[..., None], axis=1)
    return Prompt(context, lengths=tokens.lengths - begin.astype(jnp.int32))


QWEN_IMAGE21 = Family(
    name="Qwen-Image 2.1",
    components=diffusers_components(
        "transformer",
        ("processor", "text_encoder"),
        tokenizer=ProcessorTokenizer,
        optional=("processor", *TEXT_COMPONENTS),
    ),
    options=(("sample_sigmas", None),),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=QwenImage21Denoiser.of,
    usual_autoencoder=AutoencoderKLQwenImage21Config(),
    latents=functools.partial(LatentFormat.of, normalize=True, packed=True, grid=_PAIRS),
    schedule_options=schedule_options,
    lengths=MaskedTokens(pad_embeds),
    batch_key=text_length,
    default_size=default_size,
    guidance=policies.EitherScale(),
    start=policies.FlowSteps(),
    encoding=policies.take_mode,
    edits=InText(),
    callback_view=policies.prompts_alone,
)
"""Qwen-Image 2.1, distilled (Turbo) and not."""
