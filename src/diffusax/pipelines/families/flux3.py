"""FLUX.3 klein (BFL 2026): a transformer over a text, an image, and images that it looks at.

The text is the hidden states of eight layers of a language model, side by side. A text is filled up
to a window of a multiple of 80 tokens, and what fills it up is read, too. Windows of different
sizes share a batch: what is beyond one is not read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.conversion import Box
from diffusax.images.masks import bilinear
from diffusax.images.reading import load_image
from diffusax.images.references import (
    as_images,
    canvas_of,
    cropped_references,
    limited_size,
    region_of,
    whole_reference,
)
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2Config
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Params
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import OwnLengths, padded_embeds
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.flux2 import LimitSize
from diffusax.pipelines.families.transformer import (
    TransformerDenoiser,
    chat_tokens,
    even_sigmas,
    most_tokens,
    padded_tokens,
)
from diffusax.pipelines.plan.plan import (
    Conditions,
    Encoders,
    HiddenLayers,
    Prompt,
    StepInputs,
    Texts,
    Tokens,
)
from diffusax.samplers import FlowMatchEulerDiscreteScheduler
from diffusax.text.language_tokenizer import ProcessorTokenizer

_WINDOW = 80
"""The tokens of which a text's window is a multiple."""
_FEW, _STEP = 320, 320
"""Above the first length, programs are compiled for multiples of the second."""
_CAPTION = 480
"""The tokens of captions in training."""
_LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)
_SHIFT = 6.93
"""The shift of noise levels, which is no file's but the code's, before_denoise.py."""


@dataclasses.dataclass(frozen=True)
class Flux3KleinDenoiser(TransformerDenoiser):
    """FLUX.3 klein's transformer."""

    sample_size = (64, 64)

    references_layout = "joint"

    @property
    def flow_map(self) -> bool:
        """Whether the network is told the time that a step leads to: it is distilled then."""
        return bool(self.network.config.flow_map)

    def targets(self, timesteps: np.ndarray, padded: int) -> np.ndarray | None:
        """Returns the timestep of each next row, and zero for the last; see `Denoiser.targets`."""
        if not self.flow_map:
            return None
        rows = np.zeros(padded, np.float32)
        rows[: len(timesteps) - 1] = timesteps[1:]
        return rows

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what the first blocks make of texts and images, if it can.

        They are the same in all steps, but not in a distilled network.
        """
        if self.flow_map:
            return conditions
        options = adapter_options(params, "transformer", inputs.adapters)
        read = self.network.apply(
            params["transformer"],
            conditions.context,
            conditions.lengths,
            _references(conditions),
            method="read_conditions",
            **options,
        )
        return conditions._replace(keys={"transformer": read})

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, their lengths, b, and among the added ones
        "references", a tuple of the latents of images to look at, b h w c each. Of the inputs it
        reads adapters, b a, and where the network is distilled target, b.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        options["references"] = _references(conditions)
        options["read"] = (conditions.keys or {}).get("transformer")
        if inputs.target is not None:
            options["target"] = inputs.target.astype(jnp.float32) / 1000
        time = timestep.astype(jnp.float32) / 1000
        first = params["transformer"], x, time, conditions.context
        y: jax.Array = self.network.apply(*first, lengths=conditions.lengths, **options)
        return y


def _references(conditions: Conditions) -> tuple[Any, ...]:
    found: tuple[Any, ...] = (conditions.added or {}).get("references", ())
    return found


@dataclasses.dataclass(frozen=True)
class UnlessDistilled(policies.ClassifierFree):
    """Classifier-free guidance, which distilled networks need none of."""

    def branches(self, components: Any) -> int:
        return 1 if components.denoiser.flow_map else 2


@dataclasses.dataclass(frozen=True)
class WholeOrCropped(policies.References):
    """An only image is looked at whole, and of several the borders are cut off.

    What is generated for an only image is in its size, unless the call gives one.
    """

    def references(self, call: Any, multiple: int) -> Sequence[np.ndarray]:
        images = () if call.image is None else as_images(call.image)
        if len(images) == 1:
            return [whole_reference(images[0], multiple)]
        return cropped_references(images, multiple)

    def mirrored(self, count: int) -> bool:
        return count == 1

    def kept_part(self, call: Any, multiple: int) -> Box | None:
        images = () if call.image is None else as_images(call.image)
        if len(images) != 1 or call.height is not None or call.width is not None:
            return None
        within, canvas = canvas_of(*load_image(images[0]).size, multiple)
        return None if within == canvas else region_of(within, canvas)


def default_size(components: Any, call: Any) -> tuple[int, int]:
    """Returns height and width of the first image to look at, or those that are trained at."""
    if call.image is None:
        size: tuple[int, int] = components.default_size
        return size
    images, multiple = as_images(call.image), components.latents.multiple
    width, height = load_image(images[0]).size
    if len(images) == 1:
        width, height = canvas_of(width, height, multiple)[1]
    else:
        width, height = (side // multiple * multiple for side in limited_size(width, height))
    return height, width


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, which the scheduler shifts."""
    return even_sigmas(components.scheduler, call, np.float64)


