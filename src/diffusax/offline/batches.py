"""Batches of images, each with a prompt, seed, sampler, steps and guidance of its own.

A pipeline's call has one sampler and guidance for all its images. In a batch the sampler's rows and
the guidance are data of each image, so that other ones compile nothing.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.freeu import freeu_rows
from diffusax.pipelines import guidance, programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.plan import Plan, StepInputs
from diffusax.pipelines.sample import BoundDenoiser, at_once, decode, sample
from diffusax.pipelines.schedules import make_schedule
from diffusax.pipelines.sizes import image_size, require_channels
from diffusax.pipelines.tasks import guidance_weights, prepare_run
from diffusax.runtime.noise import JaxNoise, image_keys
from diffusax.samplers import Schedule, Table, stack_tables


@dataclasses.dataclass(frozen=True)
class Picture:
    """A checked image to generate from a prompt.

    call: a call with one prompt and one seed. schedule: the rows of its sampler. kind: the key that
    all images of a batch have in common. number: the index of the image; image i of a seed is the
    same as that of a pipeline's call.
    """

    call: Call
    schedule: Schedule
    kind: tuple[Any, ...]
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A plan for all images of a batch. rows: the number of rows of the longest run."""

    plan: Plan
    rows: int


def check_picture(c: Components, call: Call, scheduler: Any, number: int = 0) -> Picture:
    """Checks the arguments of a call for one image with this sampler, and makes its schedule.

    Raises:
        ValueError: an argument is not valid; says which, and what is.
    """
    c = dataclasses.replace(c, scheduler=scheduler)
    size = image_size(c, call)
    require_channels(c, c.latents.channels, "text to image")
    if call.noise != "jax":
        raise ValueError(f"noise must be 'jax' in a batch of several seeds (got {call.noise!r})")
    if not isinstance(call.seed, int) or not 0 <= call.seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to {2**32 - 1} (got {call.seed})")
    guided = bool(guidance_weights(c, call))
    zeros = guided and call.negative_prompt is None and _zeros(c)
    key = None if c.family.batch_key is None else c.family.batch_key(c, call)
    kind = (*size, guided, zeros, key)
    return Picture(call, make_schedule(c, call, size), kind, number)


def plan_batch(c: Components, pictures: Sequence[Picture]) -> Batch:
    """Makes the plan of images of one kind."""
    first, calls = pictures[0], [picture.call for picture in pictures]
    schedules = tuple(picture.schedule for picture in pictures)
    height, width, _, zeros, _ = first.kind
    prompts: list[Any] = [call.prompt for call in calls]
    negative: list[Any] = [call.negative_prompt or "" for call in calls]
    together = dataclasses.replace(
        first.call, prompt=prompts, negative_prompt=None if zeros else negative
    )
    seeds = np.array([call.seed for call in calls], np.uint32)
    numbers = np.array([picture.number for picture in pictures], np.uint32)
    noise = JaxNoise(image_keys(seeds, numbers))
    x = noise.draw("start", c.latents.shape(height, width))
    sigmas = np.array([schedule.init_noise_sigma for schedule in schedules], np.float32)
    x = programs.begin(x, sigmas[:, None, None, None], None, None)
    scales = np.array([call.guidance_scale or 1.0 for call in calls], np.float32)
    size = height, width
    run = prepare_run(c, together, first.schedule, noise, x, size=size, scales=scales)
    table = _table(schedules)
    inputs = _step_inputs(c, pictures, len(table.timestep))
    plan = run.plan._replace(table=table, step_inputs=inputs)
    return Batch(plan, max(map(len, schedules)))


def draw_batch(c: Components, batch: Batch, *, tiled: bool = False) -> tuple[Any, Any]:
    """Generates the images, b H W 3 in [0, 1]; also returns whether each is finite, b."""
    bound = BoundDenoiser(c.denoiser, c.denoiser_params, c.mesh)
    return decode(c, sample(bound, batch.plan, at_once(batch.rows)), c.decoding(), tiled=tiled)


def _zeros(c: Components) -> bool:
    """Returns whether zeros replace a negative prompt that is not given."""
    return bool(c.options.get("force_zeros_for_empty_prompt"))


@functools.lru_cache(8)
def _table(schedules: tuple[Schedule, ...]) -> Table:
    return jax.tree.map(jnp.asarray, stack_tables([schedule.table() for schedule in schedules]))


def _step_inputs(c: Components, pictures: Sequence[Picture], height: int) -> StepInputs:
    columns = []
    for picture in pictures:
        call = picture.call
        weights = guidance_weights(c, call)
        interval = call.guidance_start, call.guidance_end
        columns.append(guidance.per_row(weights, len(picture.schedule), height, interval))
    rescale = np.array([picture.call.guidance_rescale for picture in pictures], np.float32)
    return StepInputs(
        np.stack(columns, 1),
        np.broadcast_to(rescale, (height, len(pictures))),
        freeu=freeu_rows(c.freeu, height, len(pictures)),
    )
