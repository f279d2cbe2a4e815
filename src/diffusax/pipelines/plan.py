"""A run as data: what a task makes of a call and the sampler, networks and decoder are given."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from diffusax.runtime.noise import Noise
from diffusax.samplers import Schedule, Table

Images = list[Any]


class Conditions(NamedTuple):
    """What the network is told besides the latents and the timestep.

    Leaves have the axes b k, images and branches of guidance; b 1 where the branches agree. The
    branches stand inside, so that a batch split over devices needs no messages.
    """

    context: Any
    """b k s d, what cross-attention looks at."""
    channels: Any = None
    """b k h w c, beside the latents in the network's input: masks, masked or edited images."""
    added: dict[str, Any] | None = None
    """What a family's network asks for: text_embeds, time_ids, timestep_cond; b k d."""
    control: tuple[Any, ...] = ()
    """One for each ControlNet: images b 1 H W 3 in [0, 1], or b 1 h w c, what it makes of them.

    Programs are given the second, see the denoiser's `embed`.
    """


class StepInputs(NamedTuple):
    """What may change from row to row, besides the sampler. A row's values may be one per image.

    weights: n k-1, of guidance. rescale: n. control: n m k r, what each of the r residuals of each
    of m ControlNets counts for in each branch; None without ControlNets. freeu: n 4, the numbers of
    `FreeU`; None without it.
    """

    weights: Any
    rescale: Any
    control: Any = None
    freeu: Any = None


class Inpainting(NamedTuple):
    """Latents that are given: what the mask leaves out is put back at each row.

    mask: b h w 1, one where to generate. latents, noise: b h w c.
    """

    mask: Any
    latents: Any
    noise: Any


class DecoderCondition(NamedTuple):
    """What a decoder is shown that sees what inpainting keeps (AsymmetricAutoencoderKL).

    image: b H W 3 in [-1, 1]. mask: b H W 1, zero where the image is kept.
    """

    image: Any
    mask: Any


class Plan(NamedTuple):
    """One run of the sampler, all of it data."""

    latents: Any
    """b h w c, what the run starts from."""
    conditions: Conditions
    table: Table
    step_inputs: StepInputs
    noise: Any
    """One random key per image (b), or the noise of the row that is run next (b h w c)."""
    inpainting: Inpainting | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The static options of `programs.decode`, a part of what is compiled: no leaf of a tree."""

    upcast: bool
    """Whether float16 parameters are cast to float32."""
    normalize: bool
    """Whether latents_mean and latents_std of the autoencoder count."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A plan with what the host needs to run it and to decode what comes out."""

    plan: Plan
    schedule: Schedule
    noise: Noise
    weights: tuple[float, ...]
    """The weights of guidance, one fewer than there are branches."""
    decoding: Decoding
    decoder_condition: DecoderCondition | None = None
    """What the decoder is shown beside the latents, if it takes anything."""
    finish: Callable[[Images], Images] | None = None
    """Makes the call's images of the decoded ones, where they are not the same."""
    guidance_scale: float | None = None
    """The scale of guidance that a callback has set instead of the call's."""
