"""A run as data: what a task makes of a call and the sampler, networks and decoder are given."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.runtime.noise import Noise
from diffusax.samplers import Schedule, Table

Images = list[Any]


class Tokens(NamedTuple):
    """Texts as a family's text encoders read them."""

    ids: tuple[Any, ...]
    """For each text encoder n ..., int32."""
    weights: Any = None
    """n ..., of the first encoder's tokens; None where all count alike."""
    lengths: Any = None
    """n, how many tokens of the context count; None where all do."""


class Prompt(NamedTuple):
    """What texts became: of n texts, or of b images with k branches each, b k ... ."""

    context: Any
    """n s d."""
    pooled: Any = None
    """n p, where the family has one."""
    lengths: Any = None
    """n, how many of the context's s entries count; None where all do."""


class Conditions(NamedTuple):
    """What the network is told besides the latents and the timestep.

    Leaves have the axes b k, images and branches of guidance; b 1 where the branches agree. The
    branches stand inside, so that a batch split over devices needs no messages.
    """

    context: Any
    """b k s d, what attention looks at."""
    pooled: Any = None
    """b k p, the prompt as one vector, where the family has one."""
    lengths: Any = None
    """b k, how many of the context's s entries count; None where all do."""
    channels: Any = None
    """b k h w c, beside the latents in the network's input: masks, masked or edited images."""
    added: dict[str, Any] | None = None
    """What else a family's network asks for, by name, b k d."""
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


def control_names(count: int) -> tuple[str, ...]:
    """The names of `count` ControlNets among the components, as diffusers saves several."""
    return tuple("controlnet" if i == 0 else f"controlnet_{i}" for i in range(count))


def repeat_branches(y: jax.Array, k: int) -> jax.Array:
    """b (k or 1) ... -> (b k) ..., each image's branches together."""
    return jnp.broadcast_to(y, (y.shape[0], k, *y.shape[2:])).reshape(-1, *y.shape[2:])
