"""Wan 2.1 and 2.2 (Team Wan 2025): a transformer over the frames of a video, and a text.

The text is the hidden states of UMT5, zeros behind its end. What cross-attention reads of it is the
same in all steps, and is computed once.
"""

import dataclasses
import functools
import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.reading import load_image
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.autoencoders.wan import AutoencoderKLWanConfig
from diffusax.models.caches.step_cache import select
from diffusax.models.network import Network, Params
from diffusax.models.transformers.wan_vace import Control
from diffusax.pipelines.families import policies
from diffusax.pipelines.families.denoiser import DenoiserInputs
from diffusax.pipelines.families.embeddings import check_embeds
from diffusax.pipelines.families.family import (
    TEXT_COMPONENTS,
    Component,
    Family,
    diffusers_components,
)
from diffusax.pipelines.families.transformer import TransformerDenoiser, longest_text
from diffusax.pipelines.families.two_stages import (
    predict_in_stages,
    predict_with_hooks,
    predict_with_memories,
)
from diffusax.pipelines.plan.plan import Conditions, Encoders, Prompt, StepInputs, Texts, Tokens
from diffusax.runtime.programs.program import Program
from diffusax.text.language_tokenizer import T5Tokenizer

LOW_NOISE = "transformer_2"
"""The name of the transformer of the less noisy steps, where there is one."""
PATCH = 2
"""Latents per token, in each direction."""
_LONGEST = 512
SIZE = 480, 832
"""The height and width that diffusers' pipelines have by default."""


