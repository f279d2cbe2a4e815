"""FLUX.2 klein (BFL 2026): a transformer over a text, an image, and images that it looks at.

The text is the hidden states of three layers of a language model, side by side. Texts are filled
up to one length, and what fills them up is read, too, as in diffusers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusax.images.conversion import to_pixels
from diffusax.images.masks import bilinear
from diffusax.images.references import as_images, limit_area, limited_size, reference_size
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2Config
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Params
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.family import TEXT_COMPONENTS, Family, diffusers_components
from diffusax.pipelines.families.transformer import (
    TransformerDenoiser,
    chat_tokens,
    even_sigmas,
    longest_text,
    padded_tokens,
    shifts_by_size,
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
from diffusax.text.language_tokenizer import Qwen2Tokenizer

_LONGEST = 512
_LAYERS = (9, 18, 27)


@dataclasses.dataclass(frozen=True)
class Flux2KleinDenoiser(TransformerDenoiser):
    """FLUX.2 klein's transformer."""

    sample_size = (64, 64)

    references_layout = "joint"

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from images to noise for each branch, b h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, and among the added ones "references", a tuple
        of the latents of images to look at, b h w c each. Of the inputs it reads adapters: b a.
        """
        x, timestep, conditions, inputs = given
        options |= adapter_options(params, "transformer", inputs.adapters)
        options["references"] = (conditions.added or {}).get("references", ())
        time = timestep.astype(jnp.float32) / 1000
        first = params["transformer"], x, time, conditions.context
        prediction: jax.Array = self.network.apply(*first, **options)
        return prediction


@dataclasses.dataclass(frozen=True)
class Flux2KleinKVDenoiser(Flux2KleinDenoiser):
    """The transformer of FLUX.2 klein KV, which was trained with images that see themselves alone.

    What steps read of them is the same in all, and is computed once.
    """

    references_layout = "blind"

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with the keys and values of images to look at, if any."""
        references = (conditions.added or {}).get("references", ())
        if not references:
            return conditions
        options = adapter_options(params, "transformer", inputs.adapters)
        read = self.network.apply(params["transformer"], references, method="prefix", **options)
        return conditions._replace(keys={"transformer": read})

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts as `Flux2KleinDenoiser.predict`, of what `prepare` has read."""
        conditions = given.conditions
        if conditions.keys is None:
            conditions = self.prepare(params, conditions, given.inputs)
        options["prefix"] = (conditions.keys or {}).get("transformer")
        rest = {k: v for k, v in (conditions.added or {}).items() if k != "references"}
        own = given._replace(conditions=conditions._replace(added=rest))
        return super().predict(params, own, options)


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts."""
    return Conditions(prompt.context)


def default_size(components: Any, call: Any) -> tuple[int, int]:
    """Returns height and width of the first image to look at, or those that are trained at."""
    if call.image is None:
        size: tuple[int, int] = components.default_size
        return size
    return reference_size(as_images(call.image)[0], components.latents.factor)


@dataclasses.dataclass(frozen=True)
class LimitSize(policies.KeepSize):
    """Images keep their size, or are made smaller if they are large.

    Height and width that the call gives have no effect (pipeline_flux2_klein_inpaint.py, which
    leaves images in a list as large as they are).
    """

    def __call__(self, components: Any, call: Any, model_size: Callable[..., Any]) -> Any:
        """Returns the call with its images made smaller, and with their height and width.

        Raises:
            ValueError: image is missing or cannot be read.
        """
        if call.image is None:
            raise ValueError("image must be given")
        several, form = isinstance(call.image, list | tuple), components.latents
        images = as_images(call.image)
        if all(isinstance(image, str | Path | Image.Image) for image in images):
            images = [limit_area(image) for image in images]
            call = dataclasses.replace(call, image=images if several else images[0])
            width, height = images[0].size
        else:
            x = to_pixels(call.image, factor=form.multiple, latent_channels=form.channels)
            height, width = (n * (1 if x.shape[-1] == 3 else form.factor) for n in x.shape[1:3])
            width, height = limited_size(width, height)
        height, width = (side // form.multiple * form.multiple for side in (height, width))
        return dataclasses.replace(call, height=height, width=width)


def empirical_mu(tokens: int, steps: int) -> float:
    """Returns the shift of noise levels for an image of so many tokens in so many steps.

    Upstream: pipeline_flux2_klein.py, compute_empirical_mu.
    """
    many = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return many
    few = 8.73809524e-05 * tokens + 1.89833333
    # The line through the shift for 10 steps and that for 200.
    slope = (many - few) / 190
    return slope * steps + many - 200 * slope


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu for the size and the steps."""
    scheduler, options = components.scheduler, dict[str, Any]()
    steps = call.num_inference_steps or len(call.sigmas or ())
    if shifts_by_size(scheduler):
        rows, columns, _ = components.latents.shape(*size)
        options["mu"] = empirical_mu(rows * columns, steps)
    own = getattr(scheduler, "use_flow_sigmas", False)
    return options if own else options | even_sigmas(scheduler, call, np.float64)


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids of texts as chats, n t, with their lengths; t is max_sequence_length.

    length has no effect, as in diffusers.
    """
    tokens = _chats(tokenizers[0], texts[0], call.max_sequence_length)
    return tokens._replace(layers=HiddenLayers(tuple(call.text_encoder_out_layers or _LAYERS)))


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption as a chat, t of a fixed length, and how many are no padding."""
    tokens = _chats(tokenizers[0], [caption], length or _LONGEST)
    return Tokens((tokens.ids[0][0],), lengths=tokens.lengths[0])


def _chats(tokenizer: Any, texts: Sequence[str], length: int) -> Tokens:
    rows = [chat_tokens(tokenizer, text, length, thinking=False) for text in texts]
    return padded_tokens(tokenizer, rows, length)


def encode(
    encoders: Encoders, params: tuple[Params, ...], tokens: Tokens, clip_skip: int | None = None
) -> Prompt:
    """Encodes tokens to hidden states of several layers side by side, n t (layers d).

    Padding is read by no other token in the language model. clip_skip has no effect, as in
    diffusers.

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
    options: dict[str, Any] = {"method": "hidden_states", "layers": layers}
    states = encoders[0].apply(params[0], tokens.ids[0], tokens.lengths, **options)
    return Prompt(jnp.concatenate(states, axis=-1))


FLUX2_KLEIN = Family(
    name="FLUX.2 klein",
    components=diffusers_components(
        "transformer",
        ("tokenizer", "text_encoder"),
        tokenizer=Qwen2Tokenizer,
        optional=TEXT_COMPONENTS,
    ),
    options=(("is_distilled", False),),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=Flux2KleinDenoiser.of,
    usual_autoencoder=AutoencoderKLFlux2Config(),
    latents=functools.partial(LatentFormat.of, packed=True),
    schedule_options=schedule_options,
    batch_key=longest_text,
    default_size=default_size,
    start=policies.FlowSteps(),
    encoding=policies.take_mode,
    edits=policies.References(),
    inpaint=policies.Inpaint(LimitSize(), shrink=bilinear),
    callback_view=policies.prompts_alone,
)
"""FLUX.2 klein, distilled to four steps and not."""
FLUX2_KLEIN_KV = dataclasses.replace(
    FLUX2_KLEIN,
    name="FLUX.2 klein KV",
    options=(("is_distilled", True),),
    denoiser=Flux2KleinKVDenoiser.of,
)
"""FLUX.2 klein KV, whose images to look at see themselves alone."""
