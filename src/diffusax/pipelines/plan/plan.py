"""The data of one run: what a task prepares for the sampler, the networks and the decoder.

Shapes in the docstrings: n texts or rows of a table, b images, k branches of guidance, s entries of
the context, h w c a latent, H W an image in pixels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from diffusax.models.adapters.image_prompts import ImageLayers, ImagePrompt
from diffusax.models.hooks import HookFunctions
from diffusax.models.network import Network
from diffusax.runtime.random.noise import Noise
from diffusax.samplers import Schedule, Table

Images = list[Any]
Encoders = tuple[Network, ...]
"""The text encoders of a family, in order."""
Texts = Sequence[Sequence[str]]
"""n texts for each text encoder."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class HiddenLayers:
    """Which hidden states of a language model are a prompt's embeddings; compiled into programs."""

    indices: tuple[int, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ImageSpans:
    """Where images stand in the tokens of texts, all alike; compiled into programs."""

    begin: int
    """The first token that is part of the prompt."""
    spans: tuple[tuple[int, int], ...]
    """For each image its first token, and the one behind its last."""


class TextImages(NamedTuple):
    """The images that n texts speak of, as a vision-language model reads them."""

    places: Any
    """Whether a token stands for a part of an image, n t."""
    positions: Any
    """The positions of tokens (frame, row, column), n 3 t."""
    patches: tuple[Any, ...]
    """The patches of each image, n p d each."""
    grids: Any
    """The rows and columns of patches of k images, n k 2."""
    spans: ImageSpans


class Tokens(NamedTuple):
    """The tokens of n texts, as the text encoders of a family read them."""

    ids: tuple[Any, ...]
    """The token ids for each text encoder, n ..., int32."""
    weights: Any = None
    """The weights of the first encoder's tokens, n ...; None where all tokens weigh the same."""
    lengths: Any = None
    """The number of context tokens of each text that are not padding, n; None where none is
    padding."""
    adapters: Any = None
    """The weights of m adapters of the text encoders for each text, n m; None without adapters.
    Families' functions have no need of them."""
    layers: HiddenLayers | None = None
    """The hidden states that the call asks for; None for the family's own."""
    images: TextImages | None = None
    """The images that the texts speak of; None where they speak of none."""


class Prompt(NamedTuple):
    """The embeddings of n texts, or those of b images with k branches each, b k ... ."""

    context: Any
    """The sequence of embeddings for cross-attention, n s d."""
    pooled: Any = None
    """The pooled embeddings, n p; None where the family has none."""
    lengths: Any = None
    """The number of context entries that are not padding, n; None where none is padding."""
    before: tuple[Any, ...] = ()
    """For each image that the texts speak of the embeddings of what stands before it, n s d; the
    context is then what stands behind the last."""


class Conditions(NamedTuple):
    """The inputs of the network besides the latents and the timestep.

    The arrays begin with the axes b k, images and branches of guidance, or b 1 where the branches
    agree. The branches are the inner axis, so that a batch split over devices by images needs no
    communication.
    """

    context: Any
    """The sequence of embeddings for cross-attention, b k s d."""
    pooled: Any = None
    """The pooled embeddings of the prompts, b k p; None where the family has none."""
    lengths: Any = None
    """The number of context entries that are not padding, b k; None where none is padding."""
    channels: Any = None
    """Further input channels beside the latents, b k h w c: masks, masked or edited images."""
    added: dict[str, Any] | None = None
    """Further inputs of the family's network by name, b k ... each."""
    control: tuple[Any, ...] = ()
    """One entry for each ControlNet or T2I-Adapter: its images, b 1 H W c in [0, 1], or what the
    denoiser's `embed` makes of them: an array b 1 h w c, or for a transformer b 1 t c; or an
    adapter's maps, a tuple of such. FLUX.1's ControlNets are given latents or pixels in [-1, 1].

    The compiled programs take what `embed` returns.
    """
    images: tuple[ImagePrompt, ...] = ()
    """For each IP-Adapter the tokens of its images, b k n t d, with scales and masks, b 1 ... ."""
    keys: dict[str, Any] | None = None
    """The context's keys and values by component, which the denoiser's `prepare` computes."""

    def told(self, prompt: Prompt) -> "Conditions":
        """Returns the conditions with other embeddings of prompts, b k ... ."""
        own = {"context": prompt.context, "pooled": prompt.pooled, "lengths": prompt.lengths}
        found = self._replace(**{name: leaf for name, leaf in own.items() if leaf is not None})
        if not prompt.before:
            return found
        return found._replace(added={**(self.added or {}), "before": prompt.before})


class StepInputs(NamedTuple):
    """The inputs of a run, besides the sampler's table, that may change from row to row.

    A row's values may be one per image. The arrays have an axis of n rows first. weights: n k-1,
    the weights of guidance. rescale: n, how the denoiser's `guide` corrects what it has guided: the
    strength of guidance rescaling, or Z-Image's cfg_normalization. control: n m k r, the scale of
    each of the r residuals of each of m ControlNets in each branch, or of all maps of a
    T2I-Adapter, the first of r; None without either. freeu: n 4, the numbers of `FreeU`; None
    without it. adapters: n b a, the weight of each of a adapters in each image, or n a where a call
    has one dictionary for all images, the same in all rows; None without adapters. target: n, the
    timestep that each row leads to, for a denoiser that is told it; else None.
    """

    weights: Any
    rescale: Any
    control: Any = None
    freeu: Any = None
    adapters: Any = None
    target: Any = None


class Inpainting(NamedTuple):
    """The known latents of an inpainting run, which replace the unmasked region after each row.

    mask: b h w 1, one where to generate and zero where to keep. latents, noise: b h w c, the clean
    latents and the noise that is added to them.
    """

    mask: Any
    latents: Any
    noise: Any


class DecoderCondition(NamedTuple):
    """The image and the mask that an inpainting decoder reads (AsymmetricAutoencoderKL).

    image: b H W 3 in [-1, 1]. mask: b H W 1, zero where the image is kept.
    """

    image: Any
    mask: Any


class Plan(NamedTuple):
    """One run of the sampler as a tree of arrays."""

    latents: Any
    """The latents at the start of the run, b h w c."""
    conditions: Conditions
    table: Table
    step_inputs: StepInputs
    noise: Any
    """One random key per image, b, from which the noise of each row is drawn."""
    inpainting: Inpainting | None = None
    guide: Any = None
    """The call's own rule of guidance as a tree of numbers, see `guidance.as_rule`; None for the
    denoiser's."""
    cache: Any = None
    """The cache of steps, a `models.caches.StepCache` whose numbers are data; None without one."""
    row_noise: Any = None
    """PyTorch's numbers for the row that is run next, b h w c; None where the keys are used."""
    hooks: HookFunctions | None = None
    """The call's hooks of the network's layers, see `models.hooks.as_hooks`; None without any."""


class Later(NamedTuple):
    """What replaces a run's conditions of the prompts from a row on."""

    row: int
    conditions: Conditions

    def applied(self, conditions: Conditions) -> Conditions:
        """Returns a run's conditions with those of the prompts from here on."""
        own = self.conditions
        added = {**(conditions.added or {}), **(own.added or {})} or None
        return conditions._replace(
            context=own.context, pooled=own.pooled, lengths=own.lengths, added=added
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The static options of `programs.decode`, which are compiled into the program."""

    upcast: bool
    """Whether float16 parameters are cast to float32."""
    normalize: bool
    """Whether the autoencoder's latents_mean and latents_std are applied."""
    skip: int = 0
    """The first frames of latents, which stand for images to look at and are not decoded."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A plan with what the host needs to run it and to decode its latents."""

    plan: Plan
    schedule: Schedule
    noise: Noise
    weights: tuple[float, ...]
    """The weights of guidance, one fewer than there are branches."""
    decoding: Decoding
    decoder_condition: DecoderCondition | None = None
    """The image and the mask that the decoder reads beside the latents; None for most decoders."""
    overlay: Callable[[Images], Images] | None = None
    """Pastes the decoded images into those that they were cropped from; None where none was."""
    guidance_scale: float | None = None
    """The guidance scale that a callback has set; None where the call's own applies."""
    loras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The call's LoRAs (`Lora`) by name, in the order of the columns of `StepInputs.adapters`."""
    ip_adapters: tuple[ImageLayers, ...] = ()
    """The layers of the IP-Adapters of the call, on the devices; empty where it has none."""
    later: tuple[Later, ...] = ()
    """What the prompts are from later rows on, in order; empty where they do not change."""
    reweigh: Callable[[float], tuple[float, ...]] | None = None
    """The weights of guidance for another scale, where prompts are joined of parts; else None."""
