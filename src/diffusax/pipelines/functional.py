"""A whole call as one pure function of (parameters, inputs), for jit, vmap and grad."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.models.latents import to_unit
from diffusax.models.network import Network, Params
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.denoisers import UNetDenoiser
from diffusax.pipelines.families.family import Family
from diffusax.pipelines.programs import Kept, Plan
from diffusax.pipelines.prompts import token_groups
from diffusax.pipelines.tasks import Task
from diffusax.samplers import init_state


class Inputs(NamedTuple):
    """What `generate_fn` reads besides parameters, all arrays.

    ids: for each text encoder g n w t: the prompts' tokens and, if g is 2, the negative prompts'.
    plan: the run. Its table has no padding, so that the number of rows is static and the loop
    differentiable in reverse; its context is computed from the ids.
    kept: see `Job`.
    """

    ids: tuple[Any, ...]
    plan: Plan
    kept: Kept | None = None


def prepare_inputs(c: Components, task: Task, call: Call) -> Inputs:
    """The inputs for a call.

    Raises:
        ValueError: the call needs what a pure function of tokens cannot do.
    """
    for name in ("prompt_embeds", "negative_prompt_embeds", "callback_on_step_end"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name} cannot be given to generate_fn; change its inputs instead")
    if call.noise != "jax" or call.prompt_weighting or call.clip_skip:
        raise ValueError("generate_fn takes neither noise='torch', prompt_weighting nor clip_skip")
    job = task(c, call)
    n = len(job.schedule)
    cut = jax.tree.map(lambda column: jnp.asarray(column[:n]), (job.plan.table, job.plan.knobs))
    plan = job.plan._replace(table=cut[0], knobs=cut[1])
    return Inputs(token_groups(c, call, guided=bool(job.weights)), plan, job.kept)


def generate_fn(c: Components) -> Callable[[Params, Inputs], jax.Array]:
    """The function (params, inputs) -> pictures b H W 3 in [0, 1], float32."""
    encoders = tuple((name, c.networks[name]) for _, name in c.family.text if name in c.networks)
    return functools.partial(_generate, c.family, encoders, c.denoiser, c.networks["vae"])


def _generate(
    family: Family,
    encoders: tuple[tuple[str, Network], ...],
    denoiser: UNetDenoiser,
    vae: Network,
    params: Params,
    inputs: Inputs,
) -> jax.Array:
    plan = inputs.plan
    groups, n = inputs.ids[0].shape[:2]
    encoded = family.encode(
        tuple(network for _, network in encoders),
        tuple(params[name] for name, _ in encoders),
        tuple(ids.reshape(groups * n, *ids.shape[2:]) for ids in inputs.ids),
    )
    branches = tuple(zip(*(jnp.split(leaf, groups) for leaf in encoded)))
    k = plan.knobs.weights.shape[-1] + 1
    order = (0, *[1 if groups == 2 else None] * (k - 1))
    repeats = plan.latents.shape[0] // n
    context, *pooled = programs.arrange(branches, order=order, repeats=repeats)
    added = plan.conditions.added
    if pooled and added is not None:
        added = {**added, "text_embeds": pooled[0]}
    control = denoiser.embed(params, plan.conditions.control)
    conditions = plan.conditions._replace(context=context, added=added, control=control)
    plan = plan._replace(conditions=conditions)
    state, rows = init_state(plan.latents), plan.table.timestep.shape[0]
    state = programs.denoise_rows(denoiser, params, state, plan, 0, rows, rematerialize=True)
    options = {"upcast": False, "normalize": family.normalizes_latents}
    images = programs.decode_pixels(vae, params["vae"], state[0], inputs.kept, **options)
    return to_unit(images)