def window(tokens: Any) -> Any:
    """Returns the tokens that texts are filled up to, of which the transformer reads all."""
    return -(-tokens // _WINDOW) * _WINDOW


def padded_length(tokens: int) -> int:
    """Returns the length of arrays of texts of so many tokens: 80, 160, 320, 640, 960, ...."""
    if tokens > _FEW:
        return -(-tokens // _STEP) * _STEP
    return next(n for n in (_WINDOW, 2 * _WINDOW, _FEW) if n >= tokens)


def pad_embeds(embeds: Sequence[Any]) -> Prompt:
    """Returns hidden states of different lengths, t d each, as n s d with their lengths."""
    return padded_embeds(embeds, padded_length)


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths; t is `padded_length`.

    length has no effect, as embeddings of any length are filled up.
    """
    rows = [chat_tokens(tokenizers[0], text, call.max_sequence_length) for text in texts[0]]
    tokens = padded_tokens(tokenizers[0], rows, _array_length(max(map(len, rows)), call))
    return tokens._replace(layers=HiddenLayers(tuple(call.text_encoder_out_layers or _LAYERS)))


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    most = length or _CAPTION
    rows = [chat_tokens(tokenizers[0], caption, most)]
    tokens = padded_tokens(tokenizers[0], rows, most)
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def text_length(components: Any, call: Any) -> int:
    """Returns the length of a call's texts with padding, which is that of all in a batch."""
    read = functools.partial(chat_tokens, most=call.max_sequence_length)
    return _array_length(most_tokens(components, call, read), call)


def _array_length(tokens: int, call: Any) -> int:
    return min(padded_length(tokens), int(call.max_sequence_length))


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to hidden states of several layers side by side, n t (layers d).

    Their lengths are those of the windows. What fills a window up stands at position 1 and reads
    the text, and no other token of the language model reads it. clip_skip has no effect.

    Raises:
        ValueError: the call asks for a layer that the language model does not have.
    """
    layers = _LAYERS if tokens.layers is None else tokens.layers.indices
    count = encoders[0].config.num_hidden_layers
    if not all(-count - 1 <= layer <= count for layer in layers):
        raise ValueError(
            f"text_encoder_out_layers must be hidden states of the text encoder, from 0 to {count} "
            f"(got {layers})"
        )
    (ids,), lengths = tokens.ids, tokens.lengths
    index = jnp.arange(ids.shape[1])
    places = jnp.where(index < lengths[:, None], index, 1)
    options: dict[str, Any] = {"method": "hidden_states", "layers": layers, "position_ids": places}
    states = encoders[0].apply(params[0], ids, lengths, **options)
    windows = jnp.minimum(window(lengths), ids.shape[1])
    return Prompt(jnp.concatenate(states, axis=-1), lengths=windows)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts and the lengths of their windows."""
    return Conditions(prompt.context, lengths=prompt.lengths)


def default_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Returns the scheduler of checkpoints, which have no file of one."""
    return FlowMatchEulerDiscreteScheduler(shift=_SHIFT)


FLUX3_KLEIN = Family(
    name="FLUX.3 klein",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=ProcessorTokenizer,
        optional=TEXT_COMPONENTS,
        text_options=(("vision_config", None),),
        scheduler=default_scheduler,
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=Flux3KleinDenoiser.of,
    usual_autoencoder=AutoencoderKLFlux2Config(),
    latents=functools.partial(LatentFormat.of, packed=True),
    schedule_options=schedule_options,
    lengths=OwnLengths(pad_embeds),
    batch_key=text_length,
    default_size=default_size,
    guidance=UnlessDistilled(),
    start=policies.FlowSteps(),
    encoding=policies.take_mode,
    edits=WholeOrCropped(),
    inpaint=policies.Inpaint(LimitSize(), shrink=bilinear),
    callback_view=policies.prompts_alone,
)
"""FLUX.3 klein, distilled to sixteen steps and not."""