@dataclasses.dataclass(frozen=True)
class WanDenoiser(TransformerDenoiser):
    """Wan's transformer, or one for the noisier and one for the other steps."""

    low_noise: Network | None = None
    """The transformer of the less noisy steps; None where one predicts all."""

    sample_size = (60, 104)

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> Self:
        """Returns the denoiser of a checkpoint's networks, which are given by name.

        Of two transformers one may be missing, as where one is trained.
        """
        if cls.component not in networks:
            alone: Any = LowNoiseDenoiser(networks[LOW_NOISE])
            return alone  # type: ignore[no-any-return]
        return cls(networks[cls.component], low_noise=networks.get(LOW_NOISE))

    @functools.cached_property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads."""
        return (self.component,) if self.low_noise is None else (self.component, LOW_NOISE)

    @property
    def networks(self) -> dict[str, Network]:
        """The transformers by name."""
        both = zip(self.components, (self.network, self.low_noise))
        return {name: network for name, network in both if network is not None}

    @property
    def predicting(self) -> tuple[str, ...]:
        """The names of the transformers."""
        return self.components

    @property
    def context_dim(self) -> int:
        """The width of the text's embeddings."""
        return int(self.network.config.text_dim)

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what cross-attention reads of the texts, and of images."""
        images = (conditions.added or {}).get("images")

        def read(name: str, network: Network) -> Any:
            options = adapter_options(params, name, inputs.adapters)
            seen = None
            if network.config.image_dim is not None and images is not None:
                # A first and a last image are rows of their own.
                several = 2 if network.config.pos_embed_seq_len else 1
                seen = images.reshape(len(images) * several, -1, images.shape[-1])
            given = params[name], conditions.context, seen
            return network.apply(*given, method="prefix", **options)

        keys = {name: read(name, network) for name, network in self.networks.items()}
        return conditions._replace(keys=keys)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts the velocity from videos to noise for each branch, b f h w c; see `Denoiser`.

        Of the conditions it reads the texts, b s d, further channels, b f h w c, which VACE's
        networks take for their control, and among the added ones "control_scale", b n, the weights
        of VACE's layers; "images", b i d, CLIP's hidden states; "first_frame", b 1 h w c, latents
        in the place of the first frame's, and perhaps "first_time", b, their timestep, which is
        zero otherwise; and with two transformers "boundary", b, the timestep
        from which on the first predicts. A transformer that no row needs is left out. Of the inputs
        it reads adapters: b a.
        """
        predicted = self._predicted(params, given, options)
        if self.low_noise is None:
            y: jax.Array = predicted(self.component)
            return y
        noisier = _noisier(given.timestep, given.conditions)
        both = predict_in_stages(predicted, self.components, noisier)
        return select(noisier, *both)

    def _predicted(
        self, params: Params, given: DenoiserInputs, options: dict[str, Any]
    ) -> Callable[..., Any]:
        """Returns the function of a transformer's name, and of further options of `Network.apply`,
        that predicts by it.
        """
        x, timestep, conditions, inputs = given
        added = conditions.added or {}
        shown: tuple[Any, ...] = ()
        if "control_scale" in added:
            shown = None, None, Control(conditions.channels, added["control_scale"])
        elif conditions.channels is not None:
            x = jnp.concatenate([x, conditions.channels.astype(x.dtype)], axis=-1)
        times = timestep
        if "first_frame" in added:
            x = jnp.concatenate([added["first_frame"].astype(x.dtype), x[:, 1:]], axis=1)
            first = added.get("first_time", jnp.zeros_like(timestep))
            times = _of_tokens(timestep, first, x.shape[1:4], self.network.config.patch_size)
        keys = conditions.keys or self.prepare(params, conditions, inputs).keys or {}

        def predicted(name: str, **more: Any) -> Any:
            own = options | adapter_options(params, name, inputs.adapters) | more
            given = params[name], x, times, *shown
            return self.networks[name].apply(*given, prefix=keys[name], **own)

        return predicted

    def _beside(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        if self.low_noise is None:
            return super()._beside(params, x, timestep, conditions, inputs, **options)
        given = DenoiserInputs(x, timestep, conditions, inputs or StepInputs(None, None))
        stages = self._predicted(params, given, {}), self.components, _noisier(timestep, conditions)
        if "hooks" in options:
            return predict_with_hooks(*stages, options["hooks"])
        return predict_with_memories(*stages, options["step_cache"])


def _noisier(timestep: jax.Array, conditions: Conditions) -> jax.Array:
    """Returns the rows that the first of two transformers predicts, b."""
    assert conditions.added is not None
    return timestep >= conditions.added["boundary"]


class LowNoiseDenoiser(WanDenoiser):
    """The transformer of the less noisy steps, where it is alone."""

    component = LOW_NOISE


def _of_tokens(
    timestep: jax.Array, first: jax.Array, size: Sequence[int], patch: Sequence[int]
) -> jax.Array:
    """Returns a time for each token, b t.

    Args:
        timestep: that of most tokens, b.
        first: that of the first frame's, b.
        size: the frames, rows and columns of latents.
        patch: those of a token.
    """
    frames, rows, columns = (n // own for n, own in zip(size, patch))
    noisy = jnp.arange(frames * rows * columns) >= rows * columns
    return jnp.where(noisy, timestep[:, None], first[:, None])


def known_frames(given: np.ndarray, step: int) -> np.ndarray:
    """Returns which frames are given of those of each frame of latents, f step.

    The first frame stands alone, and counts for all of its frame of latents.

    Args:
        given: 1 for frames that are given and 0 for others, F.
        step: the frames per frame of latents.
    """
    return np.concatenate([np.repeat(given[:1], step), given[1:]]).reshape(-1, step)


@dataclasses.dataclass(frozen=True)
class TwoStages(policies.ClassifierFree):
    """Classifier-free guidance by a scale for the noisier steps and one for the others."""

    def by_row(
        self,
        components: Any,
        call: Any,
        weights: Sequence[float],
        timesteps: np.ndarray,
        padded: int,
    ) -> np.ndarray:
        """Returns the weights of guidance at each row, padded k-1.

        Raises:
            ValueError: there is a second scale, and one transformer.
        """
        table = super().by_row(components, call, weights, timesteps, padded)
        scale, boundary = call.guidance_scale_2, boundary_of(components)
        if scale is None:
            return table
        if boundary is None:
            raise ValueError(
                "guidance_scale_2 is for checkpoints with two transformers and a boundary_ratio; "
                "leave it out"
            )
        later = table[: len(timesteps)]
        later[(timesteps < boundary)[:, None] & (later != 0)] = scale - 1
        return table


def boundary_of(components: Any) -> float | None:
    """Returns the timestep from which on the first of two transformers predicts; None for one.

    Raises:
        ValueError: there are two, and no boundary_ratio.
    """
    if LOW_NOISE not in components.denoiser.components:
        return None
    ratio = components.options["boundary_ratio"]
    if ratio is None:
        raise ValueError("boundary_ratio must be given for a checkpoint with two transformers")
    return float(ratio) * components.scheduler.num_train_timesteps


def conditions(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns the texts, and with two transformers the boundary between their steps, b 1."""
    boundary = boundary_of(components)
    if boundary is None:
        return Conditions(prompt.context)
    rows = np.full((len(prompt.context), 1), boundary, np.float32)
    return Conditions(prompt.context, added={"boundary": rows})


def conditions_of_images(
    components: Any, call: Any, prompt: Prompt, size: tuple[int, int], scales: np.ndarray
) -> Conditions:
    """Returns those of texts, and CLIP's hidden states of the call's images where they are read.

    Raises:
        ValueError: the image encoder is missing, or what is given is no image.
    """
    found = conditions(components, call, prompt, size, scales)
    if components.denoiser.network.config.image_dim is None:
        return found
    if call.image_embeds is not None:
        states = check_embeds("image_embeds", call.image_embeds, 3)
    else:
        last = [] if call.last_image is None else [call.last_image]
        states = hidden_states(components, [call.image, *last])
    seen = states.reshape(1, 1, -1, states.shape[-1])
    rows = jnp.broadcast_to(seen, (len(prompt.context), *seen.shape[1:]))
    return found._replace(added={**(found.added or {}), "images": rows})


def hidden_states(components: Any, images: Sequence[Any]) -> jax.Array:
    """Returns CLIP's last but one hidden states of images, n i d.

    Raises:
        ValueError: the image encoder is missing, or what is given is no image.
    """
    components.require("image_encoder")
    network, params = components.networks["image_encoder"], components.ready("image_encoder")
    processor = components.tokenizers.get("image_processor")
    process = processor or CLIPImageProcessor.of_size(network.config.image_size)
    pixels = np.stack([process.pixels(load_image(image)) for image in images])
    states: jax.Array = _encode_images(network, params, pixels)
    return states


@functools.partial(Program, static=("network",), shape_of="images")
def _encode_images(network: Network, params: Params, images: jax.Array) -> jax.Array:
    states: jax.Array = network.apply(params, images).hidden_states[-2]
    return states


def default_size(components: Any, call: Any) -> tuple[int, int]:
    """Returns 480 and 832, also of networks that were trained at larger sizes, as in diffusers."""
    return SIZE


def frame_rate(options: Mapping[str, Any]) -> int:
    """Returns the frames per second that a model was trained at: 24 for TI2V-5B, and else 16.

    Source: github.com/Wan-Video/Wan2.2, wan/configs, sample_fps.
    """
    return 24 if options.get("expand_timesteps") else 16


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
    components=(
        *diffusers_components(
            "transformer",
            ("tokenizer", "text_encoder"),
            tokenizer=T5Tokenizer,
            optional=TEXT_COMPONENTS,
        ),
        Component(LOW_NOISE, "denoiser", optional=True),
    ),
    options=(("boundary_ratio", None), ("expand_timesteps", False)),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=WanDenoiser.of,
    usual_autoencoder=AutoencoderKLWanConfig(),
    latents=functools.partial(LatentFormat.of, normalize=True, patch=PATCH),
    batch_key=longest_text,
    default_size=default_size,
    frame_rate=frame_rate,
    guidance=TwoStages(),
    encoding=policies.take_mode,
    callback_view=policies.prompts_alone,
)
"""Wan 2.1, and 2.2 with one transformer or two, of text to video."""
WAN_IMAGE_TO_VIDEO = dataclasses.replace(
    WAN,
    name="Wan image to video",
    components=(
        *WAN.components,
        Component("image_encoder", "image_encoder", optional=True),
        Component("image_processor", "image_processor", CLIPImageProcessor, optional=True),
    ),
    conditions=conditions_of_images,
    extends=WAN,
)
"""Wan 2.1 and 2.2 of image to video, also with a transformer for both (TI2V-5B)."""
